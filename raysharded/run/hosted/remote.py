"""The handle on a run that a host drives, from any process of the cluster. Knows Ray."""

from __future__ import annotations

import contextlib
import math
import secrets
import time
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError

from raysharded.errors import ClusterError, RunFailed
from raysharded.ray_backend.cluster import refuse_a_lost_cluster
from raysharded.run.handle import ENTRIES_OF_ONE, Ask, Run
from raysharded.run.hosted.registry import ASK, FOLLOW, host_name, host_of, of_another_version
from raysharded.run.offline import StoredRun
from raysharded.run.results import Entry, Result, Status

_ANSWER_S = 30.0
_PATIENCE_S = 180.0
"""Longest time that the restart of a host may take."""
_POLL_S = 10.0
_PAUSE_S = 0.5
_LOOK_S = 5.0
"""Interval at which a waiting call checks whether the cluster still answers."""
_LAST_WORD_S = 60.0
"""Longest time until the storage of a run without a host shows its end."""


class _NoHost(Exception):
    """The host, or the cluster, is lost permanently."""


class AttachedRun(Run):
    """A run that continues without this process. Can be sent to other processes."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.url = name, url
        self._actor_name = host_name(name, url)
        self._host: Any = None

    def __reduce__(self) -> tuple[type[AttachedRun], tuple[str, str]]:
        return AttachedRun, (self.name, self.url)

    def status(self) -> Status:
        try:
            found: Status = self._call("status")
            return found
        except _NoHost:
            return self._stored().status()

    def entries(self, after: int = 0, timeout_s: float = 0.0) -> list[Entry]:
        try:
            found: list[Entry] = self._call("entries", after, timeout_s, group=FOLLOW, takes_s=timeout_s)
            return found
        except _NoHost:
            return []

    def is_restarted(self, after: int, number: int) -> bool:
        return (number - 1) // ENTRIES_OF_ONE > (after - 1) // ENTRIES_OF_ONE

    def is_over(self) -> bool:
        try:
            return bool(self._call("outcome", 0.0, group=FOLLOW)[0])
        except _NoHost:
            return True

    def wait(self, timeout_s: float | None = None) -> Result:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        try:
            while True:
                left_s = _POLL_S if deadline is None else max(0.0, deadline - time.monotonic())
                over, result, error = self._outcome(min(_POLL_S, left_s))
                if error is not None:
                    raise error
                if result is not None:
                    return result
                if over:
                    raise RunFailed(f"Run {self.name!r} is over.")
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"run {self.name!r} is still {self.status().phase} after {timeout_s} s")
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"Interrupted. Run {self.name!r} continues: raysharded.attach({self.name!r}) returns its handle."
            ) from None

    def wait_until_begun(self, timeout_s: float | None = None) -> None:
        with contextlib.suppress(_NoHost):
            self._call("status", takes_s=_PATIENCE_S)  # its process may have to start first
        super().wait_until_begun(timeout_s)

    def _outcome(self, timeout_s: float) -> tuple[bool, Result | None, BaseException | None]:
        try:
            found: tuple[bool, Result | None, BaseException | None] = self._call(
                "outcome", timeout_s, group=FOLLOW, takes_s=timeout_s
            )
            return found
        except _NoHost:
            return True, self._last_word(), None

    def _last_word(self) -> Result:
        try:
            return self._stored().wait(_LAST_WORD_S)
        except TimeoutError:
            step = self._stored().status().step
            raise RunFailed(
                f"the driver of run {self.name!r} was lost without a final journal entry; its newest recorded step is "
                f"{step}. Start it again to resume it."
            ) from None

    def _ask(self, what: Ask, **arguments: Any) -> Any:
        request, takes_s = secrets.token_hex(8), arguments.get("timeout_s")
        waits = what in ("checkpoint", "fork")  # a caller that was killed still takes a thread, which no stop may lack
        try:
            value, error = self._call(
                "ask",
                request,
                what,
                arguments,
                group=FOLLOW if waits else ASK,
                takes_s=None if waits and takes_s is None else takes_s or 0.0,
            )
        except _NoHost:
            return self._stored()._ask(what, **arguments)
        if error is not None:
            raise error
        return value

    def _stored(self) -> StoredRun:
        return StoredRun(self.name, self.url)

    def _call(self, method: str, *arguments: Any, group: str | None = None, takes_s: float | None = 0.0) -> Any:
        """Result of the host's method; `takes_s`: its own duration (None: unlimited).

        Waits for a host that is being restarted. Raises _NoHost, ClusterError.
        """
        since = time.monotonic()
        while True:
            if not ray.is_initialized():
                raise _NoHost
            try:
                refuse_a_lost_cluster(f"run {self.name!r} cannot be reached")
                host = self._host or host_of(self._actor_name)
                if host is None:
                    raise _NoHost
                other = of_another_version(self.name, self.url) if self._host is None else ""
                if other:
                    raise ClusterError(f"{other}.")
                self._host = host
                bound = getattr(host, method)
                bound = bound.options(concurrency_group=group) if group else bound
                return self._answer(bound.remote(*arguments), None if takes_s is None else takes_s + _ANSWER_S)
            except RayTaskError as error:
                raise ClusterError(f"the driver of run {self.name!r} could not answer: {error}") from error
            except ActorDiedError:  # its name is free in a moment, or has another host
                self._host = None
                time.sleep(_PAUSE_S)
            except GetTimeoutError:
                raise ClusterError(
                    f"the driver of run {self.name!r} did not answer within {_ANSWER_S:g} s. Retry: its "
                    "machine may be busy, or lost."
                ) from None
            except RayError as error:  # it is being restarted
                if time.monotonic() - since >= _PATIENCE_S:
                    raise ClusterError(
                        f"the driver of run {self.name!r} has been unreachable for {_PATIENCE_S:g} s: "
                        f"{type(error).__name__}. Is the cluster up (`ray status`)?"
                    ) from None
                time.sleep(_PAUSE_S)

    def _answer(self, call: Any, timeout_s: float | None) -> Any:
        """Result of a call. Raises its error, GetTimeoutError, or ClusterError if the cluster is lost meanwhile."""
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while not ray.wait([call], timeout=max(0.0, min(_LOOK_S, deadline - time.monotonic())))[0]:
            if time.monotonic() >= deadline:
                raise GetTimeoutError
            refuse_a_lost_cluster(f"run {self.name!r} cannot be reached")
        return ray.get(call)
