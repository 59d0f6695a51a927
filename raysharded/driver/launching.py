"""What the driver needs of whatever starts its workers: Ray in production, plain processes in tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from raysharded.ids import WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A call returned `value`, or raised `error`."""

    worker: WorkerId
    method: str
    value: Any = None
    error: BaseException | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gone:
    """A worker's process is gone, or could not be started."""

    worker: WorkerId
    reason: str
    error: BaseException | None = None


class Launcher(Protocol):
    """Starts workers and carries calls to them. Used by one thread, but for `close`."""

    def rendezvous(self) -> tuple[str, int]:
        """(host, port) of a store that outlives every worker."""
        ...

    def start(self, worker: WorkerId) -> None:
        """Start a worker; a `Reply` to its method `ready` follows, or `Gone`."""
        ...

    def call(self, worker: WorkerId, method: str, *args: Any) -> None:
        """Call a method of `raysharded.actors.worker.Worker`; a `Reply` follows, or `Gone`."""
        ...

    def kill(self, worker: WorkerId) -> None:
        """End a worker's process now. No `Gone` follows."""
        ...

    def wait(self, timeout_s: float) -> list[Reply | Gone]:
        """What has happened since the last call; waits up to `timeout_s` for the first."""
        ...

    def describe_shortage(self) -> str:
        """What is missing for the workers that could not be started yet; empty if nothing is known."""
        ...

    def close(self) -> None:
        """End every worker and let go of all resources."""
        ...
