"""The driver's laws, under random histories of faults on a simulated cluster.

RAYSHARDED_SCHEDULES sets how many histories are tried.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass

from hypothesis import HealthCheck, given, settings, strategies as st

from raysharded.driver import machine
from raysharded.driver.events import Command, CommitSave, End, Event, Form, KillWorker, Said, StartWorker, Train
from raysharded.driver.messages import Formed, FromCheckpoint, FromMemory, GenerationSpec
from raysharded.driver.nodes import avoided
from raysharded.driver.state import Checkpointed, Limits, Phase, State
from raysharded.errors import ClusterError, InexactError, NonFiniteLoss, RunFailed, TaskError
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Held, Plan, Target, count_neighbours, fewest_neighbours, make_plan
from tests.driver.simulated import SPEC, Cluster, Fault, Strike, Worker, newest_complete_step

LATE_S = 30.0
"""After so long an answer has arrived."""
NUM_SCHEDULES = int(os.environ.get("RAYSHARDED_SCHEDULES", "600"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One history: what the run is, what goes wrong, and the seed of every delay."""

    limits: Limits
    save_every: int | None
    resumed: bool
    tick_s: float
    seed: int
    faults: tuple[Fault, ...]

    def cluster(self) -> Cluster:
        state = State(limits=self.limits, rendezvous=("host", 1, "run"))
        if self.resumed:
            checkpoint = Checkpointed(step=2, prefix="checkpoints/before", fingerprint="state 2")
            state = State(
                limits=self.limits, rendezvous=("host", 1, "run"), generation=GenerationId(7), checkpoint=checkpoint
            )
        return Cluster(state, save_every=self.save_every, seed=self.seed, tick_s=self.tick_s, faults=self.faults)


FAULTS = st.builds(
    Fault,
    strike=st.sampled_from([Strike.KILL] * 6 + [Strike.NODE] * 2 + [Strike.FREEZE] * 2 + list(Strike)),
    whom=st.integers(0, 6),
    nth=st.one_of(st.integers(0, 3), st.integers(0, 60)),
    phase=st.sampled_from([None, None, *(phase for phase in Phase if phase is not Phase.OVER)]),
)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    most = draw(st.integers(1, 5))
    limits = Limits(
        min_workers=draw(st.integers(1, most)),
        max_workers=most,
        max_steps=draw(st.integers(2, 7)),
        exact=True,
        mirrors=True,
        spares=draw(st.sampled_from([0, 0, 1])),
        save_at_end=draw(st.sampled_from([True, True, True, False])),
        start_timeout_s=120.0,
        replacement_wait_s=draw(st.sampled_from([0.0, 0.0, 4.0])),
        max_worker_losses=draw(st.sampled_from([None, None, 2])),
        task_error_retries=1,
        rewind=draw(st.booleans()),
        global_batch_size=4,
        progress_timeout_s=150.0,  # each longer than the simulated delays add up to
        hang_timeout_s=100.0,
        forming_patience_s=100.0,
        stopping_patience_s=60.0,
        stop_timeout_s=60.0,
        form_timeout_s=150.0,
        save_timeout_s=150.0,
        max_node_failures=draw(st.sampled_from([None, 1, 2])),
        max_failed_saves=draw(st.sampled_from([1, 3])),
        stop_on_failed_saves=draw(st.sampled_from([False, False, True])),
    )
    return Schedule(
        limits=limits,
        save_every=draw(st.sampled_from([None, 1, 2, 3])),
        resumed=draw(st.booleans()),
        tick_s=draw(st.sampled_from([0.25, 1.0])),
        seed=draw(st.integers(0, 2**32 - 1)),
        faults=tuple(draw(st.lists(FAULTS, max_size=6))),
    )


