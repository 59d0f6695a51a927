"""What workers must know of their driver to outlive it, and what they say to the next one. Frozen values, and pure
decisions about them.

A worker on a cluster that was there before the driver is leased to that driver: every call carries the driver's
epoch and renews the lease; a driver with a newer epoch takes the worker over, and the older one is refused from then
on.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from types import CodeType
from typing import Any

from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Copy, ShardMap, Share, StateSpec, shard_map
from raysharded.overrides import Decisions, agree
from raysharded.protocol.messages import FromMemory, Job, StepReport, Stopped, WorkerInfo

_MAY_DIFFER = ("run_name", "faults", "grace_s", "preemption_notices", "collective_timeout_s")
"""Of a job: what workers that are taken over keep from the driver before."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverSession:
    """A driver, as its workers know it."""

    driver: str
    epoch: int
    """The first generation of its ownership: higher than that of every driver before."""
    run_name: str
    global_batch_size: int
    metadata: Mapping[str, Any]
    """Written into every checkpoint's manifest."""
    signed: bool
    """Only the driver can sign: without it there is no further checkpoint."""
    lease_s: float
    orphan_wait_s: float
    recorded_step: int = 0
    """The newest step that was on record when the driver began: it need not hear of older ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdoptedWorker:
    """A worker that was taken over, with what it holds."""

    worker: WorkerId
    facts: WorkerInfo
    stopped: Stopped
    reports: tuple[StepReport, ...]
    """Of the newest steps that it took part in: the drivers before may not have put them on record."""
    fence: GenerationId
    """Nothing of this generation or an older one runs on it any more, or will."""
    decisions: Decisions
    """Those of its newest generation: what it holds was computed with these."""
    job: str
    """The identity of the job that it was started with."""
    epoch: int
    """Of the driver that started it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FreedWorker:
    """What a worker that was freed says."""

    facts: WorkerInfo | None
    """None: it had not started."""
    stopped: Stopped
    reports: tuple[StepReport, ...]
    """Of the newest steps that it took part in: the driver may not have put them on record."""
    fence: GenerationId
    """Nothing of this generation or an older one runs on it any more, or will."""
    decisions: Decisions
    """Those of its newest generation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundWorkers:
    """What a driver found when it began."""

    adopted: tuple[AdoptedWorker, ...] = ()
    ended: int = 0
    """Workers of the run that could not be taken over, and were ended."""


def to_take_over(answers: Iterable[AdoptedWorker], job: str) -> list[AdoptedWorker]:
    """Of the workers that would obey a driver, those that it takes: of its own job, one of each number."""
    taken: dict[WorkerId, AdoptedWorker] = {}
    for one in sorted(answers, key=lambda one: (-one.epoch, one.worker)):
        if one.job == job and one.worker not in taken:
            taken[one.worker] = one
    return list(taken.values())


def run_digest(run_url: str) -> str:
    """Names a run in the names of its workers, in 16 characters."""
    return hashlib.blake2b(run_url.encode(), digest_size=8).hexdigest()


# -- the job --


def job_identity(job: Job) -> str:
    """A digest that is equal for jobs that compute the same, in whichever process they were made.

    It covers every setting, the task's and the data's class, the code of their methods and their attributes; not the
    code of functions that these call. What cannot be pickled is never equal to anything.
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
        if base.__module__.startswith("raysharded."):  # what it computes is a matter of rules: `raysharded.numerics`
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
    """The newest step that counts and is on record."""
    step = 0
    for entry in entries:
        match entry["kind"]:
            case "started":  # it may go on after steps that were not on record yet
                step = min(step, int(entry["resumed_after_step"]))
            case "generation" | "step":
                step = int(entry["step"])
    return step


def taken_back(entries: Iterable[Mapping[str, Any]]) -> GenerationId:
    """The newest generation whose steps were taken back; what it or an older one left in memory counts for nothing."""
    generation = newest = 0
    for entry in entries:
        if entry["kind"] == "generation":
            newest = int(entry["generation"])
        elif entry["kind"] in ("rewind", "corruption"):  # one that was asked for comes when the next one is formed
            generation = int(entry.get("generation", newest))
    return GenerationId(generation)


def believed(stopped: Stopped, decisions: Decisions, after: GenerationId, decided: Decisions) -> Stopped:
    """What a worker holds, without what was taken back, or computed otherwise than was decided."""
    held = tuple(one for one in stopped.held if one.layout_id > after and agree(decisions, decided, one.step))
    return replace(stopped, held=held)


def unrecorded(reports: Iterable[StepReport], after_step: int, up_to: int) -> list[StepReport]:
    """One report of every step in (after_step, up_to] that anybody reported, in order; the newest generation's."""
    newest: dict[int, StepReport] = {}
    for report in reports:
        known = newest.get(report.step)
        if after_step < report.step <= up_to and (known is None or known.generation < report.generation):
            newest[report.step] = report
    return [newest[step] for step in sorted(newest)]


# -- the last checkpoint --


@dataclass(frozen=True, kw_only=True, slots=True)
class PartOf:
    """The buffer of one rank, which `holder` is to write."""

    holder: WorkerId
    rank: int
    layout: int
    medium: str
    step: int


def parts_to_write(source: FromMemory) -> tuple[PartOf, ...]:
    """By rank, who writes which buffer, so that the state is written once; () if no single layout is whole. Ranks that
    have nothing to write are left out."""
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
    """Whether there is anything that no other rank writes."""
    return not spec.replicated[pieces.part(Share()).tensor].all()


# -- the lease, as a worker sees it --


@dataclass(slots=True)
class LeaseState:
    """Which driver a worker obeys, and since when it has not heard of it. Times are monotonic seconds."""

    terms: DriverSession
    heard_at: float
    ending: bool = False
    """The last checkpoint is being written: of the drivers only one that follows is obeyed."""

    def refusal(self, epoch: int) -> str:
        """Why a call of this epoch is refused; empty if it is not."""
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
        """For a worker that leads the last checkpoint, and took the run with this epoch: obey nobody but a driver that
        follows it. False, and nothing is changed, if there is a driver, or a newer leader."""
        if epoch < self.terms.epoch or not self.has_nobody(now):
            return False
        self.terms, self.ending = replace(self.terms, epoch=epoch), True
        return True

    def has_nobody(self, now: float) -> bool:
        """Whether it has no driver, whichever it had."""
        return self.ending or self.is_orphaned(now)

    def stood_still(self, seconds: float, now: float) -> None:
        """This process did nothing for so long: what its driver said meanwhile is not heard yet, and that time does not
        count."""
        self.heard_at = min(now, self.heard_at + max(0.0, seconds))

    def is_orphaned(self, now: float) -> bool:
        """Whether the lease has expired."""
        return now - self.heard_at > self.terms.lease_s

    def is_over(self, now: float) -> bool:
        """Whether it was waited long enough for another driver."""
        return self.ending or now - self.heard_at > self.terms.lease_s + self.terms.orphan_wait_s
