"""The driver's laws, under random histories of faults on a simulated cluster.

RAYSHARDED_SCHEDULES sets the number of histories.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, groupby, pairwise

from hypothesis import HealthCheck, given, seed, settings, strategies as st

from raysharded.checkpoint.retention.catalog import list_checkpoints
from raysharded.checkpoint.stored_claims import list_numbers, read_claim
from raysharded.driver import machine
from raysharded.driver.startup import adopted_workers
from raysharded.driver.startup.resume_point import distrusted
from raysharded.driver.state.commands import (
    Command,
    CommitSave,
    DeleteCheckpoints,
    End,
    Form,
    KillWorker,
    Record,
    StartWorker,
    Train,
)
from raysharded.driver.state.events import (
    ASKED,
    Committed,
    Deleted,
    DrainRequested,
    Event,
    Recorded,
    ResizeRequested,
    WorkerReply,
)
from raysharded.driver.state.node_health import avoided, is_drained
from raysharded.driver.state.state import Phase, State
from raysharded.errors import ClusterError, InexactError, NonFiniteLoss, RunFailed, TaskError
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import read
from raysharded.layout import Held, Plan, Target, has_mirrors, make_plan, mirror_of
from raysharded.overrides import agree, decided, factor_at
from raysharded.protocol.death import Death
from raysharded.protocol.messages import (
    FromCheckpoint,
    FromMemory,
    GenerationReady,
    GenerationSpec,
    Progress,
    StopReason,
)
from raysharded.protocol.session import AdoptedWorker, believed, taken_back
from raysharded.report.history.summary import summarise
from tests.driver.schedules import (
    Schedule,
    below_the_minimum,
    controlled,
    cut_apart,
    deciding,
    handing_over,
    left_alone,
    schedules,
    well_controlled,
    with_dead_devices,
)
from tests.driver.simulated import Cluster
from tests.driver.simulated_driver import SimulatedDriver
from tests.driver.simulated_workers import SPEC, Group, Worker, fingerprint_at, newest_complete_step, states
from tests.driver.strikes import Strike

LATE_S = 30.0
"""After so long an answer has arrived."""
GOING_TOGETHER_S = 30.0
"""Workers that must all leave, within this time of each other, are at work until then."""
NUM_SCHEDULES = int(os.environ.get("RAYSHARDED_SCHEDULES", "100"))


class Laws:
    """Conditions that must hold after every event; one instance follows one run."""

    def __init__(self) -> None:
        self.formed: Counter[GenerationId] = Counter()
        self.planned = False
        self.now = 0.0

    def __call__(self, cluster: Cluster, before: State, event: Event | None, commands: list[Command]) -> None:
        state, self.now = cluster.state, cluster.now
        if isinstance(event, WorkerReply) and isinstance(event.message, GenerationReady):
            self.formed[event.message.generation] += 1
        at_most = state.limits.max_workers + state.limits.spares
        assert len(state.staying) + len(state.starting) <= at_most, "more workers than asked for"
        alive = {worker.id for worker in cluster.workers.values() if worker.alive}
        assert event is None or alive <= before.ready | before.starting.keys(), "a worker that nobody knows of"
        if isinstance(event, Committed | Deleted | Recorded) or before.checkpoint is not state.checkpoint:
            self.what_the_run_goes_on_from_is_there(cluster)
        if before.phase is state.phase is Phase.PAUSED:
            assert (before.step, before.generation) == (state.step, state.generation), "a paused run goes on"
        self.what_is_given_up_is_on_record_and_repeated(before, state, event, commands)
        assert not any(isinstance(command, End) for command in commands[:-1]), "something follows the end"
        assert (state.phase is Phase.OVER) == (bool(commands) and isinstance(commands[-1], End))
        for command in commands:
            match command:
                case KillWorker(worker=worker):
                    killed = cluster.workers[worker]
                    expected = killed.noticed or killed.blamed or killed.has_dead_device or worker in before.leaving
                    expected = expected or cluster.where.get(worker) in avoided(before.nodes)
                    asked = isinstance(event, ResizeRequested | DrainRequested)
                    expected = expected or (asked and worker not in before.members)
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
                    for_now = {*state.terminating_nodes, *state.failed_starts}
                    assert set(avoided(state.nodes)) <= set(avoid) <= {*avoided(state.nodes), *for_now}
                    allowed = {*for_now, *(node for node in state.nodes if is_drained(state.nodes, node))}
                    assert state.limits.max_node_failures is not None or set(avoid) <= allowed
                case Form(spec=spec):
                    assert spec.generation == before.generation + 1
                    self.is_prepared(cluster, spec)
                    self.members_can_form(cluster, spec)
                    self.nothing_is_undone(cluster, spec)
                    self.every_row_has_an_owner(cluster, spec)
                case DeleteCheckpoints(prefixes=prefixes) if isinstance(event, Recorded):
                    assert set(prefixes) <= distrusted(read(cluster.storage)), "deleted before it was on record"
                case Train(generation=generation, members=members, rest=rest):
                    assert rest or state.pause is None, "a step is begun in a pause"
                    self.only_this_generation_trains(cluster, generation, members)
                case CommitSave(generation=generation, step=step, parts=parts):
                    assert len(parts) == len(cluster.group(generation).spec.members)
                    assert {(part.generation, part.step) for part in parts} == {(generation, step)}
                case _:
                    pass

    def what_is_given_up_is_on_record_and_repeated(
        self, before: State, state: State, event: Event | None, commands: list[Command]
    ) -> None:
        """A checkpoint ends with an entry. If it is not committed, another one begins, or is requested."""
        newest, last = state.checkpoint.step if state.checkpoint else 0, state.limits.max_steps
        if state.phase is Phase.OVER:
            return
        for key in before.saves.keys() - state.saves.keys():
            saving = before.saves[key]
            done = isinstance(event, Committed) and (event.generation, event.step) == key
            undone = any(isinstance(c, Record) and c.kind in ("rewind", "corruption") for c in commands)
            if not (done or undone or saving.fingerprint_only):
                kinds = {c.kind for c in commands if isinstance(c, Record) and c.fields.get("step") == saving.step}
                assert kinds & {"checkpoint_failed", "checkpoint_overtaken"}, f"step {saving.step} is given up, unsaid"
                assert saving.step <= newest or saving.step == last or state.given_up is not None
        reported = isinstance(event, WorkerReply) and isinstance(event.message, Progress) and event.message.reports
        if state.given_up is None or not reported or state.phase is not Phase.TRAINING or state.step >= last:
            return
        waits = self.now < state.given_up.again_at
        assert waits or state.saves or state.asked or state.save_requested_in == state.generation, "it is not repeated"

    def what_the_run_goes_on_from_is_there(self, cluster: Cluster) -> None:
        newest = cluster.state.checkpoint
        if newest is not None:
            there = {ref.prefix for ref in list_checkpoints(cluster.storage) if ref.complete}
            assert newest.prefix in there - cluster.distrusted, "retention has taken it"

    def is_prepared(self, cluster: Cluster, spec: GenerationSpec) -> None:
        """All members have prepared a reported preparation; unless one has exited, whose loss is not received yet."""
        if spec.prepared:
            cluster.prepared_forms += 1
            members = [cluster.workers[member] for member in spec.members]
            assert all(worker.prepared == spec.prepared for worker in members if worker.alive)

    def nobody_takes_the_only_copy_along(self, cluster: Cluster, killed: Worker) -> None:
        """A committed state that still exists does not end with a worker that may yet wake up."""
        trusted = cluster.state.invalidated_up_to
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
        assert spec.tensor == limits.tensor
        assert len(spec.members) % spec.tensor == 0
        self.workers_are_where_they_should(cluster, spec)
        kept = len(cluster.state.leaving.keys() & set(spec.members))
        least = 1 if cluster.state.relayed else limits.min_workers // spec.tensor * spec.tensor
        assert least <= len(spec.members) <= limits.max_workers + kept
        self.members_reach_each_other(cluster, spec)
        self.nobody_leaves_too_late(cluster, spec)
        busy = [w.id for w in cluster.workers.values() if w.alive and w.busy and not (w.silent or w.has_dead_device)]
        assert not busy, f"workers {busy} are still in an older generation"

    def members_reach_each_other(self, cluster: Cluster, spec: GenerationSpec) -> None:
        """As far as is known. The newest step that a large enough set of such workers holds is not lost."""
        state = cluster.state
        broken, tensor = state.links.pairs, spec.tensor
        members = frozenset(spec.members)
        assert not any(members.issuperset(pair) for pair in broken)
        rewinds = state.plan is not None and state.plan.rewind is not None
        if tensor > 1 or rewinds or not any(state.ready.issuperset(pair) for pair in broken):
            return
        newest = 0
        for count in range(state.limits.min_workers, len(state.ready) + 1):
            for chosen in combinations(sorted(state.ready), count):
                if not any(set(chosen).issuperset(pair) for pair in broken):
                    newest = max(newest, newest_at_work(state, chosen, len(chosen)) or 0)
        assert spec.source.step >= newest, f"step {newest} is held by workers that reach each other"

    def workers_are_where_they_should(self, cluster: Cluster, spec: GenerationSpec) -> None:
        """As many tensor parallel groups as possible are on one node, and a shard and its mirror on different ones. The
        workers of a node, if so many are numbered, follow each other."""
        where = [cluster.where[member] for member in spec.members]
        groups = [set(where[first : first + spec.tensor]) for first in range(0, len(where), spec.tensor)]
        whole = sum(len(group) == 1 for group in groups)
        assert whole == sum(there // spec.tensor for there in Counter(where).values()), "a group is on several nodes"
        mesh, fullest = spec.mesh, max(Counter(where).values())
        if has_mirrors(mesh) and cluster.limits.mirrors and whole == len(groups) and len(set(where)) > 1:
            at_home = sum(where[rank] == where[mirror_of(rank, mesh.shards, mesh.apart)] for rank in range(mesh.shards))
            assert at_home == max(0, 2 * fullest - mesh.shards), "a node holds both copies without need"
        if spec.nodes:
            assert [where.index(node) for node in where] == [spec.nodes.index(node) for node in spec.nodes]
            for replica in range(mesh.replicas):
                of_group = [where[rank] for rank in mesh.group(replica)]
                assert len(list(groupby(of_group))) == len(set(of_group)), "a node's workers are apart from each other"

    def nobody_leaves_too_late(self, cluster: Cluster, spec: GenerationSpec) -> None:
        """A leaver is a member once more only in three cases: the others are too few, or they do not hold the newest
        step (as many of them as can be at work), or nobody stays, and nobody goes much later."""
        state = cluster.state
        kept = state.leaving.keys() & set(spec.members)
        if not state.staying:
            latest = max(state.leaving[worker].by for worker in state.ready)
            kept = {worker for worker in kept if state.leaving[worker].by < latest - GOING_TOGETHER_S}
        if not kept or len(spec.members) <= state.limits.min_workers:
            return
        for leaver in kept:
            others = [member for member in spec.members if member != leaver]
            newest = newest_at_work(state, others, len(others) // spec.tensor * spec.tensor)
            assert newest is None or newest < spec.source.step

    def nothing_is_undone(self, cluster: Cluster, spec: GenerationSpec) -> None:
        """The source is the newest complete step. A committed step is lost only with both of its copies; unless
        somebody wants to roll back."""
        plan = cluster.state.plan
        if plan is not None and plan.rewind is not None:
            assert isinstance(spec.source, FromCheckpoint)
            assert spec.source.prefix == plan.rewind.checkpoint.prefix
            return
        checkpoint = cluster.state.checkpoint
        alive = [worker for worker in cluster.workers.values() if worker.alive and worker.id in spec.members]
        trusted = cluster.state.invalidated_up_to
        held = [(worker.decisions, held) for worker in alive for held in worker.held() if held.layout_id > trusted]
        decisions, is_new = cluster.state.decisions, not any(r.kind == "generation" for r in cluster.driver.records)
        # A driver that died before a decision was in the journal leaves workers that know of it: of their memory, the
        # next one uses only the part that came before it.
        doubted = is_new and not all(agree(known, decisions, one.step) for known, one in held)
        newest = newest_complete_step([one for known, one in held if not doubted or agree(known, decisions, one.step)])
        assert spec.source.step >= (newest or 0)
        assert spec.source.step >= (checkpoint.step if checkpoint else 0)
        apart = any(cluster.state.ready.issuperset(pair) for pair in cluster.state.links.pairs)
        if doubted or apart:  # `members_reach_each_other` knows more
            return
        group = newest_trained(cluster)
        if group is None or group.spec.generation <= trusted:
            return
        gone = [not group.workers[member].alive for member in group.spec.members]
        mesh = group.spec.mesh
        keepers = [
            [
                *mesh.holders(shard),
                *([(shard + mesh.apart) % len(gone)] if has_mirrors(mesh) and cluster.limits.mirrors else []),
            ]
            for shard in range(mesh.shards)
        ]
        if not any(all(gone[rank] for rank in of_shard) for of_shard in keepers):
            is_given_up = cluster.state.idle_generations > 2 or self.too_many_are_needed(cluster, spec, group.committed)
            assert spec.source.step >= group.committed or is_given_up

    def too_many_are_needed(self, cluster: Cluster, spec: GenerationSpec, step: int) -> bool:
        """True if no whole tensor parallel groups hold a step, of as many workers as there can be."""
        state = cluster.state
        most = min(len(state.ready), cluster.limits.max_workers + len(state.ready & state.leaving.keys()))
        newest = newest_at_work(state, sorted(state.ready), most // spec.tensor * spec.tensor)
        return spec.tensor > 1 and (newest is None or newest < step)

    def every_row_has_an_owner(self, cluster: Cluster, spec: GenerationSpec) -> None:
        source = spec.source
        if isinstance(source, FromCheckpoint):
            assert source.prefix not in {*cluster.distrusted, *distrusted(read(cluster.storage))}
            assert source.prefix in committed(cluster)
        if not isinstance(source, FromMemory):
            return
        assert all(
            copy.medium == "storage" or copy.layout_id > cluster.state.invalidated_up_to for copy in source.copies
        )
        listed = [
            Held(
                worker=holder,
                step=source.step,
                medium=copy.medium,
                world_size=copy.world_size,
                rank=rank,
                layout_id=copy.layout_id,
                tensor=copy.tensor,
            )
            for copy in source.copies
            if copy.medium != "storage"
            for rank, holder in enumerate(copy.holders)
            if holder is not None
        ]
        assert newest_complete_step(listed) == source.step
        for held in listed:
            assert held.worker in {*spec.members, *spec.failed_devices}
            worker = cluster.workers[held.worker]
            assert not worker.alive or held in worker.held()
        if not self.planned:  # computed as the workers do; once a run, for it takes longer than everything else
            self.planned = True
            target = Target(
                workers=spec.members,
                mirrors=cluster.limits.mirrors,
                replicas=spec.replicas,
                tensor=spec.tensor,
                apart=spec.apart,
            )
            assert isinstance(make_plan(SPEC, source.copies, target), Plan)

    def only_this_generation_trains(
        self, cluster: Cluster, generation: GenerationId, members: tuple[WorkerId, ...]
    ) -> None:
        assert self.formed[generation] >= len(members)
        rates = cluster.group(generation).spec.decisions.rates
        assert rates == decided(read(cluster.storage)).rates, "it trains with what is not on record"
        there = [worker for worker in cluster.workers.values() if worker.responsive and not worker.has_dead_device]
        assert all(not worker.busy for worker in there)

    def take_over(self, driver: SimulatedDriver, there: Sequence[Worker], taken: Sequence[AdoptedWorker]) -> None:
        """The run resumes from the state of the workers that could answer, or from something newer."""
        entries = list(read(driver.cluster.storage))
        after, decisions = taken_back(entries), decided(entries)
        could = [worker for worker in there if (worker.responsive or worker.gave_up) and worker.facts is not None]
        stopped = {w.id: believed(w.stopped(StopReason.ABORTED), w.decisions, after, decisions) for w in could}
        newest = newest_complete_step(held for one in stopped.values() for held in one.held)
        newest = min(newest or 0, newest_committed(driver.cluster, after))
        source = adopted_workers.first_source(adopted_workers.taken_over(driver.state, taken))
        assert source.step >= newest, f"step {newest} was whole in memory, step {source.step} is taken"

    def last_words(self, leader: Worker, there: Sequence[Worker]) -> None:
        cluster = leader.cluster
        entries = list(read(cluster.storage))
        after, decisions = taken_back(entries), decided(entries)
        stopped = [believed(w.stopped(StopReason.ABORTED), w.decisions, after, decisions) for w in there]
        newest = newest_complete_step(held for one in stopped for held in one.held)
        claims = [read_claim(cluster.storage, number) for number in list_numbers(cluster.storage)]
        saved = max((claim.step for claim in claims if claim.prefix not in cluster.distrusted), default=0)
        assert saved >= (newest or 0), f"step {newest} was whole in memory, step {saved} is saved"


def newest_at_work(state: State, workers: Sequence[WorkerId], count: int) -> int | None:
    """The newest step that so many of the workers hold between them, by their reports."""
    held = {worker: state.holdings[worker].held for worker in workers if worker in state.holdings}
    found = (
        newest_complete_step(one for worker in chosen for one in held[worker])
        for chosen in combinations(held, min(count, len(held)))
    )
    return max((step for step in found if step is not None), default=None)


def newest_trained(cluster: Cluster) -> Group | None:
    """The newest generation that has begun to train."""
    trained = [group for group in cluster.groups.values() if group.trained]
    return max(trained, key=lambda group: group.spec.generation, default=None)


def newest_committed(cluster: Cluster, after: GenerationId) -> int:
    """The newest step that all members of the newest generation know to be held twice; 0 if it was taken back."""
    group = newest_trained(cluster)
    return group.committed if group is not None and group.spec.generation > after else 0


def committed(cluster: Cluster) -> set[str]:
    """The folders of the run's checkpoints."""
    claims = [read_claim(cluster.storage, number) for number in list_numbers(cluster.storage)]
    return {claim.prefix for claim in claims if claim.kind == "commit"}


