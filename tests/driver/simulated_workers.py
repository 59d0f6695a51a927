"""Workers without processes, threads or tensors, that keep the buffers real workers keep.

A worker's calls are generators that yield how long they take, or the condition that they wait for. A worker that is
killed or falls silent is not continued; an interrupted one gets `Interrupted` thrown in. Steps are exchanged as the
engine exchanges them: mirror of the step before, agreement, apply, snapshot. The real `LeaseState` decides which driver
a worker obeys.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from raysharded.errors import (
    CollectiveAborted,
    CorruptCheckpoint,
    DeviceFailed,
    NonFiniteLoss,
    StaleGeneration,
    TaskError,
)
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Held, StateSpec, TensorSpec, has_mirrors, mirror_of, tensor_specs
from raysharded.layout.fingerprint import digest
from raysharded.orphans.orphan_checkpoint import wait_for_turn
from raysharded.overrides import Decisions, factor_at, skipped_before
from raysharded.protocol.link_messages import LinkCheck, LinkReport
from raysharded.protocol.messages import (
    Corruption,
    FromCheckpoint,
    FromMemory,
    GenerationReady,
    GenerationSpec,
    Prepared,
    ProbeReply,
    Progress,
    Saved,
    Source,
    StepReport,
    Stopped,
    StopReason,
    WorkerInfo,
    save_prefix,
)
from raysharded.protocol.session import AdoptedWorker, DriverSession, FreedWorker, LeaseState, PartOf, for_next_driver
from tests.driver.strikes import Strike

if TYPE_CHECKING:
    from tests.driver.simulated import Cluster

ROWS, STRIPS = 12, 6
SPEC = StateSpec(
    tensors=(
        *tensor_specs("common", "uint8", (ROWS,)),
        *tensor_specs("rows", "uint8", (ROWS,), tensor_dim=0),
        *tensor_specs("columns", "uint8", (ROWS, STRIPS), tensor_dim=1, strips=STRIPS),
        *tensor_specs("count", "uint8", (1,), replicated=True),
    )
)
"""Tensor parallelism of degree 1, 2, 3 and 6 can cut it."""
SAVED_SPEC = StateSpec(tensors=(TensorSpec(name="step", dtype="uint8", shape=(0,)),))
"""The saved state: it has no bytes, and its fingerprint is the step's number and the state's."""
JOB = "job"
POLL_TIMEOUT_S = 5.0
BEGIN_TIMEOUT_S = 30.0
MEET_TIMEOUT_S = 20.0
CONNECT_S = 30.0
"""Time after which members that do not reach each other cannot form a generation."""
END_WITHIN_S = 180.0
"""Time limit of the last checkpoint."""
REFUSED = object()
"""The result of a call that was refused."""


class Wrong(Exception):
    """Thrown in every member when the audit of a step finds something."""

    def __init__(self, corruption: Corruption) -> None:
        super().__init__(corruption.text())
        self.corruption = corruption


class Unreadable(Exception):
    """The checkpoint that a generation is formed from is damaged."""


class Interrupted(Exception):
    """Thrown into a call whose generation was interrupted, or noticed that a peer is lost."""


Wish: TypeAlias = "float | Callable[[], bool]"
Call: TypeAlias = (
    "Generator[Wish, None, GenerationReady | Prepared | Stopped | Progress | Saved | ProbeReply | LinkReport | None]"
)
"""A driver's call: its result is the message that the driver receives, if any."""
Beside: TypeAlias = "Generator[Wish, None, Any]"
"""A call of a new driver or a peer: it always finds a free thread; may raise StaleGeneration."""
Medium: TypeAlias = Literal["snapshot", "mirror"]


@dataclass(slots=True)
class Buffer:
    """One rank's shard at one step."""

    step: int
    layout: GenerationId
    medium: Medium
    world_size: int
    rank: int
    tensor: int
    content: int
    """Number that stands for the state's bits: it depends on all that the state was computed with."""
    complete: bool = False


@dataclass(slots=True, eq=False)
class Running:
    """A call that a worker carries out; `generation` if an interrupt frees it."""

    worker: Worker
    call: Beside
    heard: Callable[[Any], None]
    """Called with the result, when its caller receives it; or with REFUSED."""
    generation: GenerationId | None = None
    beside: bool = False


