"""One driver of a simulated run: the work of `raysharded.driver.driver.Driver`, in simulated time.

It comes to its run through the real `RunStartup`, with the real claims and the real journal. Writes that were under way
when it was killed or stopped may still arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from raysharded.checkpoint import Claims
from raysharded.checkpoint.retention.catalog import CheckpointRef, list_checkpoints
from raysharded.checkpoint.retention.policy import Candidate, Keep, to_delete
from raysharded.checkpoint.retention.two_phase_delete import retire
from raysharded.checkpoint.stored_claims import list_numbers
from raysharded.checkpoint.writer import commit
from raysharded.driver import machine
from raysharded.driver.checkpoints.committer import ManifestContext, RunFiles, distrust, fingerprint_of, manifest_of
from raysharded.driver.checkpoints.protected import protected_checkpoints
from raysharded.driver.checkpoints.requests import SaveCallThrottle
from raysharded.driver.startup import adopted_workers
from raysharded.driver.startup.run_startup import RunStartup
from raysharded.driver.state.commands import (
    Answer,
    AskFingerprint,
    AskReport,
    CheckLinks,
    CollectSave,
    Command,
    CommitSave,
    DeleteCheckpoints,
    End,
    Form,
    Interrupt,
    KillWorker,
    Poll,
    Prepare,
    Probe,
    Record,
    RequestBoundary,
    RequestSave,
    SaveSnapshot,
    StartWorker,
    SumFingerprint,
    Train,
)
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.events import (
    NOBODY,
    CheckpointRequested,
    CommitFailed,
    Committed,
    Deleted,
    Event,
    Fingerprinted,
    LeadershipLost,
    Overtaken,
    Ready,
    Recorded,
    Tick,
    WorkerReply,
)
from raysharded.driver.state.state import State
from raysharded.errors import RunOwnedElsewhere, StaleGeneration
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import Journal
from raysharded.overrides import Decisions
from raysharded.protocol.death import DeathExplained
from raysharded.protocol.messages import FromStart, GenerationSpec, WorkerInfo, save_prefix
from raysharded.protocol.session import DriverSession, FoundWorkers, to_take_over
from raysharded.protocol.worker_launcher import LeadershipCheck, LeaveNotice, WorkerLost
from tests.driver.simulated_hold import LEASE_S, SimulatedHold
from tests.driver.simulated_workers import JOB, REFUSED, Call, Group, Worker, report_of, states
from tests.driver.strikes import Strike

if TYPE_CHECKING:
    from tests.driver.simulated import Cluster

ORPHAN_WAIT_S = 60.0
JOURNAL_FLUSH_S = 2.0
NOTICES_AT_ONCE = 0.7
"""Share of the wake-ups in which a driver sees first of all that another has followed."""
PLACE_AGAIN_S = 1.0


class SimulatedDriver:
    """Is its own launcher."""

    def __init__(self, cluster: Cluster, limits: DriverConfig, number: int) -> None:
        self.cluster, self.name = cluster, f"driver{number}"
        self.alive, self.over = True, False
        self.asleep_since = self.asleep_until = 0.0
        """The driver is stopped until then."""
        self.evidence = False
        """True if others can see at once that it is dead."""
        self.error: BaseException | None = None
        self.claims = Claims(cluster.storage, self.name, wall=cluster.wall)
        self.files = RunFiles(
            name="run", storage=cluster.storage, keep=Keep(last=cluster.keep_last), metadata={}, global_batch_size=4
        )
        self.hold = SimulatedHold(cluster, self, self.claims)
        self.journal = Journal(cluster.storage, cluster, self.name, still_owns=self.hold.owns)
        self.startup = RunStartup(
            self.files,
            self.hold,
            self._enter,
            self.claims,
            self.journal,
            cluster,
            lease_s=LEASE_S,
            orphan_wait_s=ORPHAN_WAIT_S,
        )
        self.state = State(limits=limits, driver=self.name)
        self.initial = self.state
        self.began_at = 0.0
        self.terms: DriverSession | None = None
        self.workers: dict[WorkerId, Worker] = {}
        self.heard_at = self.ticked_at = 0.0
        self.log: list[tuple[Event, float]] = []
        self.commands: list[list[Command]] = []
        self.records: list[Record] = []
        self.asked_at: dict[int, int] = {}
        """Request -> the newest step that was reported when it was made, and that is not lost since."""
        self.answers: dict[int, Answer] = {}
        self._requests = 0
        self.last_said: list[WorkerReply] = []
        self._collecting = SaveCallThrottle(self._collect)
        self._committed_at = 0.0
        self._has_begun = False
        self._awaited: list[Recorded] = []
        """The notifications that wait until the journal is written."""
        self._unheard: list[Event] = []
        """Events that came before that."""

    @property
    def awake(self) -> bool:
        return self.alive and not self.over and self.cluster.now >= self.asleep_until

    @property
    def epoch(self) -> int:
        assert self.terms is not None
        return self.terms.epoch

    @property
    def _has_owned(self) -> bool:
        return self.terms is not None or self.owns

    @property
    def owns(self) -> bool:
        """True if no other driver has followed it."""
        return self.cluster.owner is self.hold

    def group(self, generation: GenerationId) -> Group:
        """The group of a generation of this driver."""
        return self.cluster.groups[f"run/{self.name}/g{generation}"]

    # -- its way in --

    def enter(self) -> None:
        """Take the run, and begin; or find that another driver has it. A strand."""
        cluster = self.cluster
        try:
            self.state = self.startup.own(self.state)
            self.state, _ = self.startup.resume(self.state)
            prepared = replace(self.state, rendezvous=("host", 1, f"run/{self.name}"))
            self.state, found, workers = self.startup.take_over(prepared)
        except RunOwnedElsewhere as error:
            self._end(error)
            return
        entries = [Record(kind="started", fields=self.startup.about(self.state), durable=True), *found]
        for record in entries:
            assert isinstance(record, Record)
            self._write(record)
        for worker in workers:
            self._welcome(self.workers[worker])
        self.initial, self.began_at = self.state, cluster.now
        self._follow(None, machine.begin(self.state, cluster.now), entries)
        self._has_begun = True
        for event in self._unheard:
            self.hear(event)
        self._renew()
        self.heard_at = self.ticked_at = cluster.now
        cluster.later(cluster.tick_s, self._tick)

    def _enter(self, terms: DriverSession, leadership: LeadershipCheck) -> FoundWorkers:
        """As the Ray launcher's: living workers are queried, and those that cannot be taken over are ended."""
        self.terms, cluster = terms, self.cluster
        there = [worker for worker in cluster.everyone if worker.alive]
        asked = [worker for worker in there if worker.placed]
        answers: dict[int, Any] = {}
        for number, worker in enumerate(asked):
            cluster.call_beside(worker, lambda w: w.adopt(terms), partial(answers.__setitem__, number))
        since = cluster.now
        while True:
            cluster.wait_for(
                self,
                lambda: all(number in answers or not worker.alive for number, worker in enumerate(asked)),
                LEASE_S / 3,
            )
            adopted = [answer for answer in answers.values() if answer is not REFUSED]
            waiting = [w for number, w in enumerate(asked) if number not in answers and w.alive]
            if not waiting or adopted_workers.may_go_on(adopted, cluster.now - since):
                break
            for worker in asked:
                self._renew_one(worker)
        taken = to_take_over(adopted, JOB)
        by_name = {(worker.started_by, worker.id): worker for worker in there}
        self.workers = {one.worker: by_name[one.epoch, one.worker] for one in taken}
        if self.owns:
            cluster.law.take_over(self, there, taken)
        others = [worker for worker in there if self.workers.get(worker.id) is not worker]
        if leadership.may_act():
            for worker in others:
                cluster.end(worker)
        return FoundWorkers(adopted=tuple(taken), ended=len(others))

    def _welcome(self, worker: Worker) -> None:
        if not worker.alive:
            self._hear_of_end(worker)
        elif worker.gone_at is not None:
            self._hear_notice(worker)

    # -- its events --

    def _tick(self) -> None:
        """As the loop: a tick when no other event was received."""
        cluster = self.cluster
        if not self.alive or self.over:
            return
        idle = cluster.now - self.heard_at
        if idle >= cluster.tick_s - 1e-6:
            self.hear(Tick())
            idle = 0.0
        cluster.later(cluster.tick_s - idle, self._tick)

    def hear(self, event: Event) -> None:
        cluster = self.cluster
        if not self.alive or self.over:
            return
        if not self._has_begun:
            self._unheard.append(event)
            return
        if not self.awake:
            if not isinstance(event, Tick):
                cluster.later(self.asleep_until - cluster.now, lambda: self.hear(event))
            return
        self._take(event)
        if cluster.now - self.ticked_at >= cluster.tick_s:  # also while others keep coming, after all received ones
            self.ticked_at = cluster.now
            cluster.later(0.0, lambda: self.hear(Tick()))

    def _take(self, event: Event) -> None:
        cluster = self.cluster
        self.heard_at = cluster.now
        if isinstance(event, Tick):
            self.ticked_at = cluster.now
        if isinstance(event, CheckpointRequested):
            self.asked_at[event.request] = self.state.step
        if isinstance(event, WorkerLost):
            self._collecting.forget(event.worker)
        self.log.append((event, cluster.now))
        self._follow(event, machine.step(self.state, event, cluster.now))

    def _follow(
        self, event: Event | None, outcome: tuple[State, list[Command]], written: Sequence[Command] = ()
    ) -> None:
        """`written`: entries that are in the journal already."""
        before, (self.state, commands) = self.state, outcome
        self.commands.append(commands)
        self.cluster.observer(self, event, [*written, *commands] if written else commands, self.state)
        if self.owns:
            self.cluster.law(self.cluster, before, event, commands)
        for command in commands:
            self._carry_out(command)

    def fall_asleep(self, seconds: float) -> None:
        self.asleep_since, self.asleep_until = self.cluster.now, self.cluster.now + seconds
        self.cluster.later(seconds, self._wake_up)

    def _wake_up(self) -> None:
        if self.awake and self.cluster.random.random() < NOTICES_AT_ONCE:
            self.disown()

    def disown(self) -> None:
        """Notice that another driver has followed, if so: nothing more is done."""
        if self._has_owned and self.alive and not self.over and not self.hold.owns():
            self.hear(LeadershipLost(reason="followed"))

    def hear_of_end(self, worker: Worker, after_s: float, *, node_died: bool) -> None:
        """Receive the loss of a worker."""
        if self.workers.get(worker.id) is worker:
            self.cluster.later(after_s, lambda: self._hear_of_end(worker, node_died=node_died))

    def _hear_of_end(self, worker: Worker, *, node_died: bool = False) -> None:
        node = worker.node if worker.placed else ""
        self.hear(WorkerLost(worker=worker.id, reason="killed", node_id=node, node_died=node_died))
        for death in self.cluster.explain(worker):
            self.hear(DeathExplained(worker=worker.id, death=death))

    def hear_notice(self, worker: Worker) -> None:
        """Receive a worker's leave notice."""
        if self.workers.get(worker.id) is worker:
            self._hear_notice(worker)

    def _hear_notice(self, worker: Worker) -> None:
        assert worker.gone_at is not None
        for other in self.cluster.everyone if worker.whole_node else ():  # those that have come since, too
            other.noticed = other.noticed or (other.alive and other.node == worker.node)
        left_s = max(0.0, worker.gone_at - self.cluster.now)
        self.hear(LeaveNotice(workers=(worker.id,), reason="told", within_s=left_s, whole_node=worker.whole_node))

    def ask_for_checkpoint(self) -> None:
        self._requests += 1
        self.hear(CheckpointRequested(request=self._requests))

    # -- its commands --

    def _carry_out(self, command: Command) -> None:
        cluster = self.cluster
        match command:
            case StartWorker(worker=worker, avoid=avoid):
                self._start(worker, avoid)
            case KillWorker(worker=worker):
                self._collecting.forget(worker)
                if self.workers[worker].tenancy.terms.epoch <= self.epoch:
                    self.workers[worker].alive = False
            case Form(spec=spec):
                self.asked_at = {request: min(step, spec.source.step) for request, step in self.asked_at.items()}
                for member in spec.members:
                    self._call(member, lambda w: w.form(spec), spec.generation)
            case Prepare(spec=spec):
                for member in spec.members:
                    self._call(member, lambda w: w.prepare(spec))
            case Train(generation=generation, members=members, rest=rest):
                self.group(generation).trained = self.owns
                for member in members:
                    self._call(member, lambda w: w.rest(generation) if rest else w.train(generation), generation)
            case SaveSnapshot(generation=generation, members=members):
                for member in members:
                    self._call(member, lambda w: w.save_held(generation))
            case Interrupt(worker=worker, generation=generation):
                self._tell(worker, lambda w: w.interrupt(generation))
            case RequestBoundary(worker=worker, generation=generation):
                self._tell(worker, lambda w: w.request_boundary(generation))
            case RequestSave(worker=worker, generation=generation):
                self._tell(worker, lambda w: w.request_save(generation))
            case DeleteCheckpoints(prefixes=prefixes):
                cluster.distrusted.update(prefixes)
                distrust(cluster.storage, prefixes, None)
            case Answer(requests=requests):
                assert not self.answers.keys() & set(requests), "answered twice"
                self.answers.update({request: command for request in requests if request > NOBODY})
            case AskReport(worker=worker, generation=generation):
                self._call(worker, lambda w: w.report(generation))
            case Poll(worker=worker, generation=generation, after_step=after_step):
                self._call(worker, lambda w: w.poll(generation, after_step))
            case Probe(worker=worker, generation=generation):
                self._call(worker, lambda w: w.look(generation))
            case CheckLinks(spec=links):
                for worker in sorted({worker for pair in links.pairs for worker in pair}):
                    self._call(worker, lambda w: w.check_links(links))
            case CollectSave(generation=generation, step=step, members=members):
                for member in members:
                    self._collecting.ask(member, generation, step)
            case CommitSave():
                self._commit(command)
            case AskFingerprint(generation=generation, members=members):
                for member in members:
                    self._call(member, lambda w: w.fingerprint(generation))
            case SumFingerprint(parts=parts):
                summed = Fingerprinted(fingerprint=fingerprint_of(parts))
                cluster.later(cluster.delay(), lambda: self.hear(summed))
            case Record():
                self.records.append(command)
                self._write(command)
            case End(error=error):
                self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self.over:
            return
        self.over, self.error, self.hold.ended = True, error, True
        if error is None and self.state.result_fingerprint is not None and self.state.checkpoint and self.owns:
            self._retain_at_the_end()
        if not isinstance(error, RunOwnedElsewhere):
            try:
                self.journal.flush()
            except RunOwnedElsewhere as other:
                self.error = other
        self.cluster.driver_ended(self)

    def _start(self, worker: WorkerId, avoid: tuple[str, ...]) -> None:
        cluster = self.cluster
        assert self.terms is not None
        if worker in self.workers:  # it waits for a place, and may have others
            return
        started = self.workers[worker] = Worker(cluster, worker, self.terms)
        cluster.everyone.append(started)
        cluster.later(LEASE_S, started.watch)
        if not cluster.take(Strike.NEVER_START):
            self._place(started, avoid)

    def _place(self, started: Worker, avoid: tuple[str, ...]) -> None:
        """Start it on an allowed node; as long as there is none it waits."""
        cluster = self.cluster
        fit = [node for node in cluster.nodes if node not in avoid]
        if not started.alive or not self.alive or self.over:
            return
        if not fit:
            cluster.later(PLACE_AGAIN_S, lambda: self._place(started, avoid))
            return
        started.node, started.placed = min(fit, key=lambda node: len(cluster.living_on(node))), True
        if cluster.take(Strike.FAIL_START):
            started.alive = False
            lost = WorkerLost(worker=started.id, reason="does not start", node_id=started.node)
            cluster.later(cluster.delay(), lambda: self.hear(lost))
            return
        cluster.later(cluster.delay() * 5, lambda: self._ready(started))

    def _ready(self, worker: Worker) -> None:
        node = worker.node
        if worker.responsive:
            worker.facts = WorkerInfo(pid=worker.id, node=node, arithmetic={"cpu": "x"}, num_samples=100, node_id=node)
            self.hear(Ready(worker=worker.id, facts=worker.facts))
        if worker.noticed:  # it was starting when its node got the notice
            self.hear(LeaveNotice(workers=(worker.id,), reason="told", within_s=0.5, whole_node=False))

    def _renew(self) -> None:
        """Renew the driver's lease with its workers."""
        if not self.alive or self.over:
            return
        if self.awake:
            for worker in list(self.workers.values()):
                if worker.alive:
                    self.cluster.later(self.cluster.delay(), partial(self._renew_one, worker))
        self.cluster.later(LEASE_S / 3, self._renew)

    def _renew_one(self, worker: Worker) -> None:
        if self.cluster.now < worker.frozen_until:
            self.cluster.later(worker.frozen_until - self.cluster.now, lambda: self._renew_one(worker))
        elif worker.responsive:
            worker.obeys(self.epoch)

    # -- calls --

    def _tell(self, worker: WorkerId, what: Callable[[Worker], None]) -> None:
        called = self.workers[worker]

        def begin() -> None:
            if called.responsive and called.obeys(self.epoch):
                what(called)

        self.cluster.later(self.cluster.delay(), lambda: self.cluster.arrive(called, begin))

    def _call(
        self,
        worker: WorkerId,
        make: Callable[[Worker], Call],
        generation: GenerationId | None = None,
        replied: Callable[[], None] = lambda: None,
    ) -> None:
        def heard(message: Any) -> None:
            if self.alive and not self.over:
                replied()
            if message is not None and message is not REFUSED:
                said = WorkerReply(worker=worker, message=message)
                self.last_said.append(said)
                self.hear(said)

        self.cluster.call(self.workers[worker], self.epoch, make, heard, generation)

    def _collect(self, worker: WorkerId, generation: GenerationId, step: int) -> None:
        answered = partial(self._collecting.answered, worker)
        self._call(worker, lambda w: w.collect_save(generation, step), replied=answered)

    # -- the journal --

    def _write(self, record: Record) -> None:
        self.journal.add(record.kind, record.fields, at=self.cluster.now)
        if record.awaited_by is not None:
            self._awaited.append(Recorded(generation=record.awaited_by))
        after_s = self.cluster.delay() if record.durable else JOURNAL_FLUSH_S + self.cluster.delay()
        self.cluster.later(after_s, lambda: self._when_it_arrives(self._flush))

    def _when_it_arrives(self, write: Callable[[], None]) -> None:
        """Writes that were under way when it was killed or stopped arrive some time, or only when it wakes up, or
        never."""
        cluster = self.cluster
        if self.awake:
            write()
        elif cluster.random.random() < 0.5:
            cluster.later(cluster.random.random() * 2 * LEASE_S, write)
        elif self.alive and not self.over:
            cluster.later(self.asleep_until - cluster.now, lambda: self._when_it_arrives(write))

    def _flush(self) -> None:
        try:
            self.journal.flush()
        except RunOwnedElsewhere as error:
            if self.awake:
                self._end(error)
            return
        told, self._awaited = self._awaited, []
        for recorded in told:
            self.cluster.later(self.cluster.delay(), partial(self.hear, recorded))

    # -- commits: in order, one after the other --

    def _commit(self, command: CommitSave) -> None:
        cluster = self.cluster
        manifest_at = max(self._committed_at, cluster.now + cluster.delay() * 3)
        self._committed_at = manifest_at + cluster.delay()
        state = self.state
        known = ManifestContext(
            arithmetic=dict(state.arithmetic or {}), num_samples=state.num_samples, decisions=state.decisions
        )
        cluster.later(manifest_at - cluster.now, lambda: self._put_manifest(command, known))

    def _put_manifest(self, command: CommitSave, known: ManifestContext) -> None:
        cluster = self.cluster
        if not self.alive or self.over:
            return
        if not self.awake:
            cluster.later(self.asleep_until - cluster.now, lambda: self._put_manifest(command, known))
            return
        if cluster.take(Strike.FAIL_COMMIT):
            self.hear(CommitFailed(generation=command.generation, step=command.step, error="OSError"))
            return
        prefix, fingerprint = save_prefix(command.step, command.generation, self.name), fingerprint_of(command.parts)
        manifest = manifest_of(self.files, self.name, cluster, command, known, fingerprint)
        try:
            self.journal.flush()
        except RunOwnedElsewhere as error:
            self._end(error)
            return
        self._flush()
        digest = commit(cluster.storage, prefix, manifest)
        assert digest is not None, "another has written this manifest"
        done = Committed(
            generation=command.generation, step=command.step, prefix=prefix, digest=digest, fingerprint=fingerprint
        )
        self._committed_at = max(self._committed_at, cluster.now)
        cluster.later(self._committed_at - cluster.now, lambda: self._when_it_arrives(lambda: self._claim(done)))

    def _claim(self, done: Committed) -> None:
        try:
            self.claims.commit(done.generation, done.step, done.prefix, done.digest)
        except StaleGeneration as error:
            if isinstance(error, RunOwnedElsewhere) or not self.hold.owns():
                self.disown()
            else:
                self.hear(Overtaken(generation=done.generation, step=done.step, reason="StaleGeneration"))
            return
        assert self.owns, "one that was followed has committed"
        self.hear(done)
        self._retain(done.prefix)

    # -- retention: data is not kept here, so every checkpoint counts as usable --

    def _retain(self, newest: str) -> None:
        cluster = self.cluster
        spare = protected_checkpoints(self.state).prefixes | {newest}
        refs = [ref for ref in list_checkpoints(cluster.storage) if ref.complete and not ref.marked]
        candidates = [Candidate(ref.prefix, ref.step) for ref in refs]
        gone = to_delete(candidates, self.files.keep, pinned=spare, usable=lambda _: True, metrics=lambda _: {})
        prefixes = {one.prefix for one in gone}
        chosen = [ref for ref in refs if ref.prefix in prefixes]
        if chosen:
            cluster.later(cluster.delay(), lambda: self._retire(chosen))

    def _retain_at_the_end(self) -> None:
        """As the committer when the run has done its last step: nothing is needed any more."""
        storage, keep = self.cluster.storage, self.files.keep
        refs = [ref for ref in list_checkpoints(storage) if ref.complete and not ref.marked]
        candidates = [Candidate(ref.prefix, ref.step) for ref in refs]
        gone = to_delete(candidates, keep, pinned=(), usable=lambda _: True, metrics=lambda _: {})
        for ref in refs:
            if ref.prefix in {one.prefix for one in gone}:
                retire(storage, ref, number=max(list_numbers(storage)))

    def _retire(self, refs: Sequence[CheckpointRef]) -> None:
        cluster = self.cluster
        if not self.awake:
            return
        number = max(list_numbers(cluster.storage))
        retired = [ref.prefix for ref in refs if ref.prefix not in protected_checkpoints(self.state).prefixes]
        for ref in refs:
            if ref.prefix in retired:
                retire(cluster.storage, ref, number=number)
        if retired:
            cluster.later(cluster.delay(), lambda: self.hear(Deleted(prefixes=tuple(retired))))