def check_end(schedule: Schedule, cluster: Cluster) -> None:
    """The run reached its last step, or ended with a reason that really occurred."""
    state, struck, limits = cluster.state, Counter(cluster.struck), cluster.state.limits
    last = Counter(record.kind for record in cluster.driver.records)
    kinds = Counter(record.kind for driver in cluster.drivers for record in driver.records)
    gone = last["worker_lost"] + last["start_failed"] + last["worker_refused"] + last["worker_leaving"]
    gone += len(cluster.driver.initial.leaving)  # they were too many
    resizes = [record.fields for record in cluster.driver.records if record.kind == "resize"]
    gone += sum(len(fields["leaving"]) + len(fields["cancelled"]) for fields in resizes)
    assert len(cluster.workers) <= limits.most_workers + limits.spares + gone
    noticed = sum(worker.noticed for worker in cluster.everyone)
    for driver in cluster.drivers:
        check_answers(cluster, driver)
    match cluster.error:
        case None if struck[Strike.LEAVE] and state.result_fingerprint is None:
            assert last["stopped"] == 1
        case None:
            assert state.step == limits.max_steps
            assert last["finished"] == 1
            history = states(decided(read(cluster.storage)), limits.max_steps)
            assert state.result_fingerprint == fingerprint_at(limits.max_steps, history[-1])
            if limits.save_at_end:
                assert state.checkpoint is not None
                assert state.checkpoint.step == limits.max_steps
                left = [ref for ref in list_checkpoints(cluster.storage) if ref.complete and not ref.marked]
                assert len(left) <= cluster.keep_last, "more are kept than keep_last"
            check_steps(cluster)
        case RunFailed() as error if "were lost" in str(error):
            assert limits.max_worker_losses is not None
            gone_before_they_were_heard = noticed + struck[Strike.CORRUPT]
            silent = struck[Strike.SILENCE] + struck[Strike.FREEZE]
            assert struck[Strike.KILL] + silent + gone_before_they_were_heard > limits.max_worker_losses
        case RunFailed() as error if "failed to start" in str(error):
            gone_before_they_started = struck[Strike.FAIL_START] + struck[Strike.KILL] + noticed
            assert gone_before_they_started >= limits.max_start_failures
        case RunFailed() as error if "last checkpoint" in str(error):
            failed = struck[Strike.FAIL_SAVE] + struck[Strike.FAIL_COMMIT]
            assert failed > limits.last_save_retries or struck[Strike.SILENCE] or struck[Strike.FREEZE]
        case RunFailed() as error if "checkpoints in a row" in str(error):
            assert limits.stop_on_failed_saves
            assert kinds["checkpoint_failed"] >= limits.max_failed_saves
        case ClusterError():
            assert struck[Strike.NEVER_START] or struck[Strike.CUT] or set(cluster.nodes) <= set(avoided(state.nodes))
        case InexactError():
            assert kinds["corruption"] >= 2 or (limits.proves_first_step and kinds["proof_failed"] >= 1)
        case NonFiniteLoss():
            rewinds = [r for driver in cluster.drivers for r in driver.records if r.kind == "rewind"]
            by_policy = sum(record.fields.get("who") != ASKED for record in rewinds)
            assert struck[Strike.NOT_FINITE] > by_policy
            assert by_policy or not limits.rewind
        case TaskError():
            assert struck[Strike.RAISE] + struck[Strike.DEVICE] > limits.task_error_retries
            newest = state.checkpoint.step if state.checkpoint is not None else 0
            others = struck.keys() - {Strike.RAISE, Strike.ASK, Strike.REPEAT}
            assert others or newest >= state.step or not limits.save_at_end, "its newest step is not saved"
        case error:
            raise AssertionError(f"ended without a good reason: {error!r}")