@dataclass(slots=True)
class Group:
    """The exchanges of the members of one generation."""

    spec: GenerationSpec
    workers: dict[WorkerId, Worker] = field(default_factory=dict)
    """Workers that have begun to form it."""
    arrived: dict[object, set[WorkerId]] = field(default_factory=dict)
    boundary_at: set[int] = field(default_factory=set)
    save_busy_at: set[int] = field(default_factory=set)
    save_asked_at: set[int] = field(default_factory=set)
    mirrored: set[tuple[int, int]] = field(default_factory=set)
    """(step, rank) whose mirror has arrived."""
    sending: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """(step, rank) -> the ranks of the pair that have started the transfer of its mirror."""
    wrong: dict[int, WorkerId] = field(default_factory=dict)
    """Step -> the worker that computes wrong numbers in it."""
    not_finite: set[int] = field(default_factory=set)
    committed: int = 0
    """The newest step that all members know to be held twice."""
    trained: bool = False


class Worker:
    """One simulated worker: the calls of `raysharded.actors.worker.Worker`, and its host memory."""

    def __init__(self, cluster: Cluster, worker: WorkerId, terms: DriverSession) -> None:
        self.cluster, self.id, self.started_by = cluster, worker, terms.epoch
        self.tenancy = LeaseState(terms=terms, heard_at=cluster.now)
        self.facts: WorkerInfo | None = None
        """Facts, once it has started."""
        self.decisions = Decisions()
        self.content = 0
        """Content of the newest step."""
        self.placed = False
        """True when its process has been started, on a node."""
        self.noticed = self.blamed = False
        """True after a leave notice, or shortly before; true if it was found to compute wrong numbers."""
        self.gone_at: float | None = None
        """Time of its end by the notice; `whole_node`: with all others there."""
        self.whole_node = False
        self.alive, self.silent, self.busy, self.raises = True, False, False, False
        self.wrong, self.not_finite = False, False
        self.breaks = self.has_dead_device = False
        self.frozen_until = float("-inf")
        self.deaf = False
        """True while it waits for its storage, which no interrupt ends."""
        self.waits = False
        """True while it waits for other members."""
        self.node = f"node{worker // 2}"
        self.generation = GenerationId(0)
        self.interrupted = GenerationId(0)
        """The newest generation that it was freed from."""
        self.group: Group | None = None
        self.training: GenerationId | None = None
        self.step = 0
        self.boundary = False
        self.save_asked = False
        self.reports: list[StepReport] = []
        self.earlier_reports: list[StepReport] = []
        self.ends = self.gave_up = False
        """True if it was without a driver for too long; true when it has ended."""
        self.buffers: list[Buffer] = []
        self.saving: tuple[GenerationId, int] | None = None
        self.saved: Saved | None = None
        self.newest_save = (GenerationId(0), 0)
        self.joining: Buffer | None = None
        self.preparing = ""
        """The newest requested preparation."""
        self.prepared = ""
        """The prefix of the preparation that it has."""
        self.attempt = (GenerationId(0), 0)
        """(generation, attempt) of the newest preparation."""
        self.num_calls = 0
        self.queued: deque[Callable[[], None]] = deque()
        """Calls that have found no slot."""

    @property
    def responsive(self) -> bool:
        return self.alive and not self.silent

    @property
    def awake(self) -> bool:
        return self.responsive and self.cluster.now >= self.frozen_until

    def freeze(self, seconds: float) -> None:
        """Do nothing for so long."""

        def thaw() -> None:
            if not self.ends:  # its watch notices
                self.tenancy.stood_still(seconds, self.cluster.now)

        self.frozen_until = self.cluster.now + seconds
        self.cluster.later(seconds, thaw)

    def held(self) -> tuple[Held, ...]:
        return tuple(
            Held(
                worker=self.id,
                step=b.step,
                medium=b.medium,
                world_size=b.world_size,
                rank=b.rank,
                layout_id=b.layout,
                tensor=b.tensor,
            )
            for b in self.buffers
            if b.complete
        )

    def obeys(self, epoch: int) -> bool:
        """True if a call of the driver of this epoch is carried out; such a call renews the driver's lease."""
        if self.tenancy.refusal(epoch):
            return False
        self.tenancy.heard_at = self.cluster.now
        return True

    # -- the two long calls --

    def form(self, spec: GenerationSpec) -> Call:
        yield self.is_idle
        if spec.generation <= self.generation:
            return None
        if self.has_dead_device:
            return (yield from self.hand_over(spec))
        self.busy, self.waits, self.generation, self.joining = True, False, spec.generation, None
        assert spec.prepared in ("", self.prepared), "formed from what was not prepared"
        self.preparing = self.prepared = ""
        self.earlier_reports += self.reports
        self.reports, self.boundary, self.save_asked, self.decisions = [], False, False, spec.decisions
        group = self.group = self.cluster.groups.setdefault(spec.prefix, Group(spec))
        group.workers[self.id] = self
        try:
            yield self.delay()
            yield from self.barrier("met")
            self.step = group.committed = spec.source.step
            yield self.delay()
            self.fail_if_told()
            if spec.failed_devices:
                yield lambda: group.workers.keys() >= set(spec.failed_devices)
            self.content = self.state_from(spec.source, group)
            if isinstance(spec.source, FromMemory):
                yield from self.barrier("exchanged")
            own, mirror = (
                self.begin("snapshot"),
                self.begin("mirror") if self.cluster.limits.mirrors and has_mirrors(spec.mesh) else None,
            )
            own.complete = True
            if mirror is not None:
                mirror.complete = True
            yield from self.barrier("formed")
            return GenerationReady(
                generation=spec.generation, step=self.step, spec=SPEC, seconds={}, bytes_received=0, bytes_read=0
            )
        except (Interrupted, TaskError, DeviceFailed, Unreadable) as error:
            return self.broken(error)
        finally:
            self.busy = False

    def hand_over(self, spec: GenerationSpec) -> Generator[Wish, None, Stopped]:
        """Have the members read what this worker holds, if they need it: its GPU has failed."""
        self.generation = spec.generation
        if self.id in spec.failed_devices:
            self.busy, group = True, self.cluster.groups.setdefault(spec.prefix, Group(spec))
            self.group = group
            group.workers[self.id] = self
            with contextlib.suppress(Interrupted):
                yield lambda: len(group.arrived.get("exchanged", ())) == spec.world_size
                yield self.delay()
            self.busy = False
        return replace(self.stopped(StopReason.DEVICE, DeviceFailed("CUDA error", "")), reports=())

    def state_from(self, source: Source, group: Group) -> int:
        """The state that a generation is formed from; every copy of it must be the same."""
        if isinstance(source, FromMemory):
            found = {
                buffer.content
                for copy in source.copies
                for rank, holder in enumerate(copy.holders)
                if holder is not None
                for buffer in group.workers[holder].buffers
                if (buffer.step, buffer.layout, buffer.medium, buffer.rank)
                == (source.step, copy.layout_id, copy.medium, rank)
            }
            (content,) = found
            return content
        if not isinstance(source, FromCheckpoint):
            return 0
        plan = self.cluster.state.plan  # a checkpoint that is the only source is not damaged
        if plan is not None and plan.rewind is not None and self.cluster.take(Strike.UNREADABLE):
            raise Unreadable
        return self.cluster.contents[source.prefix]

    def train(self, generation: GenerationId) -> Call:
        yield self.is_idle
        if generation != self.generation:
            return None  # came too late
        self.busy, self.waits, self.training = True, False, generation
        self.buffers = [buffer for buffer in self.buffers if buffer.layout == generation]
        cluster, group = self.cluster, self.members()
        try:
            if self.step >= cluster.max_steps and cluster.saves_at(self.step):
                yield from self.save()
            while self.step < cluster.max_steps:
                boundary = yield from self.one_step(group, self.step + 1)
                if boundary and self.step < cluster.max_steps:
                    yield from self.commit_last(group)
                    return self.stopped(StopReason.BOUNDARY)
            yield from self.commit_last(group)
            return self.stopped(StopReason.FINISHED)
        except (Interrupted, TaskError, DeviceFailed, Wrong) as error:
            return self.broken(error)
        finally:
            self.busy, self.training = False, None

    def one_step(self, group: Group, step: int) -> Generator[Wish, None, bool]:
        yield self.delay()
        self.fail_if_told()
        if self.boundary:
            group.boundary_at.add(step)
        if self.saving is not None:
            group.save_busy_at.add(step)
        contributed = self.save_asked
        if contributed:
            group.save_asked_at.add(step)
        if self.wrong:
            group.wrong.setdefault(step, self.id)
        if self.not_finite:
            group.not_finite.add(step)
        self.wrong = self.not_finite = False
        yield from self.join(group)
        yield from self.barrier(("agree", step))
        self.fail_if_agreed(group, step)
        group.committed = max(group.committed, step - 1)
        self.content = state_after(self.content, step, group.spec.decisions)
        self.step = step
        yield self.delay()
        self.begin("snapshot").complete = True
        self.start_mirror(group)
        due, asked = self.cluster.saves_at(step), step in group.save_asked_at
        busy = step in group.save_busy_at and step < self.cluster.max_steps
        started = (due or asked) and not busy
        if started:
            yield from self.save()
            self.save_asked = self.save_asked and not contributed
        report = report_of(
            group.spec,
            step,
            self.cluster.now,
            self.content,
            save_started=started,
            save_asked=started and asked,
            save_late=due and busy,
        )
        self.reports.append(report)
        return step in group.boundary_at

    def commit_last(self, group: Group) -> Generator[Wish, None, None]:
        yield from self.join(group)
        yield from self.barrier(("last", self.step))
        group.committed = max(group.committed, self.step)

    def broken(self, error: Exception) -> Stopped:
        """Free the peers too: some notice by themselves, some must be notified."""
        self.interrupted = max(self.interrupted, self.generation)
        self.cluster.break_group(self.members(), but=self.id)
        if isinstance(error, Wrong):
            return replace(self.stopped(StopReason.CORRUPT), corruption=error.corruption)
        if isinstance(error, Unreadable):
            return self.stopped(StopReason.REFUSED, CorruptCheckpoint("damaged"))
        if isinstance(error, TaskError):
            return self.stopped(StopReason.TASK_ERROR, error)
        if isinstance(error, DeviceFailed):
            return self.stopped(StopReason.DEVICE, error)
        return self.stopped(StopReason.ABORTED, CollectiveAborted("freed"))

    def stopped(self, reason: StopReason, error: BaseException | None = None) -> Stopped:
        held = self.held()
        return Stopped(
            generation=self.generation,
            reason=reason,
            step=self.step,
            phase="",
            stopped_at=self.cluster.now,
            held=held,
            specs={one.step: SPEC for one in held},
            reports=tuple(self.reports),
            error=error,
        )

    def rest(self, generation: GenerationId) -> Call:
        yield self.is_idle
        if generation != self.generation:
            return None
        self.buffers = [buffer for buffer in self.buffers if buffer.layout == generation]
        return self.stopped(StopReason.BOUNDARY)

    def save_held(self, generation: GenerationId) -> Call:
        yield self.is_idle
        if generation == self.generation:
            assert self.members().spec.generation == generation
            assert any(b.complete and b.step == self.step and b.layout == generation for b in self.buffers)
            yield from self.save()
        return None

    # -- short calls --

    def prepare(self, spec: GenerationSpec) -> Call:
        """Meet the others in the background. A newer one, or forming a generation, ends it."""
        if (spec.generation, spec.attempt) < self.attempt:
            return None
        self.preparing, self.prepared, self.attempt = spec.prefix, "", (spec.generation, spec.attempt)
        yield self.delay()
        if self.cluster.take(Strike.FAIL_PREPARE):
            return Prepared(prefix=spec.prefix, error="RuntimeError: no")
        met = self.cluster.meetings.setdefault(spec.prefix, set())
        met.add(self.id)
        deadline = self.cluster.now + MEET_TIMEOUT_S
        yield lambda: len(met) == spec.world_size or self.preparing != spec.prefix or self.cluster.now >= deadline
        yield self.delay()
        if self.preparing != spec.prefix or len(met) < spec.world_size:
            return Prepared(prefix=spec.prefix, error="CollectiveAborted: not all have come")
        self.prepared = spec.prefix
        return Prepared(prefix=spec.prefix)

    def report(self, generation: GenerationId) -> Call:
        self.interrupt(generation)
        yield self.is_idle
        return self.stopped(StopReason.ABORTED)

    def interrupt(self, generation: GenerationId) -> None:
        self.interrupted = max(self.interrupted, generation)

    def request_boundary(self, generation: GenerationId) -> None:
        if generation == self.generation:
            self.boundary = True

    def request_save(self, generation: GenerationId) -> None:
        if generation == self.generation:
            self.save_asked = True

    def look(self, generation: GenerationId) -> Call:
        yield 0.0
        phase = "save" if self.deaf else "forward"
        return ProbeReply(generation=generation, step=self.step, phase=phase, phase_s=1.0, waits=self.waits, stack="")

    def check_links(self, spec: LinkCheck) -> Call:
        nodes = self.cluster.where
        peers = sorted({peer for pair in spec.pairs if self.id in pair for peer in pair} - {self.id})
        failed = tuple(peer for peer in peers if peer in nodes and self.cluster.is_cut(self.node, nodes[peer]))
        yield 4.0 if failed else self.delay()
        return LinkReport(number=spec.number, failed=failed)

    def poll(self, generation: GenerationId, after_step: int) -> Call:
        if generation != self.generation:
            return Progress(generation=generation, reports=())
        reports, deadline = self.reports, self.cluster.now + POLL_TIMEOUT_S
        yield (
            lambda: (
                any(r.step > after_step for r in reports)
                or self.generation != generation
                or self.cluster.now >= deadline
            )
        )
        return Progress(generation=generation, reports=tuple(r for r in reports if r.step > after_step))

    def collect_save(self, generation: GenerationId, step: int) -> Call:
        wanted, deadline = (generation, step), self.cluster.now + BEGIN_TIMEOUT_S
        yield (
            lambda: (
                (self.newest_save >= wanted and self.saving != wanted)
                or (self.saving is None and self.cluster.now >= deadline)
            )
        )
        if self.saved is not None and (self.saved.generation, self.saved.step) == wanted:
            return self.saved
        return Saved(generation=generation, step=step, error="not known here", unknown=True)

    def fingerprint(self, generation: GenerationId) -> Call:
        yield self.is_idle
        return self.part(generation, self.step, self.members().spec.members.index(self.id), self.content)

    def part(self, generation: GenerationId, step: int, rank: int, content: int) -> Saved:
        """This worker's part of a save."""
        mine = np.array([[step, content] if rank == 0 else [0, 0]], np.uint64)
        return Saved(generation=generation, step=step, spec=SAVED_SPEC, fingerprint=mine)

    # -- as `raysharded.orphans.leased_worker.LeasedWorker`: other drivers, and none --

    def adopt(self, terms: DriverSession) -> Beside:
        if self.tenancy.refusal(terms.epoch) or self.facts is None:
            raise StaleGeneration("refused")
        self.tenancy.follow(terms, self.cluster.now)
        words = yield from self.free(terms.recorded_step)
        if not self.obeys(terms.epoch):
            raise StaleGeneration("refused")
        return AdoptedWorker(
            worker=self.id,
            facts=self.facts,
            stopped=words.stopped,
            reports=words.reports,
            fence=words.fence,
            decisions=words.decisions,
            job=JOB,
            epoch=self.started_by,
        )

    def free(self, after_step: int) -> Generator[Wish, None, FreedWorker]:
        fence = GenerationId(self.generation + 1)
        self.interrupt(fence)
        yield self.is_idle
        reports = for_next_driver((*self.earlier_reports, *self.reports), after_step)
        return FreedWorker(
            facts=self.facts,
            stopped=replace(self.stopped(StopReason.ABORTED), reports=()),
            reports=reports,
            fence=fence,
            decisions=self.decisions,
        )

    def is_orphan(self) -> Beside:
        yield 0.0
        return self.tenancy.has_nobody(self.cluster.now)

    def last_words(self, epoch: int, after_step: int) -> Beside:
        if not self.tenancy.end(epoch, self.cluster.now):
            raise StaleGeneration("it has a driver")
        return (yield from self.free(after_step))

    def write_part(self, epoch: int, part: PartOf, generation: GenerationId, writer: str) -> Beside:
        if not self.tenancy.ending or epoch != self.tenancy.terms.epoch:
            raise StaleGeneration("it has a driver")
        yield self.is_idle
        wanted = (part.step, part.layout, part.medium, part.rank)
        (buffer,) = [b for b in self.buffers if b.complete and (b.step, b.layout, b.medium, b.rank) == wanted]
        yield self.delay()
        if self.cluster.take(Strike.FAIL_SAVE):
            return Saved(generation=generation, step=part.step, error="OSError: no space")
        self.cluster.keep(save_prefix(part.step, generation, writer), buffer.content)
        return self.part(generation, part.step, part.rank, buffer.content)

    def leave(self, epoch: int) -> Beside:
        yield 0.0
        if epoch < self.tenancy.terms.epoch:
            raise StaleGeneration("another driver")
        self.cluster.end(self)

    def watch(self) -> None:
        """Notice that no driver calls any more: stop at a boundary, and finally end."""
        cluster, tenancy = self.cluster, self.tenancy
        if not self.responsive:
            return
        if not self.awake:
            cluster.later(self.frozen_until - cluster.now, self.watch)
        elif tenancy.is_over(cluster.now):
            cluster.begin(self.end)
        else:
            lease_s = tenancy.terms.lease_s
            if tenancy.is_orphaned(cluster.now):
                self.request_boundary(self.generation)
            cluster.later(max(lease_s / 10, tenancy.heard_at + lease_s - cluster.now), self.watch)

    def end(self) -> None:
        """The last checkpoint, and the end, unless a driver takes it over. A strand."""
        cluster, tenancy, heard_at = self.cluster, self.tenancy, self.tenancy.heard_at

        def end_if_over() -> None:
            if tenancy.heard_at == heard_at and tenancy.is_over(cluster.now):
                cluster.end(self)

        self.ends = True
        cluster.later(END_WITHIN_S + 2 * tenancy.terms.lease_s, end_if_over)
        while tenancy.is_over(cluster.now):
            wait_for_turn(self.id, cluster.peers_of(self), partial(cluster.pause, self))
            if tenancy.is_over(cluster.now) and cluster.write_last_words(self):
                break
            cluster.pause(self, 1.0)
        self.ends = False
        self.gave_up = tenancy.is_over(cluster.now)
        if self.gave_up:
            cluster.end(self)
        else:
            cluster.later(0.0, self.watch)

    # -- memory, mirrors, saves --

    def begin(self, medium: Medium) -> Buffer:
        """As `raysharded.actors.shards.store.ShardStore.begin`."""
        place, mesh = self.members().spec, self.members().spec.mesh
        same = [b for b in self.buffers if b.layout == self.generation and b.medium == medium]
        if len(same) >= 2:
            self.buffers.remove(min(same, key=lambda b: (b.complete, b.step)))
        shard = mesh.shard_of(place.members.index(self.id))
        whose = shard if medium == "snapshot" else mirror_of(shard, mesh.shards, mesh.apart)
        buffer = Buffer(self.step, self.generation, medium, mesh.shards, whose, mesh.tensor, self.content)
        self.buffers.append(buffer)
        return buffer

    def start_mirror(self, group: Group) -> None:
        mesh = group.spec.mesh
        if not (self.cluster.limits.mirrors and has_mirrors(mesh)):
            return
        rank = group.spec.members.index(self.id)
        self.joining = self.begin("mirror")
        for whose in (rank, mirror_of(rank, mesh.shards, mesh.apart)):
            key = (self.step, whose)
            pair = group.sending.setdefault(key, set())
            pair.add(rank)
            if len(pair) == 2:
                members = [group.workers[group.spec.members[r]] for r in pair]
                self.cluster.later(self.delay(), lambda key=key, members=members: deliver(group, key, members))  # type: ignore[misc]

    def join(self, group: Group) -> Generator[Wish, None, None]:
        if self.joining is None:
            return
        buffer, rank = self.joining, group.spec.members.index(self.id)
        needed = {(buffer.step, buffer.rank), (buffer.step, rank)}
        self.waits = True
        yield lambda: needed <= group.mirrored
        self.waits = False
        buffer.complete = True
        self.joining = None

    def save(self) -> Generator[Wish, None, None]:
        self.deaf = True
        yield lambda: self.saving is None
        self.deaf = False
        saving = self.saving = self.newest_save = (self.generation, self.step)
        self.saved = None
        fails = self.cluster.take(Strike.FAIL_SAVE)
        error = "OSError: no space" if fails else None
        place = self.members().spec
        saved = replace(self.part(*saving, place.members.index(self.id), self.content), error=error)
        self.cluster.keep(save_prefix(self.step, self.generation, place.driver), self.content)
        self.cluster.later(self.delay() * 4, lambda: self.finish_save(saved))

    def finish_save(self, saved: Saved) -> None:
        if self.responsive:
            self.saving, self.saved = None, saved

    # -- waits --

    def is_idle(self) -> bool:
        return not self.busy

    def delay(self) -> float:
        return self.cluster.delay()

    def fail_if_told(self) -> None:
        if self.raises:
            self.raises = False
            raise TaskError("the task raised")
        if self.breaks:
            self.breaks, self.has_dead_device = False, True
            raise DeviceFailed("CUDA error", "")

    def fail_if_agreed(self, group: Group, step: int) -> None:
        """All members know, and stop before they apply the step."""
        if step in group.wrong:
            culprit = group.wrong[step]
            group.workers[culprit].blamed = True
            by_proof = step == group.spec.source.step + 1 and bool(group.spec.newcomers)
            corruption = Corruption(
                step=step,
                what="gradient",
                culprits=(culprit,),
                workers=group.spec.members,
                by_proof=by_proof,
                takes_back=not by_proof,
            )
            raise Wrong(corruption)
        if step in group.not_finite:
            raise NonFiniteLoss(f"step {step}: the loss is nan")

    def members(self) -> Group:
        assert self.group is not None
        return self.group

    def barrier(self, name: object) -> Generator[Wish, None, None]:
        """Wait until every member is here; each then leaves at its own time, if nothing happens meanwhile."""
        group = self.members()
        arrived = group.arrived.setdefault(name, set())
        arrived.add(self.id)
        world, cluster = group.spec.world_size, self.cluster
        self.waits = True
        yield lambda: len(arrived) == world
        if not cluster.is_whole(group):
            deadline = cluster.now + CONNECT_S if name == "met" else float("inf")
            yield lambda: cluster.is_whole(group) or cluster.now >= deadline
            if not cluster.is_whole(group):
                raise Interrupted
        self.waits = False
        yield self.delay()


