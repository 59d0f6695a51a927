"""A simulated cluster: workers without processes, threads or tensors, that keep the buffers real workers keep.

A worker's calls are generators that yield how long they take, or what they wait for. Whoever is killed or falls silent
is not continued; whoever is interrupted gets `Interrupted` thrown in. Steps are exchanged as the engine exchanges them:
mirror of the step before, agreement, apply, snapshot. Every delay comes from one seeded generator.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from heapq import heappop, heappush
from typing import Literal, TypeAlias

from raysharded.driver import machine
from raysharded.driver.collecting import Collecting
from raysharded.driver.events import (
    NOBODY,
    Answer,
    AskFingerprint,
    AskReport,
    CheckpointRequested,
    CollectSave,
    Command,
    CommitFailed,
    CommitSave,
    Committed,
    Distrust,
    End,
    Event,
    Fingerprinted,
    Form,
    Interrupt,
    KillWorker,
    Look,
    Lost,
    Noticed,
    Overtaken,
    Poll,
    Ready,
    Record,
    RequestBoundary,
    RequestSave,
    Said,
    StartWorker,
    StopRequested,
    SumFingerprint,
    Tick,
    Train,
)
from raysharded.driver.messages import (
    Corruption,
    Facts,
    Formed,
    FromMemory,
    GenerationSpec,
    Progress,
    Saved,
    Seen,
    StepReport,
    Stopped,
    StopReason,
    save_prefix,
)
from raysharded.driver.state import Phase, State
from raysharded.errors import CollectiveAborted, NonFiniteLoss, TaskError
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Held, StateSpec, TensorSpec, mirror_of

ROWS = 12
SPEC = StateSpec(
    tensors=(
        TensorSpec(name="weight", dtype="uint8", shape=(ROWS,)),
        TensorSpec(name="count", dtype="uint8", shape=(1,), replicated=True),
    )
)
POLL_TIMEOUT_S = 5.0
LEAVE_WITHIN_S = 40.0
CALL_SLOTS = 8  # of 9, of which one waits for notices
"""Calls that a worker carries out at a time; further ones, an interrupt too, wait until one has returned."""
BEGIN_TIMEOUT_S = 30.0
STALL_S = 20.0
FREEZE_S = 140.0
"""Less than anybody is waited for who alone holds a part of the state."""
DEADLOCK_S = 3000.0
"""Simulated seconds after which a run that is not over will never be."""


class Strike(Enum):
    """What a fault does."""

    KILL = "a worker's process dies"
    NODE = "a node dies with all of its workers, and another takes its place"
    SILENCE = "a worker stops answering"
    FREEZE = "a worker stands still for a while, and then goes on"
    BREAK = "a collective breaks, and nobody is gone"
    RAISE = "the task raises in a worker"
    FAIL_START = "the next worker that is asked for does not start"
    NEVER_START = "the next worker that is asked for waits for resources for ever"
    FAIL_SAVE = "the next part of a checkpoint cannot be written"
    FAIL_COMMIT = "the next manifest cannot be written"
    REPEAT = "a message comes again"
    ASK = "somebody asks for a checkpoint"
    STALL = "the driver stands still for a while, and then hears everything at once"
    LEAVE = "the run is told to end after one more checkpoint"
    NOTICE = "a worker is told to leave, and is gone after a while"
    CORRUPT = "an audit finds that a worker computes wrong numbers"
    NOT_FINITE = "a loss is not finite"
    NOTICE_NODE = "a worker and all others of its node are told to leave, and are gone after a while"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Strikes at the `nth` thing that happens in a phase (None: in any)."""

    strike: Strike
    whom: int
    """Counts through those whom it can strike."""
    nth: int
    phase: Phase | None = None


class Wrong(Exception):
    """Thrown in every member when the audit of a step finds something."""

    def __init__(self, corruption: Corruption) -> None:
        super().__init__(corruption.text())
        self.corruption = corruption


class Interrupted(Exception):
    """Thrown into a call whose generation was interrupted, or noticed that a peer is gone."""