def check_steps(cluster: Cluster) -> None:
    """A reader of the final journal finds every step once."""
    entries = list(read(cluster.storage))
    summary, decisions = summarise(entries), decided(entries)
    assert [step.step for step in summary.steps] == list(range(1, cluster.max_steps + 1))
    history = states(decisions, cluster.max_steps)
    for step in summary.steps:  # a function of the control log alone
        assert step.gradient_norm == history[step.step] % 1000
        assert step.lr == 0.1 * factor_at(decisions.rates, step.step)
    assert summary.differences == (), "a step that was computed again came out otherwise"
    current: set[int] = set()
    for entry in entries:
        match entry["kind"]:
            case "started":
                current = {step for step in current if step <= entry["resumed_after_step"]}
            case "generation":
                current = {step for step in current if step <= entry["step"]}
            case "step":
                assert entry["step"] not in current, f"step {entry['step']} is there twice"
                current.add(entry["step"])


def check_answers(cluster: Cluster, driver: SimulatedDriver) -> None:
    """A request for a checkpoint got one of a later step (in a pause there is none), or a reason; all requests did if
    the run came to its end."""
    paused = any(record.kind == "paused" for record in driver.records)
    for request, answer in driver.answers.items():
        if not answer.error:
            assert answer.prefix in committed(cluster)
            assert answer.step + paused > driver.asked_at[request] or answer.step == cluster.max_steps
    finished = driver is cluster.driver and driver.error is None and driver.state.result_fingerprint is not None
    if finished and driver.state.checkpoint and driver.state.checkpoint.step == cluster.max_steps:
        assert driver.answers.keys() == driver.asked_at.keys()