def deliver(group: Group, key: tuple[int, int], pair: Sequence[Worker]) -> None:
    """A mirror arrives if both sides are still there, and when they reach each other."""
    if pair[0].cluster.is_cut(*(worker.node for worker in pair)):
        pair[0].cluster.later(1.0, lambda: deliver(group, key, pair))
        return
    if all(worker.responsive and worker.interrupted < group.spec.generation for worker in pair):
        group.mirrored.add(key)


def report_of(
    spec: GenerationSpec,
    step: int,
    at: float,
    content: int = 0,
    *,
    save_started: bool = False,
    save_asked: bool = False,
    save_late: bool = False,
) -> StepReport:
    return StepReport(
        generation=spec.generation,
        step=step,
        world_size=spec.world_size,
        loss=1.0 / step,
        weight=1.0,
        metrics={},
        evaluation={},
        gradient_norm=float(content % 1000),
        lr=0.1 * factor_at(spec.decisions.rates, step),
        read_digest=(step, skipped_before(spec.decisions.skips, step)),
        num_reads=1,
        seconds={},
        finished_at=at,
        save_started=save_started,
        save_asked=save_asked,
        save_late=save_late,
    )


# -- the contents of memory, counted cell by cell --

_ALL = (1 << ROWS * (2 + STRIPS)) - 1