def prepared_run(storage: Any, cluster: Cluster) -> None:
    """A run with the files of an earlier driver: steps 1 and 2 of generation 7, and a checkpoint of step 2."""
    before = Claims(storage, "before", wall=cluster.wall)
    before.own(1)
    worker = Worker(cluster, WorkerId(0), NOBODYS)
    part = worker.part(GenerationId(7), 2, 0, states(Decisions(), 2)[2])
    command = CommitSave(generation=GenerationId(7), step=2, parts=(part,))
    files = RunFiles(name="run", storage=storage, keep=Keep(), metadata={}, global_batch_size=4)
    known = ManifestContext(arithmetic={"cpu": "x"}, num_samples=100)
    fingerprint = fingerprint_of((part,))
    prefix = save_prefix(2, GenerationId(7), "before")
    cluster.keep(prefix, states(Decisions(), 2)[2])
    digest = commit(storage, prefix, manifest_of(files, "before", cluster, command, known, fingerprint))
    assert digest is not None
    before.commit(7, 2, prefix, digest)
    journal = Journal(storage, cluster, "before")
    spec = GenerationSpec(
        generation=GenerationId(7), members=(WorkerId(0),), source=FromStart(), host="", port=0, prefix=""
    )
    entries: list[tuple[str, Mapping[str, Any]]] = [
        ("started", {"resumed_after_step": 0}),
        ("generation", {"generation": 7, "members": [0], "step": 0, "source": "start"}),
        *(("step", report_of(spec, step, 0.0, states(Decisions(), 2)[step]).fields()) for step in (1, 2)),
    ]
    for kind, fields in entries:
        journal.append(kind, fields)
    journal.flush()


NOBODYS = DriverSession(
    driver="before",
    epoch=1,
    run_name="run",
    global_batch_size=4,
    metadata={},
    signed=False,
    lease_s=LEASE_S,
    orphan_wait_s=ORPHAN_WAIT_S,
)