def check_journal(cluster: Cluster, driver: SimulatedDriver) -> None:
    """Guarantees for a reader of a driver's entries."""
    started = formed = step = 0
    lost: set[WorkerId] = set()
    recovered: set[WorkerId] = set()
    avoiding: set[str] = set()
    for record in driver.records:
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
                assert fields["failed"] >= cluster.limits.max_failed_saves
                assert cluster.struck.count(Strike.FAIL_SAVE) + cluster.struck.count(Strike.FAIL_COMMIT) > 0
                assert fields["newest"] < fields["step"]
            case "checkpoint_late":
                assert cluster.saves_at(fields["step"])
                assert fields.get("since_s", 0.0) >= 0
            case "node_avoided":
                limit = cluster.limits.max_node_failures
                assert limit is not None
                assert fields["failures"] >= limit
                assert fields["reasons"]
                assert fields["node"] not in avoiding
                avoiding.add(fields["node"])
            case "node_allowed":
                avoiding.remove(fields["node"])
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


def check_claims(cluster: Cluster) -> None:
    """One driver commits at a time, and its follower reads its entries in the journal."""
    owner = ""
    for number in list_numbers(cluster.storage):
        claim = read_claim(cluster.storage, number)
        if claim.kind == "owner":
            owner = claim.writer
        assert claim.writer == owner, f"{claim.writer} commits, and {owner} owns the run"
    writers = [
        json.loads(cluster.storage.read(key).split(b"\n")[0])["writer"] for key in cluster.storage.list("journal")
    ]
    followed = [a for a, b in pairwise(writers) if a != b]
    assert len(set(followed)) == len(followed), f"drivers write to the journal by turns: {writers}"