class Laws:
    """What must be true after every event; one instance follows one run."""

    def __init__(self) -> None:
        self.formed: Counter[GenerationId] = Counter()
        self.planned = False

    def __call__(self, cluster: Cluster, before: State, event: Event | None, commands: list[Command]) -> None:
        state = cluster.state
        if isinstance(event, Said) and isinstance(event.message, Formed):
            self.formed[event.message.generation] += 1
        at_most = state.limits.max_workers + state.limits.spares
        assert len(state.staying) + len(state.starting) <= at_most, "more workers than asked for"
        alive = {worker.id for worker in cluster.workers.values() if worker.alive}
        assert event is None or alive <= before.ready | before.starting.keys(), "a worker that nobody knows of"
        assert not any(isinstance(command, End) for command in commands[:-1]), "something follows the end"
        assert (state.phase is Phase.OVER) == (bool(commands) and isinstance(commands[-1], End))
        for command in commands:
            match command:
                case KillWorker(worker=worker):
                    killed = cluster.workers[worker]
                    expected = worker in cluster.noticed or worker in cluster.blamed
                    expected = expected or cluster.where.get(worker) in avoided(before.nodes)
                    watch = before.watch
                    late = cluster.pace >= 1.0 and watch.asked_at is not None and worker not in watch.seen
                    frozen = cluster.now < killed.frozen_until + LATE_S
                    assert expected or late or not killed.responsive or killed.deaf or frozen, (
                        f"healthy worker {worker} is killed after {event}"
                    )
                    if killed.alive and killed.responsive and not expected and not killed.deaf:
                        self.nobody_takes_the_only_copy_along(cluster, killed)
                    killed.alive = False
                case StartWorker(avoid=avoid):
                    assert set(avoided(state.nodes)) <= set(avoid) <= {*avoided(state.nodes), *state.doomed}
                    assert state.limits.max_node_failures is not None or set(avoid) <= state.doomed.keys()
                case Form(spec=spec):
                    assert spec.generation == before.generation + 1
                    self.members_can_form(cluster, spec)
                    self.nothing_is_undone(cluster, spec)
                    self.every_row_has_an_owner(cluster, spec)
                case Train(generation=generation, members=members):
                    self.only_this_generation_trains(cluster, generation, members)
                case CommitSave(generation=generation, step=step, parts=parts):
                    assert len(parts) == len(cluster.groups[generation].spec.members)
                    assert {(part.generation, part.step) for part in parts} == {(generation, step)}
                case _:
                    pass

    def nobody_takes_the_only_copy_along(self, cluster: Cluster, killed: Worker) -> None:
        """What is committed and still there does not go with who may yet wake up."""
        trusted = cluster.state.distrusted
        held = {w.id: [h for h in w.held() if h.layout_id > trusted] for w in cluster.workers.values() if w.alive}
        group = max((g for g in cluster.groups.values() if g.trained), key=lambda g: g.spec.generation, default=None)
        if group is None or group.spec.generation <= trusted:
            return
        there = newest_complete_step([one for each in held.values() for one in each])
        left = newest_complete_step([one for worker, each in held.items() if worker != killed.id for one in each])
        checkpoint = cluster.state.checkpoint.step if cluster.state.checkpoint else 0
        assert max(left or 0, checkpoint) >= min(there or 0, group.committed), f"worker {killed.id} had the only copy"

    def members_can_form(self, cluster: Cluster, spec: GenerationSpec) -> None:
        limits = cluster.state.limits
        assert set(spec.members) <= cluster.state.ready
        assert len(set(spec.members)) == len(spec.members)
        together = count_neighbours(spec.members, cluster.where)
        assert together == fewest_neighbours(spec.members, cluster.where), "a node holds both copies without need"
        kept = len(cluster.state.leaving.keys() & set(spec.members))
        assert limits.min_workers <= len(spec.members) <= limits.max_workers + kept
        self.nobody_leaves_too_late(cluster, spec)
        busy = [worker.id for worker in cluster.workers.values() if worker.alive and worker.busy]
        assert not busy, f"workers {busy} are still in an older generation"

    def nobody_leaves_too_late(self, cluster: Cluster, spec: GenerationSpec) -> None:
        """Who must leave is a member once more only if the others are too few, or do not hold the newest step."""
        state = cluster.state
        kept = state.leaving.keys() & set(spec.members)
        if not kept or len(spec.members) <= state.limits.min_workers:
            return
        for leaver in kept:
            others = [cluster.workers[member] for member in spec.members if member != leaver]
            held = [one for w in others if w.id in state.holdings for one in state.holdings[w.id].held]
            newest = newest_complete_step(held)
            assert newest is None or newest < spec.source.step

    def nothing_is_undone(self, cluster: Cluster, spec: GenerationSpec) -> None:
        """The source is the newest complete step; a committed step is lost only with both of its copies."""
        checkpoint = cluster.state.checkpoint
        alive = [worker for worker in cluster.workers.values() if worker.alive and worker.id in spec.members]
        trusted = cluster.state.distrusted
        held = [held for worker in alive for held in worker.held() if held.layout_id > trusted]
        newest = newest_complete_step(held)
        assert spec.source.step >= (newest or 0)
        assert spec.source.step >= (checkpoint.step if checkpoint else 0)
        trained = max((g for g, group in cluster.groups.items() if group.trained), default=None)
        if trained is None or trained <= trusted:
            return
        group = cluster.groups[trained]
        gone = [not cluster.workers[member].alive for member in group.spec.members]
        both_copies = [gone[rank] and gone[(rank + 1) % len(gone)] for rank in range(len(gone))]
        if not any(both_copies):
            assert spec.source.step >= group.committed

    def every_row_has_an_owner(self, cluster: Cluster, spec: GenerationSpec) -> None:
        source = spec.source
        if isinstance(source, FromCheckpoint):
            assert source.prefix in cluster.manifests - cluster.distrusted
        if not isinstance(source, FromMemory):
            return
        assert all(copy.medium == "storage" or copy.layout_id > cluster.state.distrusted for copy in source.copies)
        listed = [
            Held(
                worker=holder,
                step=source.step,
                medium=copy.medium,
                world_size=copy.world_size,
                rank=rank,
                layout_id=copy.layout_id,
            )
            for copy in source.copies
            if copy.medium != "storage"
            for rank, holder in enumerate(copy.holders)
            if holder is not None
        ]
        assert newest_complete_step(listed) == source.step
        for held in listed:
            assert held.worker in spec.members
            worker = cluster.workers[held.worker]
            assert not worker.alive or held in worker.held()
        if not self.planned:  # as the workers do it; once a run, for it takes longer than everything else
            self.planned = True
            assert isinstance(make_plan(SPEC, source.copies, Target(workers=spec.members, mirrors=True)), Plan)

    def only_this_generation_trains(
        self, cluster: Cluster, generation: GenerationId, members: tuple[WorkerId, ...]
    ) -> None:
        assert self.formed[generation] >= len(members)
        assert all(not worker.busy for worker in cluster.workers.values() if worker.alive)