Wish: TypeAlias = "float | Callable[[], bool]"
Call: TypeAlias = "Generator[Wish, None, Formed | Stopped | Progress | Saved | Seen | None]"
Medium: TypeAlias = Literal["snapshot", "mirror"]


@dataclass(slots=True)
class Buffer:
    """One rank's shard at one step."""

    step: int
    layout: GenerationId
    medium: Medium
    world_size: int
    rank: int
    complete: bool = False


@dataclass(slots=True, eq=False)
class Running:
    """A call that a worker carries out; `generation` if an interrupt frees it."""

    worker: Worker
    call: Call
    generation: GenerationId | None
    replied: Callable[[], None] = lambda: None
    """Told when the driver hears the reply."""


@dataclass(slots=True)
class Group:
    """What the members of one generation have exchanged."""

    spec: GenerationSpec
    arrived: dict[object, set[WorkerId]] = field(default_factory=dict)
    boundary_at: set[int] = field(default_factory=set)
    save_busy_at: set[int] = field(default_factory=set)
    save_asked_at: set[int] = field(default_factory=set)
    mirrored: set[tuple[int, int]] = field(default_factory=set)
    """(step, rank) whose mirror has arrived."""
    sending: dict[tuple[int, int], set[int]] = field(default_factory=dict)
    """(step, rank) -> who of the pair has started the transfer of its mirror."""
    wrong: dict[int, WorkerId] = field(default_factory=dict)
    """Step -> who computes wrong numbers in it."""
    not_finite: set[int] = field(default_factory=set)
    committed: int = 0
    """The newest step that all members know to be held twice."""
    trained: bool = False


