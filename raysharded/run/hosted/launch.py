"""Start of a run in a separate host. Knows Ray."""

from __future__ import annotations

import contextlib
import logging
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from raysharded.errors import ClusterError, ConfigError, RunOwnedElsewhere
from raysharded.ownership.start_mark import StartMark
from raysharded.protocol.session import run_digest
from raysharded.ray_backend import capacity, cluster
from raysharded.ray_backend.bundles import captured
from raysharded.ray_backend.peers import NAMESPACE
from raysharded.run.hosted import submission
from raysharded.run.hosted.driver_actor import LINGER_S, Host
from raysharded.run.hosted.driver_key import refuse_a_key_that_is_not_sent
from raysharded.run.hosted.registry import ASK, FOLLOW, about, host_name, host_of, of_another_version
from raysharded.run.hosted.remote import AttachedRun
from raysharded.run.offline import ENDED, StoredRun

if TYPE_CHECKING:
    from raysharded.run.spec import RunSpec

_log = logging.getLogger("raysharded.driver")
_THREADS = {FOLLOW: 32, ASK: 16}
_OPTIONS: dict[str, Any] = {
    "num_cpus": 0,
    "max_restarts": -1,
    "max_concurrency": 8,
    "lifetime": "detached",
    "namespace": NAMESPACE,
    "scheduling_strategy": "DEFAULT",  # not in the placement group of who starts it, with which it would end
}
_HEAD = "node:__internal_head__"
"""Resource of which Ray gives its head node 1, so that actors can be bound to it, as those of Ray Serve are."""
_FREE_S = 30.0
"""Longest time that the name of an exiting host may stay taken."""
_LOOK_UP_S = 0.1
_NOT_TAKEN = "DEPENDENCIES_UNREADY"
"""Ray's state of a registered actor whose creation its maker has yet to complete."""
_TAKEN_S = 30.0


def start_hosted(spec: RunSpec, *, take_over: bool = False) -> AttachedRun:
    """Start a run in a separate host, on the cluster that is found, or on one that is started here.

    Raises RunOwnedElsewhere if it has a host already, ConfigError if the specification cannot be sent, and
    StorageError.
    """
    from raysharded.checkpoint import check_writable, open_storage
    from raysharded.checkpoint.removal_mark import refuse_removed

    spec = submission.absolute(spec)
    storage = open_storage(spec.url)
    refuse_removed(storage, ConfigError)
    check_writable(storage)
    order = submission.make_order(spec, take_over=take_over)

    def check() -> None:
        spec.require_local_files()
        refuse_a_key_that_is_not_sent(order)

    is_ours = cluster.connect(partial(_announce, order.name), check)
    (capacity.refuse_the_impossible if is_ours else capacity.warn_of_too_few)(spec.scaling)
    name, mark = host_name(order.name, order.url), StartMark(storage)
    while True:
        _wait_for_another_version(order.name, order.url)
        _make_room(name, take_over=take_over)
        mark.put(driver_is_here=False)
        key = submission.put_order(run_digest(order.url), order)
        try:
            host = _host_class().options(**_OPTIONS, **_on_the_head(), name=name).remote(key, start_hosted)
        except ValueError:
            submission.forget(key)
            if host_of(name) is None:
                mark.remove()
                raise
            continue  # another process was faster
        submission.put_greeting(host._actor_id.hex())
        _wait_until_taken(host)
        return AttachedRun(order.name, order.url)


def _announce(name: str, where: str) -> None:
    _log.info("%s the driver of run %s", where, name)
    if bundles := captured({}):
        _log.warning(
            "run %s is outside of the placement group of this process (%s), with which it would end: its driver and "
            "workers use what the cluster has beside it. fit() uses the bundles.",
            name,
            bundles,
        )


def _wait_for_another_version(name: str, url: str) -> None:
    """Return when the run has no host of another protocol: after its run, such a host stays for a while.

    Raises RunOwnedElsewhere if it still drives.
    """
    deadline = time.monotonic() + LINGER_S + _FREE_S
    while other := of_another_version(name, url):
        if StoredRun(name, url).status().phase not in ENDED or time.monotonic() >= deadline:
            raise RunOwnedElsewhere(f"{other}; then start it again: it resumes from its newest checkpoint.")
        time.sleep(_LOOK_UP_S * 10)


def _wait_until_taken(host: Any) -> None:
    """Return when the cluster has accepted the host: before, it would end with this process, though detached."""
    deadline = time.monotonic() + _TAKEN_S
    while ray._private.state.actors(host._actor_id.hex()).get("State", _NOT_TAKEN) == _NOT_TAKEN:
        if time.monotonic() >= deadline:
            raise ClusterError(f"the cluster did not accept the run's driver within {_TAKEN_S:g} s. Is it up?")
        time.sleep(_LOOK_UP_S)


def _on_the_head() -> dict[str, Any]:
    """Resources that bind the host to the head node.

    A cluster cannot lose that node and keep its actors; any other node would be a further point of failure.
    """
    return {"resources": {_HEAD: 0.001}} if _HEAD in ray.cluster_resources() else {}


def _host_class() -> Any:
    grouped: Any = ray.remote(concurrency_groups=_THREADS)  # type: ignore[call-overload]  # it has them
    return grouped(Host)


def _make_room(name: str, *, take_over: bool) -> None:
    """Return when no host has this name. Raises RunOwnedElsewhere if one has it, and drives."""
    host = host_of(name)
    found = about(host) if host is not None else None
    if found is not None and not found.is_over and not take_over:
        raise RunOwnedElsewhere(
            f"run {found.name!r} under {found.url} is driven already ({found}). raysharded.attach({found.name!r}) "
            "returns its handle. Stop the run to start it anew, or pass take_over=True."
        )
    if host is None:
        return
    with contextlib.suppress(RayError):
        ray.kill(host, no_restart=True)
    with contextlib.suppress(Exception):  # a few bytes of the cluster's memory
        submission.forget_greeting(host._actor_id.hex())
    deadline = time.monotonic() + _FREE_S
    while host_of(name) is not None:
        if time.monotonic() >= deadline:
            raise ClusterError(f"the driver {name} has ended, and its name is still taken after {_FREE_S:g} s. Retry.")
        time.sleep(_LOOK_UP_S)