def check_end(schedule: Schedule, cluster: Cluster) -> None:
    """The run reached its last step, or ended with a reason that something really gave."""
    state, struck, limits = cluster.state, Counter(cluster.struck), schedule.limits
    kinds = Counter(record.kind for record in cluster.records)
    gone = kinds["worker_lost"] + kinds["start_failed"] + kinds["worker_refused"] + kinds["worker_leaving"]
    assert len(cluster.workers) <= limits.max_workers + limits.spares + gone
    check_answers(cluster)
    match cluster.error:
        case None if struck[Strike.LEAVE] and state.result_fingerprint is None:
            assert kinds["stopped"] == 1
        case None:
            assert state.step == limits.max_steps
            assert kinds["finished"] == 1
            assert state.result_fingerprint == f"state {limits.max_steps}"
            if limits.save_at_end:
                assert state.checkpoint is not None
                assert state.checkpoint.step == limits.max_steps
            recorded = {record.fields["step"] for record in cluster.records if record.kind == "step"}
            assert recorded >= set(range(3 if schedule.resumed else 1, limits.max_steps + 1))
            assert kinds["corruption"] or not schedule.resumed or recorded.isdisjoint({1, 2})
        case RunFailed() as error if "were lost" in str(error):
            assert limits.max_worker_losses is not None
            gone_before_they_were_heard = len(cluster.noticed) + struck[Strike.CORRUPT]
            silent = struck[Strike.SILENCE] + struck[Strike.FREEZE]
            assert struck[Strike.KILL] + silent + gone_before_they_were_heard > limits.max_worker_losses
        case RunFailed() as error if "failed to start" in str(error):
            assert struck[Strike.FAIL_START] + struck[Strike.KILL] >= limits.max_start_failures
        case RunFailed() as error if "last checkpoint" in str(error):
            failed = struck[Strike.FAIL_SAVE] + struck[Strike.FAIL_COMMIT]
            assert failed > limits.last_save_retries or struck[Strike.SILENCE] or struck[Strike.FREEZE]
        case RunFailed() as error if "checkpoints in a row" in str(error):
            assert limits.stop_on_failed_saves
            assert kinds["checkpoint_failed"] >= limits.max_failed_saves
        case ClusterError():
            assert struck[Strike.NEVER_START] or set(cluster.nodes) <= set(avoided(state.nodes))
        case InexactError():
            assert kinds["corruption"] >= 2
        case NonFiniteLoss():
            assert struck[Strike.NOT_FINITE] > kinds["rewind"]
            assert kinds["rewind"] or not limits.rewind
        case TaskError():
            assert struck[Strike.RAISE] > limits.task_error_retries
        case error:
            raise AssertionError(f"ended without a good reason: {error!r}")


