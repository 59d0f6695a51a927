"""Workers on the cluster with another protocol. Calls to them are plain, and change nothing. Knows Ray.

A worker of raysharded 0.1 has no `hello`. Its handle shows that, because the path of its class does not exist in this
version; Ray would take the methods of a class that it can import.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from raysharded.errors import ClusterError
from raysharded.protocol.version import ASK, OtherVersion, other_version
from raysharded.protocol.worker_launcher import WorkersOfAnotherVersion
from raysharded.ray_backend.adoption import alive
from raysharded.ray_backend.peers import GROUP, NAMESPACE, Named, find

_ANSWER_S = 10.0
_OTHERS_S = 1.0
"""Time for the others to answer after one has reported its protocol: they have the same."""
_PATIENCE_S = 60.0
"""Longest time without an answer from the cluster, or from any worker."""
_PAUSE_S = 1.0


def workers_of(run: str) -> WorkersOfAnotherVersion | None:
    """The run's started workers of another protocol. Only `hello` or `is_orphan` is called on them.

    A run's workers have one protocol, because no driver starts any beside those of another: silent ones have that of
    the others. Raises ClusterError if the cluster does not answer for a minute.
    """
    since = time.monotonic()
    while True:
        try:
            return _look(run, last=time.monotonic() - since >= _PATIENCE_S)
        except _Unknown:
            pass
        except RayError as error:
            if time.monotonic() - since >= _PATIENCE_S:
                raise ClusterError(
                    f"the cluster has not listed the run's workers for {_PATIENCE_S:g} s "
                    f"({type(error).__name__}). Is it up (`ray status`)?"
                ) from None
        time.sleep(_PAUSE_S)


class _Unknown(Exception):
    """None of the workers answers."""


def _look(run: str, *, last: bool) -> WorkersOfAnotherVersion | None:
    actors = [actor for named in find(run) if (actor := _actor(named)) is not None]
    started = alive() if actors else None
    actors = [actor for actor in actors if started is None or actor._actor_id.hex() in started]
    first = [actor for actor in actors if not hasattr(actor, ASK)]
    if first:
        orphans, silent = _answers([actor.is_orphan for actor in first], _ANSWER_S)
        others = len(orphans) + silent
        return _others(other_version(None), others, orphans, None) if others else None
    greetings, silent = _answers([getattr(actor, ASK) for actor in actors], _ANSWER_S, _OTHERS_S)
    if silent and not greetings and not last:
        raise _Unknown
    other = other_version(greetings[0]) if greetings else None
    waits = [float(greeting["wait_s"]) for greeting in greetings if "wait_s" in greeting]
    orphans = [bool(greeting.get("orphan")) for greeting in greetings]
    return _others(other, len(greetings) + silent, orphans, max(waits, default=None))


def _others(
    version: OtherVersion | None, workers: int, orphans: Sequence[bool], wait_s: float | None
) -> WorkersOfAnotherVersion | None:
    if version is None:
        return None
    return WorkersOfAnotherVersion(version=version, workers=workers, have_driver=not all(orphans), wait_s=wait_s)


def _actor(named: Named) -> Any:
    """The worker's actor; None if it has exited. Raises RayError if the cluster does not answer."""
    try:
        return ray.get_actor(named.name, namespace=NAMESPACE)
    except ValueError:
        return None


def _answers(methods: Sequence[Any], timeout_s: float, others_s: float | None = None) -> tuple[list[Any], int]:
    """The answers, and the number of silent workers; without workers that have exited.

    `others_s`: time for the other answers after the first.
    """
    refs = [method.options(concurrency_group=GROUP).remote() for method in methods]
    if not refs:
        return [], 0
    done, silent = ray.wait(refs, num_returns=1 if others_s is not None else len(refs), timeout=timeout_s)
    if done and silent and others_s is not None:
        done, silent = ray.wait(refs, num_returns=len(refs), timeout=others_s)
    found, failed = [], 0
    for ref in done:
        try:
            found.append(ray.get(ref))
        except ActorDiedError:
            continue
        except RayError:  # unreachable now, or too busy
            failed += 1
    return found, len(silent) + failed
