"""What the driver needs of whatever starts its workers: Ray in production, plain processes in tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from raysharded.ids import WorkerId
from raysharded.protocol.session import DriverSession, FoundWorkers
from raysharded.protocol.version import OtherVersion


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    """A call returned `value`, or raised `error`."""

    worker: WorkerId
    method: str
    value: Any = None
    error: BaseException | None = None
    node_id: str = ""
    """With an error: the node that the worker is on, if it is known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLost:
    """A worker's process is gone, or could not be started."""

    worker: WorkerId
    reason: str
    error: BaseException | None = None
    node_id: str = ""
    """The node that it was on, if that is known; of a worker that was ready its `WorkerInfo` say it too."""
    node_died: bool = False
    """It is gone because its whole node is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveNotice:
    """Workers must leave soon: their node is drained or preempted, or somebody told them."""

    workers: tuple[WorkerId, ...]
    reason: str
    within_s: float
    """How long they have."""
    whole_node: bool = False
    """It is said of the machine: all other workers there must leave too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersOfAnotherVersion:
    """Workers of the run that this version cannot talk to; they are left alone."""

    version: OtherVersion
    workers: int
    have_driver: bool
    """Whether one of them has heard of its driver within the lease."""
    wait_s: float | None = None
    """How long they still wait for a driver of theirs at most; None: they cannot be asked."""


class LeadershipCheck(Protocol):
    """Checks whether a driver still leads its run. Any thread."""

    def is_sure(self) -> bool:
        """Whether it is known, without asking anybody, that nobody else can own the run now."""
        ...

    def may_act(self) -> bool:
        """The same, after asking storage if that takes it, however long; False if it does not tell."""
        ...


class Launcher(Protocol):
    """Starts workers and carries calls to them. Used by one thread, but for `close`."""

    def rendezvous(self) -> tuple[str, int]:
        """(host, port) of a store that outlives every worker."""
        ...

    def where(self) -> tuple[str, str]:
        """(cluster, job) that this process works in, for `has_ended`; empty if there is none."""
        ...

    def has_ended(self, cluster: str, job: str) -> bool:
        """Whether that job of this cluster is known to be over."""
        ...

    def of_another_version(self) -> WorkersOfAnotherVersion | None:
        """Workers that a driver of another protocol left alive; None if there are none."""
        ...

    def enter(self, terms: DriverSession, hold: LeadershipCheck) -> FoundWorkers:
        """Begin, for this driver: the workers that the run's driver before left alive, free and taken over; to be
        called before any is started. `hold` is asked before a worker that outlives its driver is killed."""
        ...

    def start(self, worker: WorkerId, avoid: tuple[str, ...] = ()) -> None:
        """Start a worker on none of the nodes `avoid`; a `Reply` to its method `ready` follows, or `WorkerLost`.

        As long as there is no other node with room for it, it waits.
        """
        ...

    def call(self, worker: WorkerId, method: str, *args: Any) -> None:
        """Call a method of `raysharded.actors.worker.Worker`; a `Reply` follows, or `WorkerLost`."""
        ...

    def kill(self, worker: WorkerId, *, at_once: bool = True) -> None:
        """End a worker's process; one that is well may be given a moment to end in order. No `WorkerLost` follows."""
        ...

    def wait(self, timeout_s: float) -> list[Reply | WorkerLost | LeaveNotice]:
        """What has happened since the last call; waits up to `timeout_s` for the first.

        When a node dies, all of its workers are `WorkerLost` in one answer.
        """
        ...

    def describe_shortage(self) -> str:
        """What is missing for the workers that could not be started yet; empty if nothing is known."""
        ...

    def abandon(self) -> None:
        """Let go of the workers that another driver may own by now; end those that nobody else can have."""
        ...

    def close(self) -> None:
        """End every worker and let go of all resources."""
        ...
