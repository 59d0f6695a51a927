"""A simulated cluster: its workers, its storage, the drivers that come and go, and the faults that strike them.

Every delay comes from one seeded generator. Code that waits in simulated time (a driver that takes over, a worker that
leads the last checkpoint) is a separate strand, and lets the others run meanwhile: `wait_for`.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from heapq import heappop, heappush
from itertools import combinations
from typing import Any, Protocol

from raysharded.checkpoint import Claims
from raysharded.driver.checkpoints.protected import known
from raysharded.driver.state.commands import Command
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.events import (
    DrainRequested,
    Event,
    LearningRateRequested,
    PauseRequested,
    ReshardRequested,
    ResizeRequested,
    ResumeRequested,
    RewindRequested,
    StopRequested,
)
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.state import Phase, State
from raysharded.errors import RunOwnedElsewhere, StaleGeneration
from raysharded.ids import GenerationId, WorkerId
from raysharded.orphans.orphan_checkpoint import write_orphan_checkpoint
from raysharded.protocol.death import Death
from raysharded.protocol.session import AdoptedWorker, DriverSession
from tests.driver.memory_storage import MemoryStorage
from tests.driver.simulated_driver import ORPHAN_WAIT_S, SimulatedDriver, prepared_run
from tests.driver.simulated_hold import LEASE_S, SimulatedHold
from tests.driver.simulated_workers import REFUSED, Beside, Group, Interrupted, Running, Worker
from tests.driver.strands import Strand, Unwound
from tests.driver.strikes import Fault, Strike

LEAVE_WITHIN_S = 40.0
CALL_SLOTS = 8  # of 9, of which one waits for notices
"""Calls that a worker carries out at a time; further ones, an interrupt too, wait until one has returned."""
STALL_S = 20.0
FREEZE_S = 140.0
"""Less than the wait for a worker that alone holds a part of the state; so none stands still twice within as long."""
PAUSE_S = 300.0
DEADLOCK_S = 6000.0
"""Simulated seconds after which an unfinished run counts as a deadlock."""

WAITING = {
    Strike.FAIL_START,
    Strike.NEVER_START,
    Strike.FAIL_SAVE,
    Strike.FAIL_COMMIT,
    Strike.FAIL_PREPARE,
    Strike.UNREADABLE,
}
"""Faults that wait for an occasion."""


class Law(Protocol):
    """Conditions that must hold; checked after every event of the driver that owns the run."""

    def __call__(self, cluster: Cluster, before: State, event: Event | None, commands: list[Command]) -> None: ...

    def take_over(self, driver: SimulatedDriver, there: Sequence[Worker], taken: Sequence[AdoptedWorker]) -> None:
        """These of the workers that were `there` are taken over; the others will be ended."""
        ...

    def last_words(self, leader: Worker, there: Sequence[Worker]) -> None:
        """No fault struck while these workers wrote their last checkpoint."""
        ...


class Observer(Protocol):
    """Called at every event of every driver, with its commands and its state then. No event: it begins."""

    def __call__(
        self, driver: SimulatedDriver, event: Event | None, commands: Sequence[Command], state: State
    ) -> None: ...


def unobserved(driver: SimulatedDriver, event: Event | None, commands: Sequence[Command], state: State) -> None:
    """An observer that does nothing."""


class Cluster:
    """Runs drivers, one after the other as a rule, against simulated workers."""

    def __init__(
        self,
        limits: DriverConfig,
        *,
        later_workers: int | None = None,
        resumed: bool = False,
        save_every: int | None,
        seed: int,
        tick_s: float,
        faults: tuple[Fault, ...],
    ) -> None:
        self.limits, self.later_workers, self.max_steps = limits, later_workers, limits.max_steps
        self.save_every, self.tick_s = save_every, tick_s
        self.random = random.Random(seed)
        self.pace = self.random.choice((0.02, 0.2, 1.0))
        self.now = 0.0
        self.ended = False
        self.storage = MemoryStorage()
        self.everyone: list[Worker] = []
        """All workers of all drivers, oldest first."""
        self.nodes = [f"node{number}" for number in range(1 + seed % 3)]
        self.keep_last = 1 + seed // 3 % 2
        """Number of checkpoints to keep."""
        self._cut: dict[frozenset[str], float] = {}
        """Two nodes -> the time until which they do not reach each other."""
        self.groups: dict[str, Group] = {}
        """Groups by the prefix of their generation."""
        self.meetings: dict[str, set[WorkerId]] = {}
        """Prefix of a preparation -> the workers that have come to it."""
        self.prepared_forms = 0
        """Number of generations that were formed from a preparation."""
        self.distrusted: set[str] = set()
        """Checkpoints that were to be deleted."""
        self.contents: dict[str, int] = {}
        """Folder of a save -> the number that stands for the state's bits."""
        self.struck: list[Strike] = []
        self.explain: Callable[[Worker], Sequence[Death]] = lambda _: ()
        """The report of a dead worker's machine."""
        self._faults: dict[tuple[Phase | None, int], list[Fault]] = {}
        for fault in faults:
            self._faults.setdefault((fault.phase, fault.nth), []).append(fault)
        self._happened: dict[Phase | None, int] = {}
        self._pending: dict[Strike, int] = {}
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._pushed = 0
        self._waiting: list[tuple[Callable[[], bool], Running]] = []
        self._strands: list[Strand] = []
        self._strand: Strand | None = None
        """The strand that runs."""
        self.holds: dict[str, SimulatedHold] = {}
        """Holds by the name in their claims."""
        self.owner: SimulatedHold | None = None
        """Owner of the run: a driver, or a worker that leads the last checkpoint."""
        if resumed:
            prepared_run(self.storage, self)
        self.drivers: list[SimulatedDriver] = []
        self.driver = self._new_driver()
        """The driver that owns the run, or did so last."""

    # -- the driver that owns the run --

    @property
    def state(self) -> State:
        return self.driver.state

    @property
    def error(self) -> BaseException | None:
        return self.driver.error

    @property
    def workers(self) -> Mapping[WorkerId, Worker]:
        return self.driver.workers

    @property
    def where(self) -> dict[WorkerId, str]:
        """Worker -> its node."""
        return {worker.id: worker.node for worker in self.workers.values() if worker.placed}

    def keep(self, prefix: str, content: int) -> None:
        """Check that all parts of a save are of one state."""
        assert self.contents.setdefault(prefix, content) == content

    def group(self, generation: GenerationId) -> Group:
        return self.driver.group(generation)

    # -- time --

    def monotonic(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now

    def delay(self) -> float:
        """Mostly short, sometimes long: so each message overtakes others now and then."""
        return self.random.random() * self.pace * (10.0 if self.random.random() < 0.1 else 1.0)

    def later(self, delay: float, action: Callable[[], None]) -> None:
        self._pushed += 1
        heappush(self._heap, (self.now + delay, self._pushed, action))

    def run(self, law: Law, observer: Observer = unobserved) -> None:
        """Simulate until the run is over; AssertionError if it never will be."""
        self.law, self.observer = law, observer
        collects = gc.isenabled()
        gc.disable()  # millions of small objects, hardly any of them in a cycle: a seventh of the time
        try:
            self.begin(self.driver.enter)
            while not self.ended:
                assert self._heap, f"nothing happens any more: {self.state}"
                self.now, _, action = heappop(self._heap)
                assert self.now < DEADLOCK_S, f"no end in sight: {self.state}"
                action()
                self._wake()
                self._strike()
        finally:
            for strand in self._strands:
                strand.unwind()
            if collects:
                gc.enable()

    def begin(self, action: Callable[[], object]) -> None:
        """Begin code that will wait in simulated time."""
        strand = Strand(action)
        self._strands.append(strand)
        self._resume(strand)

    def _resume(self, strand: Strand) -> None:
        assert self._strand is None, "a strand cannot begin another"
        self._strand = strand
        try:
            strand.resume()
        finally:
            self._strand = None
        if strand.over:
            self._strands.remove(strand)

    def wait_for(self, waiter: SimulatedDriver | Worker, done: Callable[[], bool], timeout_s: float) -> None:
        """Let the others run until it is done or the time is over. Raises Unwound if the waiter is no more."""
        assert self._strand is not None
        deadline = self.now + timeout_s
        self.later(timeout_s, lambda: None)
        self._strand.wait(lambda: self._is_gone(waiter) or (waiter.awake and (done() or self.now >= deadline)))
        if self._is_gone(waiter):
            raise Unwound

    def pause(self, waiter: SimulatedDriver | Worker, seconds: float) -> None:
        self.wait_for(waiter, lambda: False, seconds)

    @staticmethod
    def is_known_to_be_dead(one: SimulatedDriver | Worker) -> bool:
        return isinstance(one, SimulatedDriver) and not one.alive and one.evidence

    @staticmethod
    def _is_gone(one: SimulatedDriver | Worker) -> bool:
        return not one.alive or (one.over if isinstance(one, SimulatedDriver) else one.silent)

    # -- drivers --

    def _new_driver(self) -> SimulatedDriver:
        limits, most = self.limits, self.later_workers
        if self.drivers and most is not None:
            limits = replace(limits, min_workers=min(limits.min_workers, most), max_workers=most)
        driver = SimulatedDriver(self, limits, len(self.drivers))
        self.drivers.append(driver)
        return driver

    def owned(self, hold: SimulatedHold) -> None:
        """A driver owns the run now; the others see it sooner or later."""
        self.owner = hold
        if isinstance(hold.holder, SimulatedDriver):
            self.driver = hold.holder
        for other in self.drivers:
            if other is not hold.holder and other.alive and not other.over:
                self.later(max(0.0, other.asleep_until - self.now) + self.random.random() * LEASE_S / 3, other.disown)

    def driver_ended(self, driver: SimulatedDriver) -> None:
        if driver is not self.driver:
            return
        if self.owner is not driver.hold:  # it slept, and its workers have ended
            assert isinstance(driver.error, RunOwnedElsewhere)
            self._send_drivers(self.random.random() * 2 * LEASE_S)
            return
        assert not isinstance(driver.error, RunOwnedElsewhere), f"disowned by nobody: {driver.error}"
        self.ended = True

    def _end_driver(self) -> None:
        driver = self.driver
        if not driver.alive or driver.over:
            return
        self.struck.append(Strike.DRIVER_DIES)
        driver.alive, driver.evidence = False, self.random.random() < 0.5
        soon = self.random.random() * LEASE_S
        self._send_drivers(self.random.choice((soon, soon, 2 * LEASE_S, LEASE_S + ORPHAN_WAIT_S + 4 * soon)))

    def _stop_driver(self) -> None:
        if not self.driver.awake:
            return
        self.struck.append(Strike.DRIVER_STOPS)
        self.driver.fall_asleep(self.random.choice((0.5, 2.0, 6.0)) * LEASE_S)
        self._send_drivers(self.random.random() * 2 * LEASE_S)

    def _send_drivers(self, after_s: float) -> None:
        """Start one driver, and sometimes another at the same time."""
        for _ in range(1 if self.random.random() < 0.8 else 2):
            self.later(after_s, lambda: self.begin(self._new_driver().enter))

    # -- workers without a driver --

    def peers_of(self, worker: Worker) -> Peers:
        return Peers(self, worker)

    def write_last_words(self, leader: Worker) -> bool:
        """Write the last checkpoint, as real workers do."""
        there, struck = [worker for worker in self.everyone if worker.awake and worker.placed], len(self.struck)

        def prepare(_terms: DriverSession, storage: Any) -> tuple[Claims, SimulatedHold]:
            claims = Claims(storage, f"leader{len(self.holds)}", wall=self.wall)
            return claims, SimulatedHold(self, leader, claims, ending=True)

        peers, pause = self.peers_of(leader), partial(self.pause, leader)
        mine = write_orphan_checkpoint(leader.id, leader.tenancy.terms, self.storage, peers, prepare, self, pause)
        if mine and len(self.struck) == struck:
            self.law.last_words(leader, there)
        return mine

    # -- calls --

    def call(
        self,
        worker: Worker,
        epoch: int,
        make: Callable[[Worker], Beside],
        heard: Callable[[Any], None],
        generation: GenerationId | None = None,
    ) -> None:
        def begin() -> None:
            if not worker.responsive:
                return
            if not worker.obeys(epoch):
                self.later(self.delay(), lambda: heard(REFUSED))
                return
            worker.num_calls += 1
            self._advance(Running(worker, make(worker), heard, generation))

        self.later(self.delay(), lambda: self.arrive(worker, begin))

    def call_beside(self, worker: Worker, make: Callable[[Worker], Beside], heard: Callable[[Any], None]) -> None:
        """Call a method that always finds a free thread, also in a busy worker."""
        self.later(self.delay(), lambda: self._advance(Running(worker, make(worker), heard, beside=True)))

    def arrive(self, worker: Worker, begin: Callable[[], None]) -> None:
        if self.now < worker.frozen_until:
            self.later(worker.frozen_until - self.now, lambda: self.arrive(worker, begin))
        elif worker.num_calls < CALL_SLOTS:
            begin()
        else:
            worker.queued.append(begin)

    def _returned(self, running: Running, value: Any) -> None:
        worker = running.worker
        self.later(self.delay(), lambda: running.heard(value))
        if running.beside:
            return
        worker.num_calls -= 1
        while worker.queued and worker.num_calls < CALL_SLOTS:
            worker.queued.popleft()()

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
            self._returned(running, stop.value)
        except StaleGeneration:
            self._returned(running, REFUSED)
        else:
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
        """Continue the calls and the strands whose condition holds."""
        while True:
            ready = [strand for strand in self._strands if strand.until()]
            for strand in ready:
                self._resume(strand)
            woken = [one for one in self._waiting if one[0]() or self._is_freed(one[1])]
            if not woken and not ready:
                return
            self._waiting = [one for one in self._waiting if one not in woken]
            for _, running in woken:
                self._advance(running)

    # -- faults --

    def saves_at(self, step: int) -> bool:
        if step == self.max_steps:
            return self.limits.save_at_end
        return self.save_every is not None and step % self.save_every == 0

    def is_cut(self, one: str, other: str) -> bool:
        """True if two nodes do not reach each other now; both reach the driver."""
        return self.now < self._cut.get(frozenset((one, other)), 0.0)

    def is_whole(self, group: Group) -> bool:
        """True if all members of a group reach each other now."""
        nodes = sorted({worker.node for worker in group.workers.values()})
        return not any(self.is_cut(one, other) for one, other in combinations(nodes, 2)) if self._cut else True

    def living_on(self, node: str) -> list[Worker]:
        return [worker for worker in self.everyone if worker.alive and worker.placed and worker.node == node]

    def take(self, strike: Strike) -> bool:
        """True if a fault that waits for its occasion strikes here."""
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
        strike, driver = fault.strike, self.driver
        if strike in WAITING:
            self._pending[strike] = self._pending.get(strike, 0) + 1
            return
        if self.ended:
            return
        if strike is Strike.ASK:
            driver.ask_for_checkpoint()
        elif strike is Strike.RESHARD:
            driver.hear(ReshardRequested(grouping=self._other_grouping(fault)))
        elif strike is Strike.RATE:
            self.struck.append(strike)
            driver.hear(LearningRateRequested(factor=(0.5, 2.0, 1.0, 0.0, -1.0, 0.25, 3.0)[fault.whom]))
        elif strike is Strike.REWIND:
            self.struck.append(strike)
            steps = [checkpoint.step for checkpoint in known(driver.state)]
            step = steps[fault.whom % len(steps)] if steps and fault.whom < 6 else 99
            driver.hear(RewindRequested(step=step, skip_data=fault.nth % 2 == 1))
        elif strike is Strike.PAUSE:
            self._pause(self.random.random() * PAUSE_S)
        elif strike is Strike.RESIZE:
            driver.hear(ResizeRequested(workers=fault.whom))
        elif strike is Strike.DRAIN:
            within_s = self.random.choice((0.5, 20.0, 200.0))
            driver.hear(DrainRequested(node=self.nodes[fault.whom % len(self.nodes)], within_s=within_s))
        elif strike is Strike.STALL:
            self.struck.append(strike)
            if driver.awake:
                driver.fall_asleep(STALL_S)
        elif strike is Strike.DRIVER_DIES:
            self._end_driver()
        elif strike is Strike.DRIVER_STOPS:
            self._stop_driver()
        elif strike is Strike.LEAVE:
            if driver.awake:
                self.struck.append(strike)
                driver.hear(StopRequested(checkpoint_within_s=LEAVE_WITHIN_S))
        elif strike is Strike.CUT:
            pairs = list(combinations(self.nodes, 2))
            if pairs:
                self.struck.append(strike)
                seconds = self.random.choice((10.0, 100.0, 400.0, 2 * DEADLOCK_S))
                self._cut[frozenset(pairs[fault.whom % len(pairs)])] = self.now + seconds
        elif strike is Strike.REPEAT:
            if driver.last_said:
                said = driver.last_said[-1 - fault.whom % len(driver.last_said)]
                self.later(self.delay() * 3, lambda: driver.hear(said))
        else:
            candidates = [worker for worker in self.everyone if worker.responsive]
            if candidates:
                self._inflict_on(candidates[fault.whom % len(candidates)], strike)

    def _pause(self, seconds: float) -> None:
        """Pause the run; later the resume request is repeated, to the driver of the moment, as none may be awake
        then."""

        def go_on() -> None:
            if not self.ended:
                self.driver.hear(ResumeRequested())
                self.later(PAUSE_S, go_on)

        self.driver.hear(PauseRequested())
        self.later(seconds, go_on)

    def _other_grouping(self, fault: Fault) -> Grouping | None:
        """Another grouping; also of a degree that the run cannot have, once that is known."""
        shards = fault.nth % 4  # 0: one flat group
        tensor = 1 + fault.whom % (4 if self.state.spec is not None else 3)
        if (shards, tensor) == (0, 1):
            return None
        return Grouping(
            shards=shards * tensor or None,
            tensor=tensor,
            least_shards=1,
            num_microbatches=8,
            least_workers=self.state.limits.min_workers,
        )

    def _inflict_on(self, worker: Worker, strike: Strike) -> None:
        match strike:
            case Strike.KILL:
                self.kill(worker)
            case Strike.NODE if worker.placed:
                self.kill_node(worker.node)
            case Strike.SILENCE if worker.facts is not None:
                worker.silent = True
                self.struck.append(strike)
            case Strike.FREEZE if worker.facts is not None and worker.frozen_until + FREEZE_S < self.now:
                self.struck.append(strike)
                worker.freeze(FREEZE_S)
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
            case Strike.DEVICE:
                worker.breaks = True
                self.struck.append(strike)

    def _notice(self, worker: Worker, *, whole_node: bool) -> None:
        """A worker (and all others on its node) exits some time later, if the driver has not ended it before."""
        within_s = self.random.choice((0.5, 5.0, 60.0))
        going = [w for w in self.everyone if w.responsive and w is not worker and w.node == worker.node]
        going = [worker, *(going if whole_node else [])]
        for one in going:
            one.noticed = True

        def tell() -> None:
            for one in self.everyone if whole_node else ():
                one.noticed = one.noticed or (one.alive and one.node == worker.node)
            worker.gone_at, worker.whole_node = self.now + within_s, whole_node
            for driver in self.drivers:
                driver.hear_notice(worker)

        self.later(self.delay(), tell)
        for one in going:
            self.later(within_s + self.delay(), partial(self.end, one))

    def kill_node(self, node: str) -> None:
        """End a node and all of its workers; another node starts at once."""
        self.struck.append(Strike.NODE)
        self.nodes[self.nodes.index(node)] = f"node{self.struck.count(Strike.NODE) + 2}"
        heard_after = self.delay() * 3
        for worker in self.living_on(node):
            self.kill(worker, node_died=True, heard_after=heard_after)

    def kill(self, worker: Worker, *, node_died: bool = False, heard_after: float | None = None) -> None:
        """End a worker; the driver receives the loss after a while."""
        self.struck.append(Strike.KILL)
        self.end(worker, node_died=node_died, heard_after=heard_after)

    def end(self, worker: Worker, *, node_died: bool = False, heard_after: float | None = None) -> None:
        if not worker.alive:
            return
        worker.alive = False
        after_s = self.delay() * 3 if heard_after is None else heard_after
        for driver in self.drivers:
            driver.hear_of_end(worker, after_s, node_died=node_died)
        if worker.group is not None and worker.group.spec.generation == worker.generation:
            self.break_group(worker.group, but=worker.id)

    def break_group(self, group: Group, *, but: WorkerId) -> None:
        """Some of the others notice by themselves that a collective is broken."""
        for member, worker in list(group.workers.items()):
            if member != but and self.random.random() < 0.4:
                self.later(self.delay(), partial(worker.interrupt, group.spec.generation))


class Peers:
    """The workers of the run, as the one that leads the last checkpoint reaches them."""

    def __init__(self, cluster: Cluster, leader: Worker) -> None:
        self._cluster, self._leader = cluster, leader

    def _newest(self) -> dict[WorkerId, Worker]:
        """The newest worker of each number."""
        return {w.id: w for w in sorted(self._cluster.everyone, key=lambda w: (w.id, w.started_by)) if w.alive}

    def before(self, worker: WorkerId) -> list[WorkerId]:
        return [other for other in self._newest() if other < worker]

    def ask(
        self, calls: Mapping[WorkerId, tuple[Any, ...]] | None, method: str, *args: Any, timeout_s: float
    ) -> dict[WorkerId, Any]:
        asked = [w for w in self._newest().values() if calls is None or w.id in calls]
        answers: dict[int, Any] = {}
        for number, worker in enumerate(asked):
            if not worker.placed:
                continue
            more = calls[worker.id] if calls is not None else ()
            self._cluster.call_beside(
                worker,
                lambda w, more=more: getattr(w, method)(*args, *more),  # type: ignore[misc]
                partial(answers.__setitem__, number),
            )
        self._cluster.wait_for(
            self._leader,
            lambda: all(number in answers or not worker.alive for number, worker in enumerate(asked)),
            timeout_s,
        )
        return {asked[number].id: answer for number, answer in answers.items() if answer is not REFUSED}

    def end_all(self) -> None:
        for worker in list(self._cluster.everyone):
            if worker is not self._leader:
                self._cluster.end(worker)
