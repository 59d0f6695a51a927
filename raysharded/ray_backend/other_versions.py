"""Workers on the cluster whose protocol is another one. Calls to them are plain, and change nothing. Knows Ray.

A worker of raysharded 0.1 has no `hello`. Its handle tells, as the path of its class is none of this version: Ray would
take the methods of a class that it can import.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from raysharded.protocol.version import ASK, other_version
from raysharded.protocol.worker_launcher import WorkersOfAnotherVersion
from raysharded.ray_backend.adoption import alive
from raysharded.ray_backend.peers import GROUP, find, handle

_ANSWER_S = 10.0


def workers_of(run: str) -> WorkersOfAnotherVersion | None:
    """The run's workers of another protocol that have started. Asked for nothing but `hello`, or `is_orphan`."""
    actors = [actor for named in find(run) if (actor := handle(named)) is not None]
    started = alive() if actors else None
    asked = {
        number: getattr(actor, ASK if hasattr(actor, ASK) else "is_orphan").options(concurrency_group=GROUP).remote()
        for number, actor in enumerate(actors)
        if started is None or actor._actor_id.hex() in started
    }
    answers, silent = _answers(asked)
    answers |= {number: True for number in silent if not hasattr(actors[number], ASK)}  # stopped, or very busy
    greetings = {number: one if isinstance(one, dict) else {"orphan": one} for number, one in answers.items()}
    versions = {n: other_version(one if "protocol" in one else None) for n, one in greetings.items()}
    others = {number: version for number, version in versions.items() if version is not None}
    if not others:
        return None
    waits = [greetings[number].get("wait_s") for number in others]
    return WorkersOfAnotherVersion(
        version=max(others.values(), key=lambda other: other.protocol),
        workers=len(others),
        have_driver=not all(greetings[number].get("orphan") for number in others),
        wait_s=max((float(wait) for wait in waits if wait is not None), default=None),
    )


def _answers(asked: Mapping[int, Any]) -> tuple[dict[int, Any], set[int]]:
    """Those that come in time, and who is silent; without those that have ended."""
    if not asked:
        return {}, set()
    number_of = {ref: number for number, ref in asked.items()}
    done, silent = ray.wait(list(number_of), num_returns=len(number_of), timeout=_ANSWER_S)
    found: dict[int, Any] = {}
    for ref in done:
        with contextlib.suppress(RayError):
            found[number_of[ref]] = ray.get(ref)
    return found, {number_of[ref] for ref in silent}