class Worker:
    """One simulated worker: the calls of `raysharded.actors.worker.Worker`, and its host memory."""

    def __init__(self, cluster: Cluster, worker: WorkerId) -> None:
        self.cluster, self.id = cluster, worker
        self.alive, self.silent, self.busy, self.raises = True, False, False, False
        self.wrong, self.not_finite = False, False
        self.frozen_until = 0.0
        self.deaf = False
        """Waits for its storage, which no interrupt ends."""
        self.waits = False
        """Waits for other members."""
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
        self.buffers: list[Buffer] = []
        self.saving: tuple[GenerationId, int] | None = None
        self.saved: Saved | None = None
        self.newest_save = (GenerationId(0), 0)
        self.joining: Buffer | None = None
        self.num_calls = 0
        self.queued: deque[Callable[[], None]] = deque()
        """Calls that have found no slot."""

    @property
    def responsive(self) -> bool:
        return self.alive and not self.silent

    def held(self) -> tuple[Held, ...]:
        return tuple(
            Held(worker=self.id, step=b.step, medium=b.medium, world_size=b.world_size, rank=b.rank, layout_id=b.layout)
            for b in self.buffers
            if b.complete
        )

    # -- the two long calls --

    def form(self, spec: GenerationSpec) -> Call:
        yield self.is_idle
        self.busy, self.waits, self.generation, self.joining = True, False, spec.generation, None
        self.reports, self.boundary, self.save_asked = [], False, False
        group = self.group = self.cluster.groups.setdefault(spec.generation, Group(spec))
        try:
            yield self.delay()
            yield from self.barrier("met")
            self.step = group.committed = spec.source.step
            yield self.delay()
            self.fail_if_told()
            if isinstance(spec.source, FromMemory):
                yield from self.barrier("exchanged")
            own, mirror = self.begin("snapshot"), self.begin("mirror") if spec.world_size > 1 else None
            own.complete = True
            if mirror is not None:
                mirror.complete = True
            yield from self.barrier("formed")
            return Formed(
                generation=spec.generation, step=self.step, spec=SPEC, seconds={}, bytes_received=0, bytes_read=0
            )
        except (Interrupted, TaskError) as error:
            return self.broken(error)
        finally:
            self.busy = False

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
        except (Interrupted, TaskError, Wrong) as error:
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
        """Free the peers too: some notice, some must be told."""
        self.interrupted = max(self.interrupted, self.generation)
        self.cluster.break_group(self.members(), but=self.id)
        if isinstance(error, Wrong):
            return replace(self.stopped(StopReason.CORRUPT), corruption=error.corruption)
        if isinstance(error, TaskError):
            return self.stopped(StopReason.TASK_ERROR, error)
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

    # -- short calls --

    def report(self, generation: GenerationId) -> Call:
        self.interrupt(generation)
        yield self.is_idle
        return self.stopped(StopReason.ABORTED) if generation == self.generation else None

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
        return Seen(generation=generation, step=self.step, phase=phase, phase_s=1.0, waits=self.waits, stack="")

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
        return Saved(generation=generation, step=self.step, spec=SPEC)

    # -- memory, mirrors, saves --

    def begin(self, medium: Medium) -> Buffer:
        """As `raysharded.actors.shards.ShardStore.begin`."""
        place = self.members().spec
        same = [b for b in self.buffers if b.layout == self.generation and b.medium == medium]
        if len(same) >= 2:
            self.buffers.remove(min(same, key=lambda b: (b.complete, b.step)))
        rank = place.members.index(self.id)
        whose = rank if medium == "snapshot" else mirror_of(rank, place.world_size)
        buffer = Buffer(self.step, self.generation, medium, place.world_size, whose)
        self.buffers.append(buffer)
        return buffer

    def start_mirror(self, group: Group) -> None:
        world = group.spec.world_size
        if world == 1:
            return
        rank = group.spec.members.index(self.id)
        self.joining = self.begin("mirror")
        for whose in (rank, mirror_of(rank, world)):
            key = (self.step, whose)
            pair = group.sending.setdefault(key, set())
            pair.add(rank)
            if len(pair) == 2:
                members = [self.cluster.workers[group.spec.members[r]] for r in pair]
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
        saved = Saved(generation=saving[0], step=saving[1], spec=SPEC, error=error)
        self.cluster.later(self.delay() * 4, lambda: self.finish_save(saved))

    def finish_save(self, saved: Saved) -> None:
        if self.responsive:
            self.saving, self.saved = None, saved

    # -- how things wait --

    def is_idle(self) -> bool:
        return not self.busy

    def delay(self) -> float:
        return self.cluster.delay()

    def fail_if_told(self) -> None:
        if self.raises:
            self.raises = False
            raise TaskError("the task raised")

    def fail_if_agreed(self, group: Group, step: int) -> None:
        """All members know, and stop before they apply the step."""
        if step in group.wrong:
            culprit = group.wrong[step]
            self.cluster.blamed.add(culprit)
            corruption = Corruption(step=step, what="gradient", culprits=(culprit,), workers=group.spec.members)
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
        world = group.spec.world_size
        self.waits = True
        yield lambda: len(arrived) == world
        self.waits = False
        yield self.delay()


def deliver(group: Group, key: tuple[int, int], pair: Iterable[Worker]) -> None:
    """A mirror arrives if both sides are still there."""
    if all(worker.responsive and worker.interrupted < group.spec.generation for worker in pair):
        group.mirrored.add(key)


def report_of(
    spec: GenerationSpec,
    step: int,
    at: float,
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
        gradient_norm=1.0,
        lr=0.1,
        read_digest=(step, 0),
        num_reads=1,
        seconds={},
        finished_at=at,
        save_started=save_started,
        save_asked=save_asked,
        save_late=save_late,
    )


