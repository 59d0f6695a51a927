"""A driver's state machine and journal with simulated workers: the driver's cost at large numbers of workers.

Nothing is trained and no worker is called: the simulated workers answer each command at once, as real ones would. Time
is simulated, `STEP_S` a step and a tick of the loop every `TICK_S`. The measured quantity is the processor time of the
driver's own thread and of its journal's.
"""

from __future__ import annotations

import pickle
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raysharded.checkpoint import open_storage
from raysharded.clock import SystemClock
from raysharded.driver import machine
from raysharded.driver.state.commands import (
    Command,
    Form,
    Interrupt,
    Poll,
    Prepare,
    Probe,
    Record,
    RequestBoundary,
    StartWorker,
    Train,
    calls_of,
)
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.events import Event, Ready, Tick, WorkerReply
from raysharded.driver.state.state import Phase, State
from raysharded.ids import WorkerId
from raysharded.journal.log import Journal
from raysharded.journal.writer import Recorder
from raysharded.layout import Held, StateSpec, has_mirrors, mirror_of
from raysharded.protocol.messages import (
    GenerationReady,
    GenerationSpec,
    Prepared,
    ProbeReply,
    Progress,
    StepReport,
    Stopped,
    StopReason,
    WorkerInfo,
)
from raysharded.protocol.worker_launcher import WorkerLost

STEP_S = 5.0
TICK_S = 0.25
"""Interval of the driver's loop."""
PER_NODE = 8
REPORTS_KEPT = 4
"""Steps that a stopping worker reports once more."""
_PHASES = ("wait", "data", "forward", "backward", "agree", "apply", "snapshot", "mirror")


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The driver's cost of something."""

    machine_s: float
    """Time of its thread, in the state machine and handing entries to the journal."""
    calls_s: float
    """Time of its thread: pickling the messages to the workers."""
    journal_s: float
    """Time of the journal's thread."""
    journal_bytes: int
    slowest_s: float
    """The longest time that a single event took: for so long no other message is received."""
    events: int

    @property
    def total_s(self) -> float:
        return self.machine_s + self.calls_s + self.journal_s


@dataclass(kw_only=True, slots=True)
class _Tally:
    machine_s: float = 0.0
    calls_s: float = 0.0
    slowest_s: float = 0.0
    events: int = 0


