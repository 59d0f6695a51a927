"""Hosts of runs on a Ray cluster: their names, and their descriptions of themselves. Knows Ray."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError

from raysharded.errors import ClusterError
from raysharded.protocol.version import other_version
from raysharded.ray_backend.peers import NAMESPACE, host_name as host_name, host_of as host_of
from raysharded.run.hosted import submission
from raysharded.run.results import Status

_NAME = re.compile(r"driver-([0-9a-f]{16})-(.+)")
FOLLOW, ASK = "follow", "ask"
"""Groups of concurrent calls: those that wait for an event of the run, and other requests."""
_ANSWER_S = 30.0
_MODULE_OF_THE_FIRST = "raysharded.run.host"
_LOOK_UP_S = 0.1


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """A host's description of itself."""

    name: str
    url: str
    identity: str
    """Identity of its job: equal for specifications that compute the same."""
    pid: int
    node: str
    since: float
    """Start time of the run: seconds since 1970."""
    step: int
    max_steps: int
    is_over: bool
    is_stopping: bool
    """Whether it has received a stop request."""

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"process {self.pid} on {self.node}, started {since}, at step {self.step} of {self.max_steps}"


def hosts() -> dict[str, str]:
    """Hosts of this cluster, also those whose run is over: actor's name -> run's name."""
    found: dict[str, str] = {}
    for actor in ray.util.list_named_actors(all_namespaces=True):
        match = _NAME.fullmatch(actor["name"])
        if actor["namespace"] == NAMESPACE and match is not None:
            found[match[0]] = match[2]
    return found


def of_another_version(name: str, url: str) -> str:
    """Message about a run whose host has another protocol; empty if it has ours, or there is no host."""
    host = host_of(host_name(name, url))
    greeting = None if host is None else submission.read_greeting(host._actor_id.hex())
    if host is None or (greeting is None and not _is_of_the_first(host)):  # ours, which is starting or exiting
        return ""
    other = other_version(greeting)
    if other is None:
        return ""
    return (
        f"run {name!r} under {url} is driven by {other}, which this version cannot talk to. Use that one to change or "
        "stop it"
    )


def _is_of_the_first(host: Any) -> bool:
    """Whether raysharded 0.1 made the host, which stored no greeting."""
    return bool(host._ray_actor_creation_function_descriptor.module_name == _MODULE_OF_THE_FIRST)


def status_of(host: Any, timeout_s: float) -> Status | None:
    """The status that a host reports; None without an answer within the time."""
    try:
        found: Status = ray.get(host.status.remote(), timeout=timeout_s)
        return found
    except RayError:
        return None


def about(host: Any) -> About | None:
    """A host's description of itself; None if it has exited. Raises ClusterError if it does not answer."""
    deadline = time.monotonic() + _ANSWER_S
    while True:
        try:
            found: About = ray.get(host.about.remote(), timeout=max(0.0, deadline - time.monotonic()))
            return found
        except ActorDiedError:
            return None
        except RayError as error:  # it is being restarted, or is slow
            if time.monotonic() >= deadline:
                raise ClusterError(
                    f"a driver does not answer within {_ANSWER_S:g} s ({type(error).__name__})"
                ) from None
            time.sleep(_LOOK_UP_S)