class Cluster:
    """Runs the driver's machine against simulated workers. After every event, its law is asked."""

    def __init__(
        self, state: State, *, save_every: int | None, seed: int, tick_s: float, faults: tuple[Fault, ...]
    ) -> None:
        self.initial = self.state = state
        self.max_steps, self.save_every, self.tick_s = state.limits.max_steps, save_every, tick_s
        self.random = random.Random(seed)
        self.pace = self.random.choice((0.02, 0.2, 1.0))
        self.now = 0.0
        self.heard_at = 0.0
        self.error: BaseException | None = None
        self.ended = False
        self.workers: dict[WorkerId, Worker] = {}
        self.nodes = [f"node{number}" for number in range(1 + seed % 3)]
        self.where: dict[WorkerId, str] = {}
        """Worker -> its node."""
        self.groups: dict[GenerationId, Group] = {}
        self.manifests: set[str] = set() if state.checkpoint is None else {state.checkpoint.prefix}
        self.blamed: set[WorkerId] = set()
        """Who was found to compute wrong numbers."""
        self.distrusted: set[str] = set()
        """Checkpoints that were to be deleted."""
        self.log: list[tuple[Event, float]] = []
        self.commands: list[list[Command]] = []
        self.records: list[Record] = []
        self.struck: list[Strike] = []
        self.asked_at: dict[int, int] = {}
        """Request -> the newest step that was reported when it was heard, and that is not lost since."""
        self._requests = 0
        self.answers: dict[int, Answer] = {}
        self.noticed: set[WorkerId] = set()
        """Workers that were told to leave, or will have been told soon."""
        self._faults: dict[tuple[Phase | None, int], list[Fault]] = {}
        for fault in faults:
            self._faults.setdefault((fault.phase, fault.nth), []).append(fault)
        self._happened: dict[Phase | None, int] = {}
        self._pending: dict[Strike, int] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0
        self._waiting: list[tuple[Callable[[], bool], Running]] = []
        self._last_said: list[Said] = []
        self._stalled_until = self._committed_at = 0.0
        self._newest_claim = (GenerationId(0), 0)
        self._collecting = Collecting(self._collect)

    # -- time --

    def delay(self) -> float:
        """Mostly short, sometimes long: so everything overtakes everything now and then."""
        return self.random.random() * self.pace * (10.0 if self.random.random() < 0.1 else 1.0)

    def later(self, delay: float, action: Callable[[], None]) -> None:
        self._pushed += 1
        heappush(self._heap, (self.now + delay, self._pushed, action))

    def run(self, law: Callable[[Cluster, State, Event | None, list[Command]], None]) -> None:
        """Until the run is over; AssertionError if it never will be."""
        self._law = law
        self._follow(None, machine.begin(self.state, self.now))
        self.later(self.tick_s, self._tick)
        while not self.ended:
            self.now, _, action = heappop(self._heap)
            assert self.now < DEADLOCK_S, f"no end in sight: {self.state}"
            action()
            self._wake()
            self._strike()

    def _tick(self) -> None:
        """As the driver's loop: time is told only when nothing else was heard."""
        idle = self.now - self.heard_at
        if idle >= self.tick_s - 1e-6:
            self.hear(Tick())
            idle = 0.0
        self.later(self.tick_s - idle, self._tick)

    def hear(self, event: Event) -> None:
        if self.ended:
            return
        if self.now < self._stalled_until:
            if not isinstance(event, Tick):
                self.later(self._stalled_until - self.now, lambda: self.hear(event))
            return
        if isinstance(event, Lost):
            self._collecting.forget(event.worker)
        if isinstance(event, CheckpointRequested):  # one that is heard when the run is over is refused by the driver
            self.asked_at[event.request] = self.state.step
        self.heard_at = self.now
        self.log.append((event, self.now))
        self._follow(event, machine.step(self.state, event, self.now))

    def _follow(self, event: Event | None, outcome: tuple[State, list[Command]]) -> None:
        before, (self.state, commands) = self.state, outcome
        self.commands.append(commands)
        self._law(self, before, event, commands)
        for command in commands:
            self._carry_out(command)

    # -- what the driver wants --

    def _carry_out(self, command: Command) -> None:
        match command:
            case StartWorker(worker=worker, avoid=avoid):
                self._start(worker, avoid)
            case KillWorker(worker=worker):
                self._collecting.forget(worker)
                self.workers[worker].alive = False
            case Form(spec=spec):
                self.asked_at = {request: min(step, spec.source.step) for request, step in self.asked_at.items()}
                for member in spec.members:
                    self._call(member, lambda w: w.form(spec), spec.generation)
            case Train(generation=generation, members=members):
                self.groups[generation].trained = True
                for member in members:
                    self._call(member, lambda w: w.train(generation), generation)
            case Interrupt(worker=worker, generation=generation):
                self._tell(worker, lambda w: w.interrupt(generation))
            case RequestBoundary(worker=worker, generation=generation):
                self._tell(worker, lambda w: w.request_boundary(generation))
            case RequestSave(worker=worker, generation=generation):
                self._tell(worker, lambda w: w.request_save(generation))
            case Distrust(prefixes=prefixes):
                self.distrusted.update(prefixes)
            case Answer(requests=requests):
                assert not self.answers.keys() & set(requests), "answered twice"
                self.answers.update({request: command for request in requests if request > NOBODY})
            case AskReport(worker=worker, generation=generation):
                self._call(worker, lambda w: w.report(generation))
            case Poll(worker=worker, generation=generation, after_step=after_step):
                self._call(worker, lambda w: w.poll(generation, after_step))
            case Look(worker=worker, generation=generation):
                self._call(worker, lambda w: w.look(generation))
            case CollectSave(generation=generation, step=step, members=members):
                for member in members:
                    self._collecting.ask(member, generation, step)
            case CommitSave():
                self._commit(command)
            case AskFingerprint(generation=generation, members=members):
                for member in members:
                    self._call(member, lambda w: w.fingerprint(generation))
            case SumFingerprint(parts=parts):
                summed = Fingerprinted(fingerprint=f"state {parts[0].step}")
                self.later(self.delay(), lambda: self.hear(summed))
            case Record():
                self.records.append(command)
            case End(error=error):
                self.ended, self.error = True, error

    def _start(self, worker: WorkerId, avoid: tuple[str, ...]) -> None:
        self.workers[worker] = Worker(self, worker)
        fit = [node for node in self.nodes if node not in avoid]
        if self.take(Strike.NEVER_START) or not fit:
            return
        node = self.where[worker] = min(fit, key=lambda node: len(self._living_on(node)))
        if self.take(Strike.FAIL_START):
            self.workers[worker].alive = False
            lost = Lost(worker=worker, reason="does not start", node_id=node)
            self.later(self.delay(), lambda: self.hear(lost))
            return
        self.workers[worker].node = node
        facts = Facts(pid=worker, node=node, arithmetic={"cpu": "x"}, num_samples=100, node_id=node)
        self.later(self.delay() * 5, lambda: self._ready(Ready(worker=worker, facts=facts)))

    def _living_on(self, node: str) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive and self.where.get(worker.id) == node]

    def _ready(self, ready: Ready) -> None:
        worker = self.workers[ready.worker]
        if worker.responsive:
            self.hear(ready)
        if worker.id in self.noticed:  # it was starting when the rest of its node was told
            self.hear(Noticed(workers=(worker.id,), reason="told", within_s=0.5, whole_node=False))

    def _commit(self, command: CommitSave) -> None:
        if self.take(Strike.FAIL_COMMIT):
            failed = CommitFailed(generation=command.generation, step=command.step, error="OSError")
            self._told_in_order(failed)
            return
        if (command.generation, command.step) < self._newest_claim:
            overtaken = Overtaken(generation=command.generation, step=command.step, reason="StaleGeneration")
            self._told_in_order(overtaken)
            return
        self._newest_claim = (command.generation, command.step)
        prefix = save_prefix(command.step, command.generation)
        done = Committed(
            generation=command.generation,
            step=command.step,
            prefix=prefix,
            digest=prefix,
            fingerprint=f"state {command.step}",
        )
        self.manifests.add(prefix)
        self._told_in_order(done)

    def _told_in_order(self, event: Committed | CommitFailed | Overtaken) -> None:
        """One thread commits, one after the other."""
        self._committed_at = max(self._committed_at, self.now + self.delay() * 4)
        self.later(self._committed_at - self.now, lambda: self.hear(event))

    def saves_at(self, step: int) -> bool:
        if step == self.max_steps:
            return self.state.limits.save_at_end
        return self.save_every is not None and step % self.save_every == 0

    # -- calls --

    def _tell(self, worker: WorkerId, what: Callable[[Worker], None]) -> None:
        def begin() -> None:
            if self.workers[worker].responsive:
                what(self.workers[worker])

        self.later(self.delay(), lambda: self._arrive(worker, begin))

    def _call(
        self,
        worker: WorkerId,
        make: Callable[[Worker], Call],
        generation: GenerationId | None = None,
        replied: Callable[[], None] = lambda: None,
    ) -> None:
        def begin() -> None:
            called = self.workers[worker]
            called.num_calls += 1
            self._advance(Running(called, make(called), generation, replied))

        self.later(self.delay(), lambda: self._arrive(worker, begin))

    def _collect(self, worker: WorkerId, generation: GenerationId, step: int) -> None:
        answered = partial(self._collecting.answered, worker)
        self._call(worker, lambda w: w.collect_save(generation, step), replied=answered)

    def _arrive(self, worker: WorkerId, begin: Callable[[], None]) -> None:
        called = self.workers[worker]
        if self.now < called.frozen_until:
            self.later(called.frozen_until - self.now, lambda: self._arrive(worker, begin))
        elif called.num_calls < CALL_SLOTS:
            begin()
        else:
            called.queued.append(begin)

    def _returned(self, running: Running) -> None:
        worker = running.worker
        worker.num_calls -= 1
        while worker.queued and worker.num_calls < CALL_SLOTS:
            worker.queued.popleft()()

    def _hear_reply(self, running: Running, said: Said) -> None:
        running.replied()
        self.hear(said)

    def _advance(self, running: Running) -> None:
        worker = running.worker
        if not worker.responsive:
            return
        if self.now < worker.frozen_until:
            self.later(worker.frozen_until - self.now, lambda: self._advance(running))
            return
        try:
            if self._is_freed(running):
                wish = running.call.throw(Interrupted())
            else:
                wish = next(running.call)
        except StopIteration as stop:
            if stop.value is not None:
                said = Said(worker=worker.id, message=stop.value)
                self._last_said.append(said)
                self.later(self.delay(), lambda: self._hear_reply(running, said))
            self._returned(running)
            return
        if isinstance(wish, float):
            self.later(wish, lambda: self._advance(running))
        else:
            self._waiting.append((wish, running))

    @staticmethod
    def _is_freed(running: Running) -> bool:
        worker = running.worker
        started = worker.busy and worker.generation == running.generation and not worker.deaf
        return started and running.generation is not None and worker.interrupted >= running.generation

    def _wake(self) -> None:
        """Continue the calls whose wish has come true."""
        while True:
            woken = [one for one in self._waiting if one[0]() or self._is_freed(one[1])]
            if not woken:
                return
            self._waiting = [one for one in self._waiting if one not in woken]
            for _, running in woken:
                self._advance(running)

    # -- faults --

    def take(self, strike: Strike) -> bool:
        """Whether a fault that waits for its occasion strikes here."""
        if not self._pending.get(strike):
            return False
        self._pending[strike] -= 1
        self.struck.append(strike)
        return True

    def _strike(self) -> None:
        for phase in (self.state.phase, None):
            nth = self._happened[phase] = self._happened.get(phase, -1) + 1
            for fault in self._faults.get((phase, nth), ()):
                self._inflict(fault)

    def _inflict(self, fault: Fault) -> None:
        strike = fault.strike
        if strike in (Strike.FAIL_START, Strike.NEVER_START, Strike.FAIL_SAVE, Strike.FAIL_COMMIT):
            self._pending[strike] = self._pending.get(strike, 0) + 1
            return
        if self.ended:
            return
        if strike is Strike.ASK:
            self._requests += 1
            self.hear(CheckpointRequested(request=self._requests))
            return
        if strike is Strike.STALL:
            self.struck.append(strike)
            self._stalled_until = self.now + STALL_S
            return
        if strike is Strike.LEAVE:
            self.struck.append(strike)
            self.hear(StopRequested(checkpoint_within_s=LEAVE_WITHIN_S))
            return
        if strike is Strike.REPEAT:
            if self._last_said:
                said = self._last_said[-1 - fault.whom % len(self._last_said)]
                self.later(self.delay() * 3, lambda: self.hear(said))
            return
        candidates = [worker for worker in self.workers.values() if worker.responsive]
        if not candidates:
            return
        worker = candidates[fault.whom % len(candidates)]
        match strike:
            case Strike.KILL:
                self.kill(worker)
            case Strike.NODE if worker.id in self.where:
                self.kill_node(self.where[worker.id])
            case Strike.SILENCE if worker.id not in self.state.starting:
                worker.silent = True
                self.struck.append(strike)
            case Strike.FREEZE if worker.id not in self.state.starting:
                worker.frozen_until = self.now + FREEZE_S
                self.struck.append(strike)
            case Strike.BREAK if worker.group is not None and worker.busy:
                worker.interrupt(worker.generation)
                self.struck.append(strike)
            case Strike.NOTICE | Strike.NOTICE_NODE:
                self.struck.append(strike)
                self._notice(worker, whole_node=strike is Strike.NOTICE_NODE)
            case Strike.CORRUPT:
                worker.wrong = True
                self.struck.append(strike)
            case Strike.NOT_FINITE:
                worker.not_finite = True
                self.struck.append(strike)
            case Strike.RAISE:
                worker.raises = True
                self.struck.append(strike)

    def _notice(self, worker: Worker, *, whole_node: bool) -> None:
        """It (and who is on its node) is gone some time later, if the driver has not ended it before."""
        within_s = self.random.choice((0.5, 5.0, 60.0))
        going = [w for w in self.workers.values() if w.responsive and w is not worker and w.node == worker.node]
        going = [worker, *(going if whole_node else [])]
        noticed = Noticed(workers=(worker.id,), reason="told", within_s=within_s, whole_node=whole_node)
        self.noticed.update(one.id for one in going)

        def tell() -> None:
            here = self.workers.values() if whole_node else ()
            self.noticed.update(one.id for one in here if one.alive and one.node == worker.node)
            self.hear(noticed)

        self.later(self.delay(), tell)
        for one in going:
            self.later(within_s + self.delay(), partial(self.end, one))

    def kill_node(self, node: str) -> None:
        """End a node and all of its workers; another one is there at once."""
        self.struck.append(Strike.NODE)
        self.nodes[self.nodes.index(node)] = f"node{self.struck.count(Strike.NODE) + 2}"
        heard_after = self.delay() * 3
        for worker in self._living_on(node):
            self.kill(worker, node_died=True, heard_after=heard_after)

    def kill(self, worker: WorkerId | Worker, *, node_died: bool = False, heard_after: float | None = None) -> None:
        """End a worker; the driver hears of it after a while."""
        worker = worker if isinstance(worker, Worker) else self.workers[worker]
        self.struck.append(Strike.KILL)
        self.end(worker, node_died=node_died, heard_after=heard_after)

    def end(self, worker: Worker, *, node_died: bool = False, heard_after: float | None = None) -> None:
        if not worker.alive:
            return
        worker.alive = False
        lost = Lost(worker=worker.id, reason="killed", node_id=self.where.get(worker.id, ""), node_died=node_died)
        self.later(self.delay() * 3 if heard_after is None else heard_after, lambda: self.hear(lost))
        if worker.group is not None and worker.group.spec.generation == worker.generation:
            self.break_group(worker.group, but=worker.id)

    def break_group(self, group: Group, *, but: WorkerId) -> None:
        """Some of the others notice by themselves that a collective is broken."""
        for member in group.spec.members:
            if member != but and self.random.random() < 0.4:
                self._tell(member, lambda w: w.interrupt(group.spec.generation))


# -- what is true of memory, counted row by row --


def rows_of(held: Held) -> range:
    """The rows of `weight` in a buffer: FSDP2's chunks."""
    chunk = -(-ROWS // held.world_size)
    return range(min(held.rank * chunk, ROWS), min((held.rank + 1) * chunk, ROWS))


def newest_complete_step(held: Iterable[Held]) -> int | None:
    """The newest step all of whose rows are held."""
    rows: dict[int, set[int]] = {}
    for one in held:
        rows.setdefault(one.step, set()).update(rows_of(one))
    return max((step for step, covered in rows.items() if len(covered) == ROWS), default=None)
