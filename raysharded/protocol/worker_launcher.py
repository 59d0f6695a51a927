"""Interface between the driver and the launcher of its workers: Ray in production, plain processes in tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from raysharded.ids import WorkerId
from raysharded.protocol.death import DeathExplained
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
    """With an error: the worker's node, if known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerLost:
    """A worker's process has exited, or could not be started."""

    worker: WorkerId
    reason: str
    error: BaseException | None = None
    node_id: str = ""
    """Node of the worker, if known; for a worker that was ready, its `WorkerInfo` has the node too."""
    node_died: bool = False
    """Whether the whole node died."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeLost:
    """A node with workers of the run does not answer; `WorkerLost` of its workers came before. It may come back."""

    node_id: str
    host: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeBack:
    """A node that was `NodeLost` answers again: workers are placed there as on any other."""

    node_id: str
    host: str


@dataclass(frozen=True, kw_only=True, slots=True)
class LeaveNotice:
    """Workers must leave soon: their node is drained or preempted, or they were notified themselves."""

    workers: tuple[WorkerId, ...]
    reason: str
    within_s: float
    """Time that the workers have."""
    whole_node: bool = False
    """Whether it concerns the machine: all other workers there must leave too."""


Happened: TypeAlias = Reply | WorkerLost | DeathExplained | LeaveNotice | NodeLost | NodeBack
"""Everything that a launcher reports."""
GCS_LIMIT_SETTING = "RAY_gcs_rpc_server_reconnect_timeout_s"
"""Ray's setting of the time for which its processes outlive the GCS: an environment variable of each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GcsHealth:
    """Whether the cluster's GCS answers."""

    silent_s: float
    """Seconds for which it has not; 0 if it answered the newest query."""
    limit_s: float
    """Seconds without it after which Ray ends its processes."""
    leased: bool
    """Whether workers outlive the driver."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkersOfAnotherVersion:
    """Workers of the run whose protocol this version does not have; they are left alone."""

    version: OtherVersion
    workers: int
    have_driver: bool
    """Whether one of them had a call of its driver within the lease."""
    wait_s: float | None = None
    """Longest time that they still wait for a new driver; None: they cannot be queried."""


class LeadershipCheck(Protocol):
    """Checks whether a driver still leads its run. Any thread."""

    def is_sure(self) -> bool:
        """Whether it is known, without a query, that no other driver can lead the run now."""
        ...

    def may_act(self) -> bool:
        """Whether no other driver can lead the run now. Queries storage if necessary, however long it takes.

        False if storage does not answer.
        """
        ...


class Launcher(Protocol):
    """Starts workers and carries calls to them. Used by one thread, except for `close`."""

    def rendezvous(self) -> tuple[str, int]:
        """(host, port) of a rendezvous store that outlives every worker."""
        ...

    def secret(self, prefix: str) -> bytes:
        """The store's secret of the workers that meet at this prefix. For the calls to those workers alone."""
        ...

    def where(self) -> tuple[str, str]:
        """(cluster, job) of this process, for `has_ended`; empty if there is none."""
        ...

    def has_ended(self, cluster: str, job: str) -> bool:
        """Whether that job of this cluster is known to be over."""
        ...

    def of_another_version(self) -> WorkersOfAnotherVersion | None:
        """Workers that a driver of another protocol left alive; None if there are none."""
        ...

    def enter(self, terms: DriverSession, hold: LeadershipCheck) -> FoundWorkers:
        """Begin for this driver: adopt and free the workers that the run's driver before left alive.

        Call it before any worker is started. `hold` is checked before a worker that outlives its driver is killed.
        """
        ...

    def start(self, worker: WorkerId, avoid: tuple[str, ...] = ()) -> None:
        """Start a worker on none of the nodes `avoid`; a `Reply` to its method `ready` follows, or `WorkerLost`.

        It waits as long as no other node has enough free resources. A worker that still waits may be started again,
        with other nodes to avoid.
        """
        ...

    def call(self, worker: WorkerId, method: str, *args: Any) -> None:
        """Call a method of `raysharded.actors.worker.Worker`; a `Reply` follows, or `WorkerLost`."""
        ...

    def kill(self, worker: WorkerId, *, at_once: bool = True) -> None:
        """End a worker's process; a healthy one may get a moment to exit in order. No `WorkerLost` follows."""
        ...

    def wait(self, timeout_s: float) -> list[Happened]:
        """Events since the last call; waits up to `timeout_s` for the first.

        When a node dies, all of its workers are `WorkerLost` in one answer.
        """
        ...

    def describe_shortage(self, wanted: int | None = None) -> str:
        """Resources missing for workers that could not be started yet; empty if unknown, or if no resource is missing:
        the workers are starting.

        `wanted`: the number of workers that are enough; None: the least number, without which the run waits.
        """
        ...

    def gcs_health(self) -> GcsHealth | None:
        """Health of the cluster's GCS, without a query; None if the workers need none."""
        ...

    def abandon(self) -> None:
        """Release the workers that another driver may own by now; end those that no other driver can have."""
        ...

    def close(self) -> None:
        """End every worker and release all resources."""
        ...