@dataclass(kw_only=True)
class Simulated:
    """One run with `workers` of `spec`'s state, on nodes of `PER_NODE`."""

    folder: str
    workers: int
    spec: StateSpec
    at: float = 0.0
    inbox: deque[Event] = field(default_factory=deque)
    state: State = field(init=False)

    def __post_init__(self) -> None:
        self._clock = SystemClock()
        self._recorder = Recorder(Journal(open_storage(self.folder), self._clock, "driver"), self._clock)
        self._tally = _Tally()
        self._reports: deque[StepReport] = deque(maxlen=REPORTS_KEPT)
        self._formed: GenerationSpec | None = None
        self._polled = False
        self._ticked_at = 0.0
        self._boundary = False
        self._pickled: object = None
        self._waiting = False  # whether requested workers do not come
        self._node_of: dict[WorkerId, int] = {}
        self._vacant = deque(number // PER_NODE for number in range(self.workers))
        limits = DriverConfig(
            min_workers=max(1, self.workers // 2),
            max_workers=self.workers,
            max_steps=1_000_000,
            exact=True,
            mirrors=True,
            save_at_end=False,
            start_timeout_s=3600.0,
            replacement_wait_s=0.0,
            max_worker_losses=None,
            task_error_retries=0,
            progress_timeout_s=600.0,
            global_batch_size=self.workers,
        )
        self.state = State(limits=limits, rendezvous=("host", 1, "keys"), driver="driver")

    def begin(self) -> None:
        """Advance from nothing to the first step."""
        self._timed(lambda: machine.begin(self.state, self.at))
        self.run_to(1)

    def run_to(self, step: int) -> None:
        """Advance until this step is done, and all messages are received."""
        while self.state.step < step or self.inbox:
            self._next()

    def lose(self, count: int) -> None:
        """Lose that many workers of different nodes, in the middle of a step; advance until the others have done the
        next step."""
        members = self.state.members
        gone = [members[(2 * i + 1) * len(members) // (2 * count)] for i in range(count)]
        self._polled = False
        for worker in gone:
            self._say(WorkerLost(worker=worker, reason="killed"))
            self._vacant.append(self._node_of.pop(worker))
        self._waiting = True
        self.run_to(self.state.step + 1)

    def rejoin(self) -> None:
        """Start the missing workers again, and admit them at a boundary; advance until they have done a step."""
        self._waiting = False
        for worker in self.state.starting:
            self._say(self._ready(worker))
        while len(self.state.members) < self.workers or self.state.phase is not Phase.TRAINING or self.inbox:
            self._next()
        self.run_to(self.state.step + 1)

    @contextmanager
    def measured(self) -> Iterator[list[Work]]:
        """The cost of its block: the list has it when the block is over."""
        self._recorder.flush()
        self._tally = _Tally()
        size, found = self._journal_bytes(), list[Work]()
        all_began, own_began = time.process_time(), time.thread_time()
        yield found
        own_s = time.thread_time() - own_began
        self._recorder.flush()
        tally = self._tally
        found.append(
            Work(
                machine_s=tally.machine_s,
                calls_s=tally.calls_s,
                journal_s=max(0.0, time.process_time() - all_began - own_s),
                journal_bytes=self._journal_bytes() - size,
                slowest_s=tally.slowest_s,
                events=tally.events,
            )
        )

    def close(self) -> None:
        self._recorder.close(60.0)

    # -- the driver --

    def _next(self) -> None:
        """Handle one event; or else advance the time to the next tick or step."""
        if self.inbox:
            event = self.inbox.popleft()
        else:
            self._advance()
            event = self.inbox.popleft()
        self._timed(lambda: machine.step(self.state, event, self.at))

    def _timed(self, decide: Any) -> None:
        began = time.thread_time()
        self.state, commands = decide()
        for command in commands:
            if isinstance(command, Record):
                self._recorder.record(command.kind, dict(command.fields), durable=command.durable)
        machine_s = time.thread_time() - began
        began = time.thread_time()
        for command in commands:
            for _, _, arguments in calls_of(command):
                self._pickle(arguments)
        self._tally.calls_s += time.thread_time() - began
        self._tally.machine_s += machine_s
        self._tally.slowest_s = max(self._tally.slowest_s, machine_s)
        self._tally.events += 1
        for command in commands:
            self._answer(command)

    def _pickle(self, arguments: tuple[Any, ...]) -> None:
        for argument in arguments:
            if argument is not self._pickled or not isinstance(argument, GenerationSpec):
                pickle.dumps(argument, protocol=5)
                self._pickled = argument

    def _journal_bytes(self) -> int:
        return sum(path.stat().st_size for path in Path(self.folder, "journal").glob("*"))

    # -- the workers --

    def _say(self, event: Event) -> None:
        self.inbox.append(event)

    def _advance(self) -> None:
        """Advance to the next tick; a step is done when it is due, if somebody waits for it."""
        self._ticked_at += TICK_S
        self.at = max(self.at, self._ticked_at)
        due = self.state.since + STEP_S
        if self._polled and self.at >= due:
            self._do_step()
        self._say(Tick())

    def _do_step(self) -> None:
        assert self._formed is not None
        self._polled = False
        report = _report(self._formed, self.state.step + 1)
        self._reports.append(report)
        generation = self._formed.generation
        self._say(WorkerReply(worker=self.state.members[0], message=Progress(generation=generation, reports=(report,))))
        if self._boundary:
            self._boundary = False
            for worker in self._formed.members:
                self._say(WorkerReply(worker=worker, message=self._stopped(worker, StopReason.BOUNDARY, report.step)))

    def _answer(self, command: Command) -> None:
        match command:
            case StartWorker(worker=worker):
                if not self._waiting:
                    self._say(self._ready(worker))
            case Form(spec=spec):
                self._formed, self._boundary = spec, False
                self._ranks: Mapping[WorkerId, int] = {worker: rank for rank, worker in enumerate(spec.members)}
                self._reports.clear()
                for worker in spec.members:
                    self._say(WorkerReply(worker=worker, message=_formed(spec, self.spec)))
            case Prepare(spec=spec):
                for worker in spec.members:
                    self._say(WorkerReply(worker=worker, message=Prepared(prefix=spec.prefix)))
            case Train():
                self._boundary = False
            case Poll():
                self._polled = True
            case RequestBoundary():
                self._boundary = True
            case Interrupt(worker=worker):
                self._say(
                    WorkerReply(worker=worker, message=self._stopped(worker, StopReason.ABORTED, self.state.step))
                )
            case Probe(worker=worker, generation=generation):
                busy = dict.fromkeys(_PHASES, 0.1 + 1 / (3 + worker))
                seen = ProbeReply(
                    generation=generation,
                    step=self.state.step,
                    phase="forward",
                    phase_s=0.5,
                    waits=False,
                    stack="a line\n" * 20,
                    busy=busy,
                    num_steps=8,
                )
                self._say(WorkerReply(worker=worker, message=seen))

    def _ready(self, worker: WorkerId) -> Ready:
        node = self._node_of[worker] = self._vacant.popleft()
        facts = WorkerInfo(
            pid=1000 + worker,
            node=f"host-{node}",
            node_id=f"{node:056x}",
            arithmetic={"torch": "2.13", "device": "H100", "cuda": "13.0", "threads": "1"},
            num_samples=10**9,
        )
        return Ready(worker=worker, facts=facts)

    def _stopped(self, worker: WorkerId, reason: StopReason, step: int) -> Stopped:
        spec = self._formed
        assert spec is not None
        mesh = spec.mesh
        rank = mesh.shard_of(self._ranks[worker])
        own = Held(
            worker=worker,
            step=step,
            medium="snapshot",
            world_size=mesh.shards,
            rank=rank,
            layout_id=spec.generation,
        )
        held = [own]
        if has_mirrors(mesh):
            other = mirror_of(rank, mesh.shards, mesh.apart)
            held.append(
                Held(
                    worker=worker,
                    step=step,
                    medium="mirror",
                    world_size=mesh.shards,
                    rank=other,
                    layout_id=spec.generation,
                )
            )
        return Stopped(
            generation=spec.generation,
            reason=reason,
            step=step,
            phase="backward",
            stopped_at=1.7e9 + self.at,
            held=tuple(held),
            specs={step: self.spec},
            reports=tuple(self._reports),
        )


def _formed(spec: GenerationSpec, state: StateSpec) -> GenerationReady:
    seconds = {"connect": 0.1, "build": 0.2, "state": 0.3}
    return GenerationReady(
        generation=spec.generation,
        step=spec.source.step,
        spec=state,
        seconds=seconds,
        bytes_received=10**9,
        bytes_read=0,
    )


def _report(spec: GenerationSpec, step: int) -> StepReport:
    return StepReport(
        generation=spec.generation,
        step=step,
        world_size=spec.world_size,
        loss=3.0 + 1 / step,
        weight=2048.0,
        metrics={},
        evaluation={},
        gradient_norm=1.0 + 1 / step,
        lr=3e-4 / step,
        read_digest=(step * 2**50 + 12345, step * 2**49 + 6789),
        num_reads=spec.world_size,
        seconds=dict.fromkeys(_PHASES, 0.1 + 1 / (3 * step)),
        finished_at=1.7e9 + step * STEP_S,
    )