def run(schedule: Schedule, explain: Callable[[Worker], Sequence[Death]] = lambda _: ()) -> Cluster:
    cluster = schedule.cluster()
    cluster.explain = explain
    cluster.run(Laws())
    check_end(schedule, cluster)
    check_claims(cluster)
    for driver in cluster.drivers:
        check_journal(cluster, driver)
    return cluster


@settings(max_examples=NUM_SCHEDULES, deadline=None, suppress_health_check=list(HealthCheck))
@given(schedules())
def test_in_every_history_the_run_ends_well_or_gives_the_reason(schedule: Schedule) -> None:
    run(schedule)


@settings(max_examples=NUM_SCHEDULES // 4, deadline=None, suppress_health_check=list(HealthCheck))
@given(left_alone())
def test_with_any_fault_to_workers_without_a_driver_the_run_ends_well_or_gives_the_reason(schedule: Schedule) -> None:
    run(schedule)


def have_effects(histories: st.SearchStrategy[Schedule], number: int, *effects: str, least: int = 1) -> None:
    """Run so many of these histories. Each effect is in `least` of them, or more are run, ten times as many at most.

    An effect is a kind of record, or a field of a generation's. Hypothesis draws some lots of histories much alike.
    """
    found: Counter[str] = Counter()

    @settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))
    @given(histories)
    def follow(schedule: Schedule) -> None:
        records = [record for driver in run(schedule).drivers for record in driver.records]
        found.update(
            {field for one in records if one.kind == "generation" for field in one.fields}
            | {record.kind for record in records}
        )

    follow()
    for lot in range(1, 10):
        if min(found[effect] for effect in effects) < least:
            seed(lot)(follow)()
    assert min(found[effect] for effect in effects) >= least, f"hardly any history has an effect: {found}"


