"""Workers that outlived their driver: the decisions of the next one, and their messages to each other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.checkpoint import Claims, open_storage
from raysharded.checkpoint.retention.policy import Keep
from raysharded.clock import SystemClock
from raysharded.driver import machine
from raysharded.driver.checkpoints.committer import RunFiles
from raysharded.driver.startup import adopted_workers
from raysharded.driver.startup.run_startup import RunStartup
from raysharded.driver.state.commands import Form, KillWorker, Record, RequestSave, StartWorker
from raysharded.driver.state.state import Checkpointed, Phase, State
from raysharded.errors import RunOwnedElsewhere
from raysharded.ids import GenerationId, WorkerId
from raysharded.journal.log import DamagedJournal, Journal
from raysharded.layout import Held, mirror_of
from raysharded.overrides import Decisions, decided
from raysharded.ownership.leadership import AcquiredLease
from raysharded.protocol.messages import FromCheckpoint, FromMemory, Stopped, StopReason, WorkerInfo, save_prefix
from raysharded.protocol.session import (
    AdoptedWorker,
    DriverSession,
    FoundWorkers,
    LeaseState,
    job_identity,
    last_recorded_step,
    parts_to_write,
    taken_back,
    to_take_over,
    unrecorded,
)
from tests.driver.scripted import LIMITS, Run
from tests.driver.simulated_workers import SPEC, report_of
from tests.training.harness import GptTask, Tokens, make_job

FENCE = GenerationId(6)


def adopted(worker: int, rank: int, world: int, step: int, *, mirrors: bool = True) -> AdoptedWorker:
    """A worker that trained in generation 5 as this rank and holds `step`."""

    def held(medium: str, of: int) -> Held:
        return Held(worker=WorkerId(worker), step=step, medium=medium, world_size=world, rank=of, layout_id=5)  # type: ignore[arg-type]

    holds = (held("snapshot", rank), *([held("mirror", mirror_of(rank, world))] if mirrors else []))
    return AdoptedWorker(
        worker=WorkerId(worker),
        facts=WorkerInfo(pid=worker, node="n", arithmetic={"cpu": "x"}, num_samples=100),
        stopped=Stopped(
            generation=GenerationId(5),
            reason=StopReason.ABORTED,
            step=step,
            phase="forward",
            stopped_at=0.0,
            held=holds,
            specs={step: SPEC},
        ),
        reports=(),
        fence=FENCE,
        decisions=Decisions(),
        job="j",
        epoch=1,
    )


def begun(*workers: AdoptedWorker, checkpoint: Checkpointed | None = None) -> State:
    state = State(limits=LIMITS, rendezvous=("host", 1, "run"), checkpoint=checkpoint, generation=GenerationId(3))
    return adopted_workers.as_decided(adopted_workers.taken_over(state, workers), [], 0.0)


def test_of_two_workers_of_one_number_the_one_that_the_newer_driver_started_is_taken() -> None:
    of_older, of_newer = adopted(2, 0, 2, 7), replace(adopted(2, 1, 2, 8), epoch=4)
    other_job = replace(adopted(3, 1, 2, 7), job="another")
    for answers in ([of_older, of_newer, other_job], [other_job, of_newer, of_older]):
        assert to_take_over(answers, "j") == [of_newer]


class Followed:
    """A hold on a run that a driver before had."""

    def acquire(self) -> AcquiredLease:
        return AcquiredLease(first=GenerationId(4), before="driver older", because="its process is gone")

    def is_sure(self) -> bool:
        return True

    def may_act(self) -> bool:
        return True

    def end(self, timeout_s: float) -> None:
        pass


def test_what_the_driver_before_still_writes_comes_before_its_journal_is_read_or_not_at_all(tmp_path: Path) -> None:
    storage, clock = open_storage(str(tmp_path)), SystemClock()
    older = Journal(storage, clock, "older")
    older.append("generation", {"generation": 3, "step": 0}, durable=True)
    older.add("generation", {"generation": 9, "step": 0}, at=clock.wall())  # on its way
    files = RunFiles(name="run", storage=storage, keep=Keep(), metadata={}, global_batch_size=16)
    journal = Journal(storage, clock, "newer", still_owns=lambda: True)
    startup = RunStartup(
        files,
        Followed(),
        lambda _terms, _hold: FoundWorkers(),
        Claims(storage, "newer"),
        journal,
        clock,
        lease_s=1.0,
        orphan_wait_s=1.0,
    )
    state = startup.own(State(limits=LIMITS, rendezvous=("host", 1, "run")))
    assert state.generation == 3  # the next one is above all in the journal
    with pytest.raises(RunOwnedElsewhere):
        older.flush()


@pytest.mark.parametrize("damage", [{"distrusted": 5}, {"to_step": "two"}])
def test_a_driver_that_cannot_use_what_the_journal_says_of_a_rewind_releases_the_run(
    tmp_path: Path, damage: dict[str, Any]
) -> None:
    storage, clock, ends = open_storage(str(tmp_path)), SystemClock(), list[float]()

    class Released(Followed):
        def end(self, timeout_s: float) -> None:
            ends.append(timeout_s)

    rewind = {"to_step": 2, "reason": "x", "distrusted": [], **damage}
    Journal(storage, clock, "older").append("rewind", rewind, durable=True)
    startup = RunStartup(
        RunFiles(name="run", storage=storage, keep=Keep(), metadata={}, global_batch_size=16),
        Released(),
        lambda _terms, _hold: FoundWorkers(),
        Claims(storage, "newer"),
        Journal(storage, clock, "newer", still_owns=lambda: True),
        clock,
        lease_s=1.0,
        orphan_wait_s=1.0,
    )
    state = startup.own(State(limits=LIMITS))
    with pytest.raises(DamagedJournal, match="has a value that no driver wrote"):
        startup.resume(state)
    assert len(ends) == 1


def test_the_next_generation_is_formed_from_the_memory_of_the_workers_that_were_taken_over() -> None:
    state = begun(*(adopted(worker, rank, 3, 7) for rank, worker in enumerate((4, 5, 8))))
    state, commands = machine.begin(state, 1.0)
    (form,) = [command for command in commands if isinstance(command, Form)]
    assert isinstance(form.spec.source, FromMemory)
    assert form.spec.source.step == 7
    assert sorted(form.spec.members) == [4, 5, 8]
    assert form.spec.generation > FENCE
    assert state.next_worker == 9
    assert not [command for command in commands if isinstance(command, StartWorker)]


def test_what_only_the_mirror_of_a_lost_worker_has_is_enough() -> None:
    state = begun(adopted(0, 0, 3, 7), adopted(2, 2, 3, 7))  # worker 0 or 2 has the mirror of rank 1
    _, commands = machine.begin(state, 1.0)
    (form,) = [command for command in commands if isinstance(command, Form)]
    assert isinstance(form.spec.source, FromMemory)


def test_workers_that_hold_too_little_resume_from_the_checkpoint() -> None:
    saved = Checkpointed(step=4, prefix="four")
    state = begun(adopted(0, 0, 3, 7, mirrors=False), adopted(2, 2, 3, 7, mirrors=False), checkpoint=saved)
    assert adopted_workers.first_source(state).step == 4
    _, commands = machine.begin(state, 1.0)
    (form,) = [command for command in commands if isinstance(command, Form)]
    assert isinstance(form.spec.source, FromCheckpoint)


def test_memory_of_steps_that_were_taken_back_or_computed_on_other_data_is_not_resumed_from() -> None:
    saved = Checkpointed(step=4, prefix="four")
    workers = [adopted(0, 0, 2, 7), adopted(1, 1, 2, 7)]
    fresh = State(limits=LIMITS, checkpoint=saved)
    assert adopted_workers.first_source(adopted_workers.taken_over(fresh, workers)).step == 7
    other = replace(fresh, decisions=Decisions(skips=((4, 8),)))
    assert adopted_workers.first_source(adopted_workers.taken_over(other, workers)).step == 4
    later = replace(fresh, decisions=Decisions(skips=((7, 8),), rates=((8, 0.5),)))
    assert adopted_workers.first_source(adopted_workers.taken_over(later, workers)).step == 7
    assert (
        adopted_workers.first_source(
            adopted_workers.taken_over(replace(fresh, invalidated_up_to=GenerationId(5)), workers)
        ).step
        == 4
    )
    entries: list[dict[str, Any]] = [
        {"kind": "started", "skips": []},
        {"kind": "generation", "generation": 5},
        {"kind": "rewind", "skips": [[4, 8]]},
    ]
    assert (taken_back(entries), decided(entries).skips) == (5, ((4, 8),))
    assert taken_back(entries[:2]) == 0


def test_memory_of_samples_with_other_weights_is_not_resumed_from_and_later_weights_are_kept() -> None:
    def weights(*changes: tuple[int, int]) -> Decisions:
        return Decisions(weights=tuple((step, position, (("a", 1.0),)) for step, position in changes))

    saved, trained_with = Checkpointed(step=4, prefix="four"), weights((3, 8), (6, 60))  # 40 samples were skipped
    workers = [replace(adopted(rank, rank, 2, 7), decisions=trained_with) for rank in (0, 1)]
    told = {"kind": "started", **trained_with.fields()}
    more = {"kind": "mixture_weights", "weights": {"b": 2.0}, "from_step": 8, "from_position": 68}
    for entries, step in (([told], 7), ([told, more], 7), ([], 4)):
        fresh = State(limits=LIMITS, checkpoint=saved, decisions=decided(entries), rendezvous=("host", 1, "run"))
        state = adopted_workers.taken_over(fresh, workers)
        assert adopted_workers.first_source(state).step == step
        _, commands = machine.begin(adopted_workers.as_decided(state, entries, 0.0), 1.0)
        (form,) = [command for command in commands if isinstance(command, Form)]
        assert form.spec.decisions == decided(entries)
    for others in (weights((3, 8)), weights((3, 8), (6, 20)), weights((3, 8), (6, 60), (7, 64))):
        state = adopted_workers.taken_over(State(limits=LIMITS, checkpoint=saved, decisions=others), workers)
        assert adopted_workers.first_source(state).step == 4
    state = adopted_workers.taken_over(
        State(limits=LIMITS, checkpoint=saved, contents="", decisions=trained_with),
        [replace(one, facts=replace(one.facts, contents="c")) for one in workers],
    )
    assert state.contents == "c"


def test_workers_that_are_too_many_leave_when_the_others_hold_what_they_held() -> None:
    run = Run()
    run.state = begun(*(adopted(worker, worker, 5, 7) for worker in range(5)))
    run._follow(machine.begin(run.state, run.at))
    first = run.newest_form()
    assert isinstance(first.source, FromMemory)
    assert first.source.step == 7
    assert sorted(first.members) == [0, 1, 2, 4]  # rank 3 alone holds nothing that the rest needs
    run.formed()
    assert run.records("worker_left")[0]["worker"] == 3
    run.trained(8)
    for member in run.state.members:
        run.stopped(member, StopReason.BOUNDARY, 8)
    assert sorted(run.newest_form().members) == [0, 1, 2]
    run.formed()
    assert [left["worker"] for left in run.records("worker_left")] == [3, 4]
    assert not [command for command in run.commands if isinstance(command, StartWorker) and command.worker > 4]


def test_too_few_workers_wait_for_more_with_what_they_hold() -> None:
    state, commands = machine.begin(begun(adopted(1, 0, 1, 7, mirrors=False)), 1.0)
    assert state.phase is Phase.GATHERING
    assert {command.worker for command in commands if isinstance(command, StartWorker)} == {2, 3}
    assert adopted_workers.first_source(state).step == 7


def test_the_last_checkpoint_has_every_rank_once_from_any_holder() -> None:
    state = begun(adopted(0, 0, 3, 7), adopted(2, 2, 3, 7))
    _, commands = machine.begin(state, 1.0)
    (form,) = [command for command in commands if isinstance(command, Form)]
    assert isinstance(form.spec.source, FromMemory)
    parts = parts_to_write(form.spec.source)
    assert [part.rank for part in parts] == [0, 1, 2]
    assert [part.medium for part in parts] == ["snapshot", "mirror", "snapshot"]
    assert {part.holder for part in parts} == {0, 2}


def test_nothing_is_written_of_a_layout_with_a_gap() -> None:
    state = begun(adopted(0, 0, 3, 7), adopted(2, 2, 3, 7))
    _, commands = machine.begin(state, 1.0)
    (form,) = [command for command in commands if isinstance(command, Form)]
    assert isinstance(form.spec.source, FromMemory)
    snapshots = tuple(copy for copy in form.spec.source.copies if copy.medium == "snapshot")
    assert parts_to_write(replace(form.spec.source, copies=snapshots)) == ()


def test_a_rank_that_has_nothing_is_not_missed() -> None:
    state = begun(adopted(1, 1, 5, 7), adopted(3, 3, 5, 7))  # the last of five ranks has none of the twelve rows
    source = adopted_workers.first_source(state)
    assert isinstance(source, FromMemory)
    assert [(part.rank, part.holder) for part in parts_to_write(source)] == [(0, 1), (1, 1), (2, 3), (3, 3)]


def test_more_workers_than_the_run_may_have_leave_when_the_others_hold_what_they_hold() -> None:
    state, commands = machine.begin(begun(*(adopted(rank, rank, 5, 7) for rank in range(5))), 1.0)
    (form,) = [command for command in commands if isinstance(command, Form)]
    assert isinstance(form.spec.source, FromMemory)
    assert form.spec.source.step == 7
    assert set(state.leaving) == {3, 4}
    assert set(form.spec.members) == {0, 1, 2, 4}  # not all is held without both of the two
    assert not [command for command in commands if isinstance(command, StartWorker | KillWorker)]


def test_a_spare_is_a_worker_that_holds_nothing() -> None:
    limits = replace(LIMITS, min_workers=1, max_workers=1, spares=1)
    state = State(limits=limits, rendezvous=("host", 1, "run"))
    state = adopted_workers.taken_over(state, [adopted(rank, rank, 2, 7) for rank in range(2)])
    state, _ = machine.begin(adopted_workers.as_decided(state, [], 0.0), 1.0)
    assert set(state.leaving) == {1}


def test_who_leaves_a_drained_node_is_not_among_those_that_stay() -> None:
    workers = [adopted(worker, worker, 4, 7) for worker in range(4)]
    on_nodes = [replace(one, facts=replace(one.facts, node_id=f"node{one.worker // 2}")) for one in workers]
    state = State(limits=replace(LIMITS, min_workers=1, max_workers=2), rendezvous=("host", 1, "run"))
    drain = {"kind": "drain", "nodes": ["node0"], "within_s": 600.0}
    state = adopted_workers.as_decided(adopted_workers.taken_over(state, on_nodes), [drain], 0.0)
    assert state.staying == {2, 3}


@pytest.mark.parametrize(("ranks", "waited_s", "enough"), [((0, 2), 29, False), ((0, 2), 31, True), ((0,), 31, False)])
def test_workers_are_waited_for_longer_if_the_others_do_not_hold_the_whole_state(
    ranks: tuple[int, ...], waited_s: float, enough: bool
) -> None:
    answers = [adopted(rank, rank, 3, 7) for rank in ranks]
    assert adopted_workers.may_go_on(answers, waited_s) == enough
    assert adopted_workers.may_go_on(answers, 301)


# -- the driver that a worker obeys --

TERMS = DriverSession(
    driver="a",
    epoch=3,
    run_name="run",
    global_batch_size=4,
    metadata={},
    signed=False,
    lease_s=15.0,
    orphan_wait_s=300.0,
)


def test_a_worker_refuses_an_older_driver_and_its_own_once_it_ends() -> None:
    tenancy = LeaseState(terms=TERMS, heard_at=0.0)
    assert "taken this worker over" in tenancy.refusal(2)
    assert not tenancy.refusal(3)
    assert not tenancy.refusal(4)
    tenancy.ending = True
    assert tenancy.refusal(3)
    assert not tenancy.refusal(4)


@pytest.mark.parametrize(("now", "orphaned", "over"), [(15.0, False, False), (16.0, True, False), (316.0, True, True)])
def test_a_worker_is_an_orphan_after_the_lease_and_ends_after_the_wait(now: float, orphaned: bool, over: bool) -> None:
    tenancy = LeaseState(terms=TERMS, heard_at=0.0)
    assert (tenancy.is_orphaned(now), tenancy.is_over(now)) == (orphaned, over)


def test_time_in_which_the_worker_itself_stood_still_does_not_count() -> None:
    tenancy = LeaseState(terms=TERMS, heard_at=0.0)
    tenancy.stood_still(400.0, now=405.0)
    assert not tenancy.is_orphaned(405.0)
    assert tenancy.is_orphaned(416.0)
    tenancy.heard_at = 420.0  # its driver called before it looked again
    tenancy.stood_still(400.0, now=421.0)
    assert tenancy.heard_at == 421.0


def test_a_driver_that_follows_the_leader_of_the_last_checkpoint_is_obeyed() -> None:
    tenancy = LeaseState(terms=TERMS, heard_at=0.0)
    assert not tenancy.end(4, 10.0)  # there is a driver
    assert tenancy.end(4, 16.0)
    assert tenancy.refusal(4)
    assert not tenancy.refusal(5)
    tenancy.follow(replace(TERMS, epoch=5), 20.0)
    assert not tenancy.refusal(5)
    assert not tenancy.end(6, 30.0)
    assert not tenancy.end(4, 100.0)  # that leader was followed


def test_of_two_that_lead_the_last_checkpoint_the_newer_one_is_obeyed() -> None:
    tenancy = LeaseState(terms=TERMS, heard_at=0.0)
    assert tenancy.end(5, 16.0)
    assert not tenancy.end(4, 17.0)
    assert tenancy.end(6, 17.0)
    assert tenancy.is_over(17.0)


# -- the same job --


class Other(GptTask):
    def lr_scale(self, step: int) -> float:
        return 0.5


def test_a_job_is_the_same_for_equal_settings_and_code_and_another_for_any_other() -> None:
    job = make_job("run", steps=3, data=Tokens())
    mine = job_identity(job)
    assert job_identity(make_job("run", steps=3, task=GptTask(), data=Tokens())) == mine
    assert job_identity(replace(job, grace_s=1.0)) == mine
    others = [
        make_job("run", steps=4, data=Tokens()),
        make_job("other", steps=3, data=Tokens()),
        make_job("run", steps=3, data=Tokens(), task=Other()),
        make_job("run", steps=3, data=Tokens(99)),
        make_job("run", steps=3, data=Tokens(), engine=rs.EngineConfig(mirrors=False)),
        replace(job, batch=replace(job.batch, seed=6)),
    ]
    assert mine not in [job_identity(other) for other in others]


def test_what_classes_of_the_library_do_inside_is_no_part_of_a_job_and_what_the_user_s_do_is() -> None:
    def data(module: str, body: str) -> Any:
        made: dict[str, Any] = {"__name__": module}
        rows = f"class Rows:\n    def __len__(self):\n        {body}\n"
        source = f"{rows}    def __getitem__(self, index):\n        return index\n"
        exec(source, made)  # noqa: S102 - two versions of one class
        return made["Rows"]()

    def identity(module: str, body: str) -> str:
        return job_identity(make_job("run", steps=3, data=data(module, body)))

    assert identity("raysharded.data.old", "return 4") == identity("raysharded.data.new", "return 2 + len('ab')")
    assert identity("users.data", "return 4") != identity("users.data", "return 2 + len('ab')")
    assert identity("users.data", "return 4") != identity("users.other", "return 4")
    assert identity("raysharded.data.old", "return 4") != identity("raysharded_extras.data", "return 4")


# -- the journal --


def test_steps_that_only_workers_know_are_recorded_once() -> None:
    state = begun(adopted(0, 0, 2, 7), adopted(1, 1, 2, 7))
    _, commands = machine.begin(state, 1.0)
    (form,) = [command for command in commands if isinstance(command, Form)]
    reports = [report_of(form.spec, step, 0.0) for step in (4, 5, 6, 7, 8)] * 2
    entries = [
        {"kind": "started", "resumed_after_step": 2},
        {"kind": "step", "step": 3},
        {"kind": "step", "step": 4},
        {"kind": "step", "step": 5},
        {"kind": "generation", "step": 4},
        {"kind": "step", "step": 5},
        {"kind": "checkpoint", "step": 3},
    ]
    assert last_recorded_step(entries) == 5
    died_before_it_recorded_more = {"kind": "started", "resumed_after_step": 7}
    assert last_recorded_step([*entries, died_before_it_recorded_more]) == 5
    assert [report.step for report in unrecorded(reports, 5, 7)] == [6, 7]


def test_what_the_driver_before_had_begun_to_save_is_recorded_and_repeated(tmp_path: Path) -> None:
    storage, clock = open_storage(str(tmp_path)), SystemClock()
    journal = Journal(storage, clock, "older")
    journal.append("generation", {"generation": 3, "step": 0})
    journal.append("step", {"generation": 3, "step": 5})
    journal.append("checkpoint_failed", {"step": 5, "error": "no space"})
    journal.append("step", {"generation": 3, "step": 6}, durable=True)
    for step in (5, 6):
        storage.put_if_absent(f"{save_prefix(step, GenerationId(3), 'older')}/rank-0.bin", b"half")
    workers = []
    for worker in (0, 1):
        one = adopted(worker, worker, 2, 8)
        spec = Run(max_workers=2)
        spec.ready(0, 1)
        reports = tuple(report_of(spec.newest_form(), step, 0.0, save_started=step == 7) for step in (7, 8))
        workers.append(replace(one, reports=reports))
    files = RunFiles(name="run", storage=storage, keep=Keep(), metadata={}, global_batch_size=16)
    startup = RunStartup(
        files,
        Followed(),
        lambda _terms, _hold: FoundWorkers(adopted=tuple(workers)),
        Claims(storage, "newer"),
        Journal(storage, clock, "newer", still_owns=lambda: True),
        clock,
        lease_s=1.0,
        orphan_wait_s=1.0,
    )
    run = Run(max_workers=2)
    state, _ = startup.resume(startup.own(State(limits=LIMITS, rendezvous=("host", 1, "run"))))
    state, entries, _ = startup.take_over(state)
    told = [
        entry.fields["step"] for entry in entries if isinstance(entry, Record) and entry.kind == "checkpoint_failed"
    ]
    assert told == [6, 7]  # the failure of step 5 was recorded before
    run.state = state
    run._follow(machine.begin(run.state, run.at))
    run.formed()
    assert run.all(RequestSave), "the next step is saved"


def test_a_head_node_that_answers_late_once_is_not_lost_and_a_silent_one_is_within_the_lease() -> None:
    lease = LeaseState(terms=TERMS, heard_at=0.0)
    lease_s = TERMS.lease_s
    assert not lease.is_quiet(0.2 * lease_s)
    assert lease.is_quiet(0.4 * lease_s)
    lease.note_cluster(0.4 * lease_s, 0.6 * lease_s, answers=False)
    assert not lease.cluster_lost
    lease.note_cluster(0.7 * lease_s, 0.7 * lease_s, answers=True)
    lease.note_cluster(0.8 * lease_s, lease_s, answers=False)
    assert not lease.cluster_lost, "it has answered meanwhile"
    lease.note_cluster(1.2 * lease_s, 1.45 * lease_s, answers=False)
    assert lease.cluster_lost
    lease.note_cluster(1.5 * lease_s, 1.5 * lease_s, answers=True)
    assert not lease.cluster_lost