@lru_cache
def cells_of(world_size: int, rank: int, tensor: int) -> int:
    """The cells of the three sharded tensors in a buffer, a bit for each: as FSDP2 cuts what tensor parallelism cut."""
    shards, (shard, t) = world_size // tensor, divmod(rank, tensor)
    rows = _chunk(range(ROWS), shards, shard)
    own = _chunk(_chunk(range(ROWS), tensor, t), shards, shard)
    strips = _chunk(range(STRIPS), tensor, t)
    lines = [(0, rows), (1, own), *((2 + strip, rows) for strip in strips)]
    return sum(1 << (line * ROWS + row) for line, of_line in lines for row in of_line)


def _chunk(whole: range, parts: int, part: int) -> range:
    length = -(-len(whole) // parts)
    return whole[part * length : (part + 1) * length]


def state_after(content: int, step: int, decisions: Decisions) -> int:
    """The content after a step, from the content before."""
    made_of = (content, step, factor_at(decisions.rates, step), skipped_before(decisions.skips, step))
    return int.from_bytes(blake2b(repr(made_of).encode(), digest_size=8).digest(), "big")


def states(decisions: Decisions, last: int) -> list[int]:
    """The content after every step from 0 on, of an undisturbed run."""
    found = [0]
    for step in range(1, last + 1):
        found.append(state_after(found[-1], step, decisions))
    return found


def fingerprint_at(step: int, content: int) -> str:
    """The state's fingerprint after a step."""
    return digest(SAVED_SPEC, np.array([[step, content]], np.uint64))


def newest_complete_step(held: Iterable[Held]) -> int | None:
    """The newest step all of whose cells are held."""
    cells: dict[int, int] = {}
    for one in held:
        cells[one.step] = cells.get(one.step, 0) | cells_of(one.world_size, one.rank, one.tensor)
    return max((step for step, covered in cells.items() if covered == _ALL), default=None)