def test_with_gpus_that_fail_what_their_workers_alone_hold_is_not_lost() -> None:
    have_effects(with_dead_devices(), NUM_SCHEDULES // 3, "failed_devices")


def test_with_links_that_are_cut_the_run_goes_on_with_those_that_reach_each_other() -> None:
    have_effects(cut_apart(), NUM_SCHEDULES // 2, "links_broken", "excluded", least=NUM_SCHEDULES // 20)


def test_where_too_few_reach_each_other_those_that_hold_the_newest_step_write_it() -> None:
    have_effects(below_the_minimum(), NUM_SCHEDULES // 3, "only_saves")  # in one of five


def test_one_that_survives_and_does_not_reach_all_others_hands_its_state_over() -> None:
    have_effects(handing_over(), NUM_SCHEDULES // 4, "hands_over", least=NUM_SCHEDULES // 20)


@settings(max_examples=NUM_SCHEDULES // 4, deadline=None, suppress_health_check=list(HealthCheck))
@given(deciding())
def test_with_any_changes_by_people_the_steps_follow_from_the_journal(schedule: Schedule) -> None:
    run(schedule)


@settings(max_examples=NUM_SCHEDULES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(controlled())
def test_with_any_requests_meanwhile_the_run_ends_well_or_gives_the_reason(schedule: Schedule) -> None:
    run(schedule)


@settings(max_examples=NUM_SCHEDULES // 10, deadline=None, suppress_health_check=list(HealthCheck))
@given(well_controlled())
def test_neither_a_pause_nor_another_number_of_workers_costs_a_step(schedule: Schedule) -> None:
    check_nothing_is_lost(run(schedule))


def killed(worker: Worker) -> Sequence[Death]:
    """The report on a worker that was ended from outside, in one of all ways, with its place in the run."""
    ways = (
        Death(signal="SIGKILL"),
        Death(signal="SIGTERM"),
        Death(signal="SIGKILL", out_of_memory="the kernel's memory killer ended it"),
        Death(status=1, from_outside=True),
        Death(signal="SIGSEGV", from_outside=True),
        Death(stderr=("nothing is known",)),
    )
    way = ways[worker.id % len(ways)]
    return [replace(way, generation=worker.generation, step=worker.step + 1, phase="forward", microbatch=0)]


@settings(max_examples=NUM_SCHEDULES // 2, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(schedules(), left_alone(), controlled()))
def test_kills_and_preemptions_that_are_explained_never_end_a_run(schedule: Schedule) -> None:
    strict = replace(schedule, limits=replace(schedule.limits, max_same_deaths=2))
    cluster = run(strict, killed)  # other ends are given by their reasons
    assert not any(record.kind == "repeated_death" for driver in cluster.drivers for record in driver.records)


def check_nothing_is_lost(cluster: Cluster) -> None:
    """Every step was computed once, and every later generation resumed from memory; nobody counts as lost."""
    assert cluster.error is None
    records = cluster.driver.records
    steps = [record.fields["step"] for record in records if record.kind == "step"]
    assert steps == list(range(cluster.driver.initial.step + 1, cluster.max_steps + 1))
    assert {record.fields["source"] for record in records if record.kind == "generation"} <= {"memory", first(records)}
    assert not any(record.kind in ("worker_lost", "worker_leaving", "recovery") for record in records)
    assert (cluster.state.losses, cluster.state.preemptions) == (0, 0)


def first(records: Sequence[Record]) -> object:
    """The source of the first generation's state."""
    return next(record.fields["source"] for record in records if record.kind == "generation")


@settings(max_examples=NUM_SCHEDULES // 10, deadline=None)
@given(st.one_of(schedules(), controlled(), deciding()))
def test_a_recorded_history_replayed_gives_the_same_commands(schedule: Schedule) -> None:
    for driver in run(schedule).drivers:
        if driver.commands:
            outcome = machine.begin(driver.initial, driver.began_at)
            commands = [outcome[1]]
            for event, at in driver.log:
                outcome = machine.step(outcome[0], event, at)
                commands.append(outcome[1])
            assert repr(commands) == repr(driver.commands)
            assert repr(outcome[0]) == repr(driver.state)
