"""The facts about its driver that a worker needs to outlive it, and its report to the next one.

Frozen values, and pure decisions about them. A worker on a cluster that existed before the driver is leased to it:
every call carries the driver's epoch and renews the lease. A driver with a newer epoch takes the worker over; the older
one is rejected from then on.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from types import CodeType
from typing import Any

from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Copy, ShardMap, Share, StateSpec, shard_map
from raysharded.overrides import Decisions, agree
from raysharded.protocol.job import Job
from raysharded.protocol.messages import FromMemory, StepReport, Stopped, WorkerInfo

_MAY_DIFFER = ("run_name", "faults", "grace_s", "preemption_notices", "collective_timeout_s")
"""Fields of a job that may differ: adopted workers keep those of the driver before."""
_SAVES_TOLD = 128
"""Steps for which a new driver learns, although the journal has them, that a checkpoint was begun."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverSession:
    """A driver, as its workers know it."""

    driver: str
    epoch: int
    """First generation of its leadership: higher than that of every earlier driver."""
    run_name: str
    global_batch_size: int
    metadata: Mapping[str, Any]
    """Metadata for every checkpoint's manifest."""
    signed: bool
    """Whether checkpoints are signed: only the driver can sign, so there is no checkpoint without it."""
    lease_s: float
    orphan_wait_s: float
    storage_patience_s: float = 0.0
    """Time for which workers without a driver retry their checkpoint while storage takes no writes."""
    identity: str = ""
    """Identity of the run's folder, without which workers write nothing; empty for other storages."""
    recorded_step: int = 0
    """Newest step in the journal when the driver began: it needs no reports of older ones."""
    secret: bytes = field(default=b"", repr=False)
    """Secret with which its workers reach each other without it: it is in no journal or log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedWorker:
    """A worker that was taken over, with what it holds."""

    worker: WorkerId
    facts: WorkerInfo
    stopped: Stopped
    reports: tuple[StepReport, ...]
    """Reports of the newest steps that it took part in: earlier drivers may not have recorded them."""
    fence: GenerationId
    """Generation up to which nothing runs, or will run, on the worker."""
    decisions: Decisions
    """Decisions of its newest generation, with which its holdings were computed."""
    job: str
    """Identity of the job that it was started with."""
    epoch: int
    """Epoch of the driver that started it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreedWorker:
    """The report of a freed worker."""

    facts: WorkerInfo | None
    """Facts of the worker; None if it had not started."""
    stopped: Stopped
    reports: tuple[StepReport, ...]
    """Reports of the newest steps that it took part in: the driver may not have recorded them."""
    fence: GenerationId
    """Generation up to which nothing runs, or will run, on the worker."""
    decisions: Decisions
    """Decisions of its newest generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundWorkers:
    """Workers that a driver found when it began."""

    adopted: tuple[AdoptedWorker, ...] = ()
    ended: int = 0
    """Number of the run's workers that could not be taken over, and were ended."""


def to_take_over(answers: Iterable[AdoptedWorker], job: str) -> list[AdoptedWorker]:
    """The workers that a driver takes over from those that would obey it: workers of its job, one of each number."""
    taken: dict[WorkerId, AdoptedWorker] = {}
    for one in sorted(answers, key=lambda one: (-one.epoch, one.worker)):
        if one.job == job and one.worker not in taken:
            taken[one.worker] = one
    return list(taken.values())


def run_digest(run_url: str) -> str:
    """Digest of a run for the names of its workers, 16 characters."""
    return hashlib.blake2b(run_url.encode(), digest_size=8).hexdigest()


# -- the job --


def job_identity(job: Job) -> str:
    """A digest that is equal for jobs that compute the same, in whichever process they were made.

    It covers every setting, the classes of task and data, the code of their methods and their attributes; not the code
    of functions that these call. A value that cannot be pickled never equals anything.
    """
    digest = hashlib.blake2b(digest_size=16)
    for item in fields(job):
        if item.name not in _MAY_DIFFER:
            digest.update(item.name.encode())
            _add(digest.update, getattr(job, item.name))
    return digest.hexdigest()