def check_answers(cluster: Cluster) -> None:
    """Whoever asked for a checkpoint got one of a later step, or a reason; all of them if the run came to its end."""
    for request, answer in cluster.answers.items():
        if not answer.error:
            assert answer.prefix in cluster.manifests
            assert answer.step > cluster.asked_at[request] or answer.step == cluster.max_steps
    finished = cluster.error is None and cluster.state.result_fingerprint is not None  # and not only told to stop
    if finished and cluster.state.checkpoint and cluster.state.checkpoint.step == cluster.max_steps:
        assert cluster.answers.keys() == cluster.asked_at.keys()


def check_journal(cluster: Cluster) -> None:
    """What a reader of the journal relies on."""
    started = formed = step = 0
    lost: set[WorkerId] = set()
    recovered: set[WorkerId] = set()
    avoiding: set[str] = set()
    for record in cluster.records:
        fields = record.fields
        match record.kind:
            case "generation":
                assert fields["generation"] > started
                started, step = fields["generation"], fields["step"]
            case "formed":
                formed = fields["generation"]
                assert formed == started
            case "step":
                assert fields["generation"] == formed
                assert fields["step"] == step + 1
                step += 1
            case "checkpoint_overtaken":
                assert fields["newest"] >= fields["step"]
            case "checkpoints_failing":
                assert fields["failed"] >= cluster.state.limits.max_failed_saves
                assert cluster.struck.count(Strike.FAIL_SAVE) + cluster.struck.count(Strike.FAIL_COMMIT) > 0
                assert fields["newest"] < fields["step"]
            case "checkpoint_late":
                assert cluster.saves_at(fields["step"])
                assert fields.get("since_s", 0.0) >= 0
            case "node_avoided":
                limit = cluster.state.limits.max_node_failures
                assert limit is not None
                assert fields["failures"] >= limit
                assert fields["reasons"]
                assert fields["node"] not in avoiding
                avoiding.add(fields["node"])
            case "worker_lost":
                assert fields["worker"] not in lost
                lost.add(fields["worker"])
            case "recovery":
                assert recovered.isdisjoint(fields["lost"]), "recovered from twice"
                recovered.update(fields["lost"])
                assert recovered <= lost
                assert fields["steps_redone"] >= 0
                assert min(fields[name] for name in ("abort_s", "reshard_s", "first_step_s", "total_s")) >= 0
                assert step == fields["resumed_after_step"] + 1, "the recovery was over before its first step"
                assert fields["source"] in ("memory", "checkpoint", "start")


@settings(max_examples=NUM_SCHEDULES, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_whatever_happens_the_run_ends_well_or_says_why(schedule: Schedule) -> None:
    cluster = schedule.cluster()
    cluster.run(Laws())
    check_end(schedule, cluster)
    check_journal(cluster)


@settings(max_examples=NUM_SCHEDULES // 20, deadline=None)
@given(schedules())
def test_a_recorded_history_replayed_gives_the_same_commands(schedule: Schedule) -> None:
    cluster = schedule.cluster()
    cluster.run(Laws())
    outcome = machine.begin(cluster.initial, 0.0)
    commands = [outcome[1]]
    for event, at in cluster.log:
        outcome = machine.step(outcome[0], event, at)
        commands.append(outcome[1])
    assert repr(commands) == repr(cluster.commands)
    assert repr(outcome[0]) == repr(cluster.state)