def _add(update: Any, value: Any) -> None:
    cls = type(value)
    if is_dataclass(value) and cls.__module__.startswith("raysharded."):
        update(cls.__qualname__.encode())
        for item in fields(value):
            _add(update, getattr(value, item.name))
        return
    if cls.__module__ == "builtins":
        update(pickle.dumps(value, 5))
        return
    for base in cls.__mro__:
        if base.__module__.startswith("raysharded."):  # rules describe the computation: `raysharded.numerics`
            update(base.__qualname__.encode())
        elif base.__module__ != "builtins":
            update(f"{base.__module__ if base.__module__ != '__main__' else ''}.{base.__qualname__}".encode())
            for name, member in sorted(vars(base).items()):
                code = getattr(getattr(member, "__func__", member), "__code__", None)
                if isinstance(code, CodeType):
                    update(name.encode())
                    _add_code(update, code)
    update(_state_of(value))


def _state_of(value: Any) -> bytes:
    try:
        return pickle.dumps(value.__getstate__(), 5)
    except Exception:  # noqa: BLE001 - any class may fail in its own way
        return repr(id(value)).encode()


def _add_code(update: Any, code: CodeType) -> None:
    update(code.co_code)
    update(repr(code.co_names).encode())
    for const in code.co_consts:
        if isinstance(const, CodeType):
            _add_code(update, const)
        else:
            update(repr(sorted(const, key=repr) if isinstance(const, frozenset) else const).encode())


# -- the journal --


def last_recorded_step(entries: Iterable[Mapping[str, Any]]) -> int:
    """Newest step that counts and is recorded in the journal."""
    step = 0
    for entry in entries:
        match entry["kind"]:
            case "started":  # it may follow steps that were not recorded yet
                step = min(step, int(entry["resumed_after_step"]))
            case "generation" | "step":
                step = int(entry["step"])
    return step


def taken_back(entries: Iterable[Mapping[str, Any]]) -> GenerationId:
    """Newest generation whose steps were undone; state that it or an older one left in memory is invalid."""
    generation = newest = 0
    for entry in entries:
        if entry["kind"] == "generation":
            newest = int(entry["generation"])
        elif entry["kind"] in ("rewind", "corruption"):  # a requested one follows the next generation's entry
            generation = int(entry.get("generation", newest))
    return GenerationId(generation)


def believed(stopped: Stopped, decisions: Decisions, after: GenerationId, decided: Decisions) -> Stopped:
    """A worker's holdings, without state that was undone or computed with other decisions."""
    held = tuple(one for one in stopped.held if one.layout_id > after and agree(decisions, decided, one.step))
    return replace(stopped, held=held)


def for_next_driver(reports: Iterable[StepReport], after_step: int) -> tuple[StepReport, ...]:
    """The reports that a new driver needs, whose journal has the steps up to `after_step`.

    They include those of steps shortly before whose checkpoint was begun: it may have had no outcome.
    """
    return tuple(one for one in reports if one.step > after_step - (_SAVES_TOLD if one.save_started else 0))


def unrecorded(reports: Iterable[StepReport], after_step: int, up_to: int) -> list[StepReport]:
    """One report of every reported step in (after_step, up_to], in order, from the newest generation."""
    newest: dict[int, StepReport] = {}
    for report in reports:
        known = newest.get(report.step)
        if after_step < report.step <= up_to and (known is None or known.generation < report.generation):
            newest[report.step] = report
    return [newest[step] for step in sorted(newest)]


# -- the orphan checkpoint --


@dataclass(frozen=True, kw_only=True, slots=True)
class PartOf:
    """The buffer of one rank, which `holder` is to write."""

    holder: WorkerId
    rank: int
    layout: int
    medium: str
    step: int


def parts_to_write(source: FromMemory) -> tuple[PartOf, ...]:
    """Buffers with their writers, by rank, that write the state once; () if no single layout is complete.

    Ranks with nothing to write are omitted.
    """
    by_layout: dict[int, list[Copy]] = {}
    for copy in source.copies:
        by_layout.setdefault(copy.layout_id, []).append(copy)
    for layout in sorted(by_layout, reverse=True):
        parts = _parts_of(by_layout[layout], layout, source)
        if parts:
            return parts
    return ()


def _parts_of(copies: Sequence[Copy], layout: int, source: FromMemory) -> tuple[PartOf, ...]:
    parts: list[PartOf] = []
    world_size, tensor = copies[0].world_size, copies[0].tensor
    for rank in range(world_size):
        held = [(copy.holders[rank], copy.medium) for copy in copies]
        found = next(((holder, medium) for holder, medium in held if holder is not None), None)
        if found is not None:
            parts.append(PartOf(holder=found[0], rank=rank, layout=layout, medium=found[1], step=source.step))
        elif rank == 0 or _writes_alone(source.spec, shard_map(source.spec, world_size, rank, tensor)):
            return ()
    return tuple(parts)


def _writes_alone(spec: StateSpec, pieces: ShardMap) -> bool:
    """Whether this rank has data that no other rank writes."""
    return not spec.replicated[pieces.part(Share()).tensor].all()


# -- the lease, as a worker sees it --


_QUIET_LEASE = 0.3
"""Fraction of the lease's time without a call after which the worker queries the cluster: more than
the time between two calls."""
_SILENT_LEASE = 0.6
"""Fraction for which the cluster must not have answered to count as lost; with the other one less than the lease."""


@dataclass(slots=True)
class LeaseState:
    """The driver that a worker obeys, and the time since its last call. Times are monotonic seconds."""

    terms: DriverSession
    heard_at: float
    ending: bool = False
    """Whether the orphan checkpoint is being written: only a driver with a newer epoch is obeyed."""
    cluster_lost: bool = False
    """Whether the cluster's head node does not answer: then no other driver can come, and Ray soon ends the worker."""
    cluster_silent_since: float | None = None
    """Time since which the head node has answered no query."""

    def is_quiet(self, now: float) -> bool:
        """Whether the driver has not called for longer than it should: then the head node is queried."""
        return now - self.heard_at > _QUIET_LEASE * self.terms.lease_s

    def note_cluster(self, began: float, now: float, *, answers: bool) -> None:
        """Record a query of the head node from `began` to `now`; `answers`: also if none was needed.

        A busy head node may answer late once. It counts as lost when it has not answered for a part of the lease.
        """
        if answers:
            self.cluster_silent_since = None
        elif self.cluster_silent_since is None:
            self.cluster_silent_since = began
        since = self.cluster_silent_since
        self.cluster_lost = since is not None and now - since >= _SILENT_LEASE * self.terms.lease_s

    def refusal(self, epoch: int) -> str:
        """Reason why a call of this epoch is rejected; empty if it is not."""
        if self.ending and epoch <= self.terms.epoch:
            return "this worker was without a driver for too long, and ends"
        if epoch < self.terms.epoch:
            return (
                f"driver {self.terms.driver} (epoch {self.terms.epoch}) has taken this worker over from epoch {epoch}"
            )
        return ""

    def follow(self, terms: DriverSession, now: float) -> None:
        """Obey this driver from now on."""
        self.terms, self.heard_at, self.ending = terms, now, False

    def end(self, epoch: int, now: float) -> bool:
        """Obey only a driver that follows the leader of the orphan checkpoint, which took the run with this epoch.

        False, with nothing changed, if there is a driver or a newer leader.
        """
        if epoch < self.terms.epoch or not self.has_nobody(now):
            return False
        self.terms, self.ending = replace(self.terms, epoch=epoch), True
        return True

    def has_nobody(self, now: float) -> bool:
        """Whether the worker has no driver."""
        return self.ending or self.is_orphaned(now)

    def stood_still(self, seconds: float, now: float) -> None:
        """Exclude time in which this process was suspended: the driver's calls of that time are not received yet."""
        self.heard_at = min(now, self.heard_at + max(0.0, seconds))

    def is_orphaned(self, now: float) -> bool:
        """Whether the lease has expired."""
        return now - self.heard_at > self.terms.lease_s

    def is_over(self, now: float) -> bool:
        """Whether the wait for another driver is over."""
        wait_s = 0.0 if self.cluster_lost else self.terms.orphan_wait_s
        return self.ending or now - self.heard_at > self.terms.lease_s + wait_s
