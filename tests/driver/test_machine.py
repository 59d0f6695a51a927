"""The driver's promises, one event after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raysharded.driver import machine
from raysharded.driver.state.commands import (
    AskFingerprint,
    AskReport,
    CollectSave,
    CommitSave,
    End,
    Form,
    Interrupt,
    KillWorker,
    Poll,
    Record,
    RequestBoundary,
    StartWorker,
    SumFingerprint,
    Train,
)
from raysharded.driver.state.events import Annotation, CommitFailed, Fingerprinted, StopRequested, Tick
from raysharded.driver.state.state import Checkpointed, Phase
from raysharded.errors import (
    ClusterError,
    CollectiveAborted,
    ConfigError,
    CorruptCheckpoint,
    DataError,
    InexactError,
    NonFiniteLoss,
    RunFailed,
    TaskError,
)
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import FromCheckpoint, FromMemory, FromStart, StopReason, save_prefix
from raysharded.protocol.worker_launcher import WorkerLost
from tests.driver.scripted import Run, committed, of, training

ABORTED, BOUNDARY, FINISHED = StopReason.ABORTED, StopReason.BOUNDARY, StopReason.FINISHED
RAISED, REFUSED = StopReason.TASK_ERROR, StopReason.REFUSED
BEFORE = Checkpointed(step=4, prefix="checkpoints/before", fingerprint="state 4")


def finish(run: Run) -> None:
    """All steps are done, and the last checkpoint is being written."""
    last = run.state.limits.max_steps
    run.trained(*range(run.state.step + 1, last + 1), saves=True)
    for member in run.state.members:
        run.stopped(member, FINISHED, last)


def test_a_remark_goes_to_the_journal_and_changes_nothing() -> None:
    state = training(3).state
    after, commands = machine.step(state, Annotation(kind="chaos", fields={"worker": 1}), 9.0)
    assert after == state
    assert commands == [Record(kind="chaos", fields={"worker": 1}, durable=True)]


# -- start-up --


def test_a_run_requests_as_many_workers_as_it_may_have() -> None:
    assert [start.worker for start in Run(max_workers=3).all(StartWorker)] == [0, 1, 2]


def test_it_starts_at_once_when_all_workers_are_there() -> None:
    run = Run(max_workers=3)
    run.ready(2, 0)
    assert run.all(Form) == []
    run.ready(1)
    assert set(run.newest_form().members) == {0, 1, 2}
    assert run.newest_form().source == FromStart()


def test_it_waits_for_the_minimum_then_for_those_that_come_soon_after() -> None:
    run = Run(min_workers=2, max_workers=4, join_wait_s=2.0)
    run.ready(0)
    run.wait(100)
    assert run.all(Form) == []
    run.ready(1)
    run.wait(1.5)
    run.ready(2)
    run.wait(1.75)
    assert run.all(Form) == []
    run.wait(0.25)
    assert set(run.newest_form().members) == {0, 1, 2}


def test_too_few_workers_end_the_run_after_the_start_timeout_with_what_to_do() -> None:
    run = Run(min_workers=2, start_timeout_s=120.0)
    run.ready(0)
    run.wait(120)
    assert run.all(End) == []
    run.wait(0.25)
    assert isinstance(run.error, ClusterError)
    assert "1 of at least 2 workers" in str(run.error)
    assert "start_timeout_s" in str(run.error)


def test_a_resumed_run_does_not_wait_for_replacements_of_workers_it_never_had() -> None:
    run = Run(min_workers=2, max_workers=3, generation=7, checkpoint=BEFORE, replacement_wait_s=60.0)
    run.ready(0, 1)
    run.wait(2.25)
    assert run.newest_form().generation == 8
    assert run.newest_form().source == FromCheckpoint(step=4, prefix=BEFORE.prefix)


def test_a_worker_that_is_lost_while_others_still_start_is_replaced() -> None:
    run = Run(min_workers=2, max_workers=2)
    run.ready(0)
    assert of(run.lost(0), StartWorker) == [StartWorker(worker=WorkerId(2))]
    run.ready(1, 2)
    assert set(run.newest_form().members) == {1, 2}


def test_a_worker_that_nobody_waits_for_any_more_is_killed() -> None:
    run = Run(max_workers=2)
    assert run.ready(17) == [KillWorker(worker=WorkerId(17), at_once=False)]


def test_training_starts_only_when_every_member_has_formed() -> None:
    run = Run()
    run.ready(0, 1, 2)
    assert of(run.formed(0, 1), Train) == []
    assert of(run.formed(2), Train) == [Train(generation=GenerationId(1), members=run.state.members)]


# -- workers that do not start --


def test_workers_that_fail_to_start_are_retried_with_growing_pauses_and_then_abandoned() -> None:
    run = Run(min_workers=1, max_workers=1, max_start_failures=3)
    assert of(run.lost(0), StartWorker) == []
    assert len(of(run.wait(1), StartWorker)) == 1
    run.lost(1)
    assert of(run.wait(1.75), StartWorker) == []
    assert len(of(run.wait(0.25), StartWorker)) == 1
    run.lost(2)
    assert isinstance(run.error, RunFailed)
    assert "3 workers in a row failed to start; the last: its process died" in str(run.error)


def test_workers_that_do_not_start_end_the_run_with_the_first_reason() -> None:
    run = Run(min_workers=1, max_workers=1, max_start_failures=2)
    run.hear(WorkerLost(worker=WorkerId(0), reason="no such device"))
    run.wait(1)
    run.hear(WorkerLost(worker=WorkerId(1), reason="out of memory"))
    assert "2 workers in a row failed to start; the first: no such device; the last: out of memory" in str(run.error)


def test_workers_that_fail_to_start_never_end_a_run_that_has_enough() -> None:
    run = training(3, min_workers=2, step=2, max_start_failures=3, max_steps=1000)
    run.lost(2)
    for worker in (0, 1):
        run.stopped(worker, ABORTED, 2)
    run.formed()
    for step in range(3, 103):
        run.at += 1
        run.trained(step)
        for worker in tuple(run.state.starting):
            run.lost(worker, error=DataError("no such file on this node"))
    assert run.all(End) == []
    assert 5 <= len(run.records("start_failed")) <= 8  # it backs off


def test_workers_that_were_requested_together_and_fail_to_start_count_once() -> None:
    run = Run(min_workers=2, max_workers=4, max_start_failures=2)
    for worker in range(4):
        run.at += 0.25
        run.lost(worker)
    assert run.all(End) == []
    assert len(run.records("start_failed")) == 4
    assert {start.worker for start in of(run.wait(1), StartWorker)} == {4, 5, 6, 7}
    run.lost(4)
    assert "2 workers in a row failed to start" in str(run.error)


def test_an_error_of_ours_at_the_start_ends_the_run_at_once() -> None:
    run = Run()
    run.lost(0, error=DataError("the file is cut off"))
    assert isinstance(run.error, DataError)


@pytest.mark.parametrize("error", [ConfigError("no GPU can be used"), DataError("no such file on this node")])
def test_a_replacement_on_a_broken_node_does_not_end_a_run_that_needs_all_its_workers(error: Exception) -> None:
    run = training(2, min_workers=2, step=2, max_start_failures=3)
    run.lost(1)
    run.stopped(0, ABORTED, 2)
    (first,) = run.state.starting
    run.lost(first, error=error)
    assert run.all(End) == []
    (second,) = {start.worker for start in of(run.wait(1), StartWorker)}
    run.ready(second)
    run.formed()
    assert run.state.phase is Phase.TRAINING
    assert set(run.state.members) == {0, second}


def test_replacements_that_fail_everywhere_end_such_a_run_with_their_own_error() -> None:
    run = training(2, min_workers=2, step=2, max_start_failures=3)
    run.lost(1)
    run.stopped(0, ABORTED, 2)
    for pause_s in (1, 2, 0):
        (worker,) = run.state.starting
        run.lost(worker, error=DataError(f"no such file for {worker}"))
        run.wait(pause_s)
    assert isinstance(run.error, DataError)


def test_a_joiner_that_would_compute_other_bits_is_refused_and_the_run_continues() -> None:
    run = training(3, min_workers=2, step=2)
    run.lost(2)
    for worker in (0, 1):
        run.stopped(worker, ABORTED, 2)
    run.formed()
    run.trained(3)
    assert of(run.ready(3, cpu="y"), KillWorker) == [KillWorker(worker=WorkerId(3), at_once=False)]
    assert "cpu: x in this run, y there" in run.records("worker_refused")[0]["reason"]
    assert run.state.phase is Phase.TRAINING


def test_a_cluster_of_unlike_machines_ends_the_run_with_what_to_do() -> None:
    run = Run(min_workers=2, max_workers=4, max_start_failures=3)
    run.ready(0)
    for worker in (1, 2, 3):
        run.ready(worker, cpu="y")
    assert isinstance(run.error, ClusterError)
    assert "machines of one kind" in str(run.error)


# -- losses --


def test_a_loss_frees_all_survivors_and_only_them() -> None:
    run = training(3, step=2)
    assert of(run.lost(1), Interrupt) == [Interrupt(worker=WorkerId(w), generation=GenerationId(1)) for w in (0, 2)]
    assert run.state.phase is Phase.STOPPING


def test_after_a_loss_the_survivors_resume_from_memory_with_the_newest_complete_step() -> None:
    run = training(3, step=2)
    run.lost(1)
    run.stopped(0, ABORTED, 3, held=[*run.holding(0, 2), *run.holding(0, 3)[:1]])
    run.stopped(2, ABORTED, 2)
    form = run.newest_form()
    assert isinstance(form.source, FromMemory)
    assert (form.generation, set(form.members), form.source.step) == (2, {0, 2}, 2)


def test_recovery_does_not_wait_for_a_replacement_and_requests_one_only_after_its_first_step() -> None:
    run = training(3, step=2)
    commands = run.lost(1)
    commands += run.stopped(0, ABORTED, 2) + run.stopped(2, ABORTED, 2) + run.formed()
    assert of(commands, StartWorker) == []
    assert len(of(run.trained(3), StartWorker)) == 1


def test_two_losses_at_once_are_one_recovery() -> None:
    run = training(4, step=2)
    run.lost(0)
    assert of(run.lost(2), Interrupt) == []
    run.stopped(1, ABORTED, 2)
    run.stopped(3, ABORTED, 2)
    run.formed()
    run.trained(3)
    (recovery,) = run.records("recovery")
    assert (recovery["lost"], recovery["workers_before"], recovery["workers_after"]) == ([0, 2], 4, 2)
    assert recovery["source"] == "memory"


@pytest.mark.parametrize("checkpoint", [None, BEFORE])
def test_when_a_shard_and_its_mirror_are_lost_the_run_goes_back_to_its_checkpoint_or_its_start(
    checkpoint: Checkpointed | None,
) -> None:
    run = Run(max_workers=4, max_steps=20, checkpoint=checkpoint)
    run.ready(0, 1, 2, 3)
    run.formed()
    first = run.state.step + 1
    run.trained(first, first + 1)
    holder, mirrored = run.state.members[2], run.state.members[1]
    run.lost(mirrored)
    run.lost(holder)
    for worker in run.state.ready:
        run.stopped(worker, ABORTED, first + 1)
    assert run.newest_form().source == (
        FromStart() if checkpoint is None else FromCheckpoint(step=4, prefix=BEFORE.prefix)
    )
    run.formed()
    run.trained(first)
    (recovery,) = run.records("recovery")
    assert recovery["steps_redone"] == 2


def test_no_step_is_missing_in_the_journal_though_who_answers_first_reports_only_the_newest() -> None:
    run = training(3)
    run.trained(1, 2)
    run.lost(1)
    run.stopped(2, ABORTED, 6, held=run.holding(2, 6), reports=(5, 6))
    run.stopped(0, ABORTED, 6, held=run.holding(0, 6), reports=(1, 2, 3, 4, 5, 6))
    assert [record["step"] for record in run.records("step")] == [1, 2, 3, 4, 5, 6]
    assert run.newest_form().source.step == 6


def test_a_loss_while_forming_frees_those_that_still_form_and_queries_those_that_are_done() -> None:
    run = Run(max_workers=3)
    run.ready(0, 1, 2)
    run.formed(0)
    commands = run.lost(1)
    assert of(commands, AskReport) == [AskReport(worker=WorkerId(0), generation=GenerationId(1))]
    assert of(commands, Interrupt) == [Interrupt(worker=WorkerId(2), generation=GenerationId(1))]


def test_a_member_that_formed_while_it_was_being_freed_is_queried_for_what_it_holds() -> None:
    run = Run(max_workers=3)
    run.ready(0, 1, 2)
    run.lost(1)
    assert run.formed(2) == [AskReport(worker=WorkerId(2), generation=GenerationId(1))]
    run.stopped(0, ABORTED, 0, held=[])
    run.stopped(2, ABORTED, 0)
    assert set(run.newest_form().members) == {0, 2}


def test_a_loss_while_the_next_generation_forms_keeps_what_the_old_layout_holds() -> None:
    run = training(4, step=5)
    run.lost(3)
    held = {worker: run.holding(worker, 5) for worker in (0, 1, 2)}
    for worker in (0, 1, 2):
        run.stopped(worker, ABORTED, 5, held=held[worker])
    run.lost(1)
    for worker in (0, 2):
        run.stopped(worker, ABORTED, 5, held=held[worker])
    source = run.newest_form().source
    assert isinstance(source, FromMemory)
    assert source.step == 5


def test_too_few_survivors_wait_for_a_replacement_and_keep_what_they_hold() -> None:
    run = training(2, min_workers=2, step=3)
    commands = run.lost(0) + run.stopped(1, ABORTED, 3)
    assert run.state.phase is Phase.GATHERING
    assert len(of(commands, StartWorker)) == 1
    run.wait(60)
    run.ready(2)
    assert isinstance(run.newest_form().source, FromMemory)
    assert run.newest_form().source.step == 3


def test_with_a_replacement_wait_the_next_generation_forms_as_soon_as_the_replacement_is_there() -> None:
    run = training(3, step=2, replacement_wait_s=30.0)
    run.lost(1)
    run.stopped(0, ABORTED, 2)
    run.stopped(2, ABORTED, 2)
    run.wait(10)
    assert run.state.phase is Phase.GATHERING
    run.ready(3)
    assert set(run.newest_form().members) == {0, 2, 3}
    run.at += 1
    run.formed()
    run.at += 2
    run.trained(3)
    (recovery,) = run.records("recovery")
    assert [recovery[name] for name in ("wait_s", "reshard_s", "first_step_s", "total_s")] == [10.0, 1.0, 2.0, 13.0]


def test_with_a_replacement_wait_the_run_continues_without_when_none_comes() -> None:
    run = training(3, step=2, replacement_wait_s=30.0)
    run.lost(1)
    run.stopped(0, ABORTED, 2)
    run.stopped(2, ABORTED, 2)
    run.wait(29.75)
    assert run.state.phase is Phase.GATHERING
    run.wait(0.25)
    assert set(run.newest_form().members) == {0, 2}


def test_members_that_stay_silent_are_killed_after_the_stop_timeout() -> None:
    run = training(4, step=2, stop_timeout_s=20.0)
    run.lost(1)
    run.stopped(0, ABORTED, 2)
    run.stopped(2, ABORTED, 2)  # these two hold everything: their own, and the mirrors of the others
    assert of(run.wait(20), KillWorker) == []
    assert of(run.wait(0.25), KillWorker) == [KillWorker(worker=WorkerId(3))]
    assert run.records("worker_lost")[-1]["reason"] == "did not answer within 20 s of being interrupted"


def test_a_silent_member_that_may_hold_what_nobody_else_does_gets_more_time() -> None:
    run = training(3, step=2, stop_timeout_s=20.0, progress_timeout_s=300.0)
    run.lost(1)
    run.stopped(0, ABORTED, 2)
    assert of(run.wait(299), KillWorker) == []
    assert of(run.wait(1.25), KillWorker) == [KillWorker(worker=WorkerId(2))]
    assert run.records("worker_lost")[-1]["reason"] == "did not answer within 300 s of being interrupted"


def test_without_progress_all_members_are_freed_and_the_silent_one_is_killed() -> None:
    run = training(3, step=2, progress_timeout_s=300.0, stop_timeout_s=20.0)
    assert of(run.wait(300), Interrupt) == []
    assert len(of(run.wait(0.25), Interrupt)) == 3
    run.stopped(0, ABORTED, 2)
    run.stopped(1, ABORTED, 2)
    run.wait(20.25)
    run.formed()
    run.trained(3)
    (recovery,) = run.records("recovery")
    assert recovery["lost"] == [2]
    assert recovery["reasons"][0] == "no progress for 300 s"


def test_more_losses_than_allowed_end_the_run_with_the_first_reason() -> None:
    run = training(3, step=2, max_worker_losses=0, save_at_end=False)
    run.lost(1)
    assert isinstance(run.error, RunFailed)
    assert "max_worker_losses=0. The first: worker 1 in step 3: its process died" in str(run.error)


def test_the_run_ends_once_when_several_silent_members_exceed_the_budget() -> None:
    run = training(3, step=2, max_worker_losses=0, stop_timeout_s=20.0, progress_timeout_s=300.0)
    run.wait(301)
    run.wait(301)
    assert isinstance(run.error, RunFailed)
    assert isinstance(run.commands[-1], End)


def test_generations_that_fail_without_a_loss_and_without_a_step_end_the_run() -> None:
    run = training(2, max_idle_generations=2)
    for generation in (1, 2, 3):
        run.stopped(0, ABORTED, 0, error=CollectiveAborted(f"attempt {generation}"))
        run.stopped(1, ABORTED, 0)
        if generation < 3:
            run.formed()
    assert isinstance(run.error, RunFailed)
    assert "3 generations in a row failed without a loss: attempt 3 The first: attempt 1" in str(run.error)


@pytest.mark.parametrize("phase", [Phase.FORMING, Phase.TRAINING])
def test_generations_that_never_get_anywhere_end_the_run_with_what_was_seen_first(phase: Phase) -> None:
    run = training(2, max_idle_generations=1, form_timeout_s=50.0, progress_timeout_s=60.0)
    run.stopped(0, ABORTED, 0, error=CollectiveAborted("freed"))
    run.stopped(1, ABORTED, 0, error=CollectiveAborted("freed"))
    run.state = replace(run.state, idle_generations=0, incident=None)
    for _ in range(2):
        if phase is Phase.TRAINING:
            run.formed()
        run.wait(61)
        run.stopped(0, ABORTED, 0, error=CollectiveAborted("freed"))
        run.stopped(1, ABORTED, 0, error=CollectiveAborted("freed"))
    expected = "not formed within 50 s" if phase is Phase.FORMING else "no progress for 60 s"
    assert str(run.error).endswith(f"It began with: {expected}.")


# -- old news --


def test_messages_of_an_older_generation_change_nothing() -> None:
    run = training(3, step=2)
    run.lost(1)
    run.stopped(0, ABORTED, 2)
    run.stopped(2, ABORTED, 2)
    run.formed()
    run.trained(3)
    run.says = GenerationId(1)
    before, num_commands = run.state, len(run.commands)
    for reason in StopReason:
        run.stopped(0, reason, 9, held=[], error=TaskError("old"))
    run.formed()
    run.trained(4, 5, saves=True)
    run.saved(0, 2)
    run.lost(1)
    assert run.state == before
    assert run.commands[num_commands:] == []


def test_that_a_member_formed_an_older_generation_does_not_count_for_this_one() -> None:
    run = training(3, step=2)
    run.lost(1)
    run.stopped(0, ABORTED, 2)
    run.stopped(2, ABORTED, 2)
    run.says = GenerationId(1)
    run.formed()
    assert run.state.phase is Phase.FORMING
    assert len(run.state.awaited) == 2


def test_a_message_that_comes_twice_does_not_end_a_generation_that_still_trains() -> None:
    run = training(3, step=2)
    run.formed(0)
    run.stopped(1, BOUNDARY, 3)
    run.stopped(2, BOUNDARY, 3)
    assert run.state.phase is Phase.TRAINING
    assert len(run.all(Form)) == 1


def test_a_recovery_is_not_over_by_steps_that_were_done_before_the_loss() -> None:
    run = training(3)
    run.lost(1)
    run.stopped(0, ABORTED, 2, reports=(1, 2))
    run.stopped(2, ABORTED, 2)
    assert run.records("recovery") == []
    run.at += 1
    run.formed()
    run.at += 1
    run.trained(3)
    (recovery,) = run.records("recovery")
    assert (recovery["resumed_after_step"], recovery["steps_redone"], recovery["first_step_s"]) == (2, 0, 1.0)
    assert "wait_s" not in recovery  # it waited for nobody
    assert [step["step"] for step in run.records("step")] == [1, 2, 3]


def test_steps_that_only_survivors_knew_of_count_as_redone() -> None:
    run = training(3, step=1)
    run.lost(1)
    held = [*run.holding(0, 1), *run.holding(2, 1)]
    run.stopped(0, ABORTED, 2, held=held[:2], reports=(1, 2))
    run.stopped(2, ABORTED, 2, held=held[2:])
    run.formed()
    run.trained(2)
    assert run.records("recovery")[0]["steps_redone"] == 1


def test_a_second_loss_before_the_first_step_is_part_of_the_same_recovery() -> None:
    run = training(4, step=2)
    run.lost(1)
    for worker in (0, 2, 3):
        run.stopped(worker, ABORTED, 2)
    run.at += 1
    run.formed()
    run.lost(3)
    for worker in (0, 2):
        run.stopped(worker, ABORTED, 3, held=run.holding(worker, 2), reports=(3,))
    run.at += 5
    run.formed()
    run.trained(3)
    (recovery,) = run.records("recovery")
    assert (recovery["lost"], recovery["total_s"], recovery["steps_redone"]) == ([1, 3], 6.0, 1)


@pytest.mark.parametrize("checkpoint_step", [1, 2, 3])
def test_memory_is_preferred_unless_a_checkpoint_is_newer(checkpoint_step: int) -> None:
    run = training(3, step=3)
    run.hear(committed(checkpoint_step))
    run.lost(1)
    for worker in (0, 2):
        run.stopped(worker, ABORTED, 3, held=[*run.holding(worker, 1), *run.holding(worker, 2)])
    source = run.newest_form().source
    assert isinstance(source, FromCheckpoint if checkpoint_step == 3 else FromMemory)
    assert source.step == max(2, checkpoint_step)


# -- joining --


def joined(run: Run) -> list[RequestBoundary]:
    return run.all(RequestBoundary)


def recovering() -> Run:
    """Three workers of at most four train again after a loss; no step is done yet."""
    run = training(4, step=2)
    run.lost(1)
    for worker in (0, 2, 3):
        run.stopped(worker, ABORTED, 2)
    run.formed()
    return run


def test_a_joiner_requests_a_boundary_only_after_the_first_step_of_the_recovery() -> None:
    run = recovering()
    run.trained(3)
    run.ready(4)
    assert len(joined(run)) == 1
    again = recovering()
    assert again.state.starting == {}
    assert again.state.step == again.state.generation_start_step
    again.wait(10)
    assert joined(again) == []


def test_a_boundary_is_requested_once_and_the_next_generation_has_everyone() -> None:
    run = recovering()
    run.trained(3)
    run.ready(4)
    run.trained(4)
    run.wait(5)
    assert len(joined(run)) == 1
    for worker in (0, 2, 3):
        run.stopped(worker, BOUNDARY, 5, reports=(5,))
    form = run.newest_form()
    assert set(form.members) == {0, 2, 3, 4}
    assert form.source.step == 5
    run.formed()
    run.trained(6)
    assert run.records("recovery") == [run.records("recovery")[0]]  # joining is not a recovery


def test_two_joiners_that_start_together_join_together() -> None:
    run = training(4, step=2, join_wait_s=2.0)
    run.lost(1)
    run.lost(3)
    run.stopped(0, ABORTED, 2, held=[*run.holding(0, 2), *run.holding(1, 2)])
    run.stopped(2, ABORTED, 2, held=[*run.holding(2, 2), *run.holding(3, 2)])
    run.formed()
    run.trained(3)
    run.ready(4)
    assert joined(run) == []
    run.wait(1)
    run.ready(5)
    assert len(joined(run)) == 1


def test_a_joiner_does_not_wait_for_another_that_never_comes() -> None:
    run = recovering()
    run.trained(3)
    run.lost(0)
    for worker in (2, 3):
        run.stopped(worker, ABORTED, 3)
    run.formed()
    run.trained(4)
    assert len(run.state.starting) == 2
    run.ready(min(run.state.starting))
    run.wait(2)
    assert len(joined(run)) == 1


@pytest.mark.parametrize("lost_first", [False, True])
def test_a_worker_that_becomes_ready_while_the_others_stop_takes_part_at_once_unless_it_is_lost(
    lost_first: bool,
) -> None:
    run = recovering()
    run.trained(3)
    run.lost(2)
    run.ready(4)
    if lost_first:
        assert of(run.lost(4), Interrupt) == []
    run.stopped(0, ABORTED, 3)
    run.stopped(3, ABORTED, 3)
    assert set(run.newest_form().members) == ({0, 3} if lost_first else {0, 3, 4})


# -- the task's errors --


def test_a_refusal_ends_the_run_without_another_try_with_the_users_error() -> None:
    run = training(2, step=1)
    error = InexactError("batch norm")
    run.stopped(0, REFUSED, 1, error=error)
    run.stopped(1, ABORTED, 1)
    assert run.error is error


def test_a_task_that_raises_is_retried_once_and_then_fails_with_the_first_cause() -> None:
    run = training(2, step=1, task_error_retries=1, save_at_end=False)
    causes = [TaskError(f"try {n}") for n in (1, 2)]
    for n, cause in enumerate(causes):
        run.stopped(1, RAISED, 1, error=cause)
        run.stopped(0, RAISED, 1, error=TaskError("a consequence"))
        if n == 0:
            assert run.newest_form().source.step == 1
            run.formed()
    assert isinstance(run.error, TaskError)
    assert str(run.error) == (
        "try 1\n(Attempt 2 ended with another error, TaskError: try 2)\n"
        "(Raised in worker 1 on node1, then in worker 1 on node1. It is the same worker each time: its node may be the "
        "cause.)"
    )


def test_the_same_bug_met_in_another_microbatch_first_is_not_another_error() -> None:
    run = training(2, step=1, task_error_retries=1, save_at_end=False)
    for worker in (0, 1):
        run.stopped(worker, RAISED, 1, error=TaskError(f"microbatch {worker}: KeyError", "its traceback"))
        run.stopped(1 - worker, ABORTED, 1)
        run.formed()
    assert str(run.error) == (
        "microbatch 0: KeyError\n(Raised in worker 0 on node0, then in worker 1 on node1. It comes on several nodes: "
        "look for it in the task or its data.)"
    )


def test_an_error_that_did_not_come_again_does_not_count_against_later_ones() -> None:
    run = training(2, step=1, task_error_retries=1)
    for step in (1, 3, 5):
        run.stopped(1, RAISED, step, error=TaskError("now and then"))
        run.stopped(0, ABORTED, step)
        run.formed()
        run.trained(step + 1, step + 2)
    assert run.all(End) == []


def test_steps_that_are_done_again_before_the_failing_one_do_not_count_as_getting_past_it() -> None:
    run = training(2, step=4, task_error_retries=1, save_at_end=False)
    for _ in (1, 2):
        run.stopped(1, RAISED, 4, error=TaskError("at step 5"), held=run.holding(1, 3))
        run.stopped(0, ABORTED, 4, held=run.holding(0, 3))
        if run.state.phase is not Phase.OVER:
            run.formed()
            run.trained(4)
    assert isinstance(run.error, TaskError)


def test_a_loss_that_is_not_finite_is_not_retried() -> None:
    run = training(2, step=1, task_error_retries=5, save_at_end=False)
    error = NonFiniteLoss("the loss is nan")
    run.stopped(0, RAISED, 1, error=error)
    run.stopped(1, RAISED, 1, error=error)
    assert run.error is error


# -- checkpoints --


def test_a_checkpoint_is_committed_when_every_part_of_it_is_there() -> None:
    run = training(3)
    assert run.trained(1, saves=True)[1] == CollectSave(generation=GenerationId(1), step=1, members=run.state.members)
    assert run.saved(0, 1) + run.saved(2, 1) == []
    (commit,) = run.saved(1, 1)
    assert isinstance(commit, CommitSave)
    assert len(commit.parts) == 3
    run.hear(committed(1))
    assert run.state.checkpoint == Checkpointed(
        step=1, prefix=save_prefix(1, GenerationId(1)), fingerprint="state 1", digest="digest 1"
    )
    assert run.records("checkpoint")[0]["step"] == 1


def test_a_lost_member_ends_the_checkpoint_that_lacks_its_part_and_that_is_recorded() -> None:
    run = training(3)
    run.trained(1, saves=True)
    run.saved(0, 1)
    run.lost(1)
    (failure,) = run.records("checkpoint_failed")
    assert failure["step"] == 1
    assert "worker 1 was lost" in failure["error"]
    assert of(run.saved(2, 1), CommitSave) == []


def test_a_checkpoint_that_becomes_known_only_after_a_member_is_lost_is_not_waited_for() -> None:
    run = training(2, max_steps=3, min_workers=1)
    run.trained(1, 2)
    run.lost(1)
    commands = run.stopped(0, ABORTED, 3, reports=(3,), saves=True)
    assert of(commands, CollectSave) == []
    assert run.records("checkpoint_failed")[0]["step"] == 3
    run.formed()
    assert of(run.stopped(0, FINISHED, 3), CollectSave) == [
        CollectSave(generation=GenerationId(2), step=3, members=run.state.members)
    ]


def test_a_checkpoint_whose_parts_are_written_outlives_the_loss_of_a_member() -> None:
    run = training(3)
    run.trained(1, saves=True)
    run.saved(1, 1)
    run.lost(1)
    assert len(of(run.saved(0, 1) + run.saved(2, 1), CommitSave)) == 1


def test_a_checkpoint_that_cannot_be_written_does_not_stop_training() -> None:
    run = training(2)
    run.trained(1, saves=True)
    run.saved(0, 1, error="OSError: no space")
    assert run.records("checkpoint_failed") == [{"step": 1, "error": "worker 0: OSError: no space"}]
    assert run.state.phase is Phase.TRAINING


def test_a_checkpoint_that_is_committed_late_neither_hides_a_newer_one_nor_ends_the_run() -> None:
    run = training(2, max_steps=3)
    run.trained(1, saves=True)
    run.saved(0, 1)
    run.saved(1, 1)
    run.trained(2, 3, saves=True)
    for member in (0, 1):
        run.stopped(member, FINISHED, 3)
    run.saved(0, 2)
    run.saved(1, 2)
    run.hear(committed(2))
    run.hear(committed(1))
    assert run.state.checkpoint is not None
    assert run.state.checkpoint.step == 2
    run.saved(0, 3)
    run.saved(1, 3)
    assert run.all(End) == []
    run.hear(committed(3))
    assert run.error is None
    assert run.state.result_fingerprint == "state 3"


def test_an_earlier_checkpoint_that_fails_at_the_end_does_not_fail_the_run() -> None:
    run = training(2, max_steps=2)
    run.trained(1, saves=True)
    run.saved(0, 1)
    run.saved(1, 1)
    finish(run)
    run.hear(CommitFailed(generation=GenerationId(1), step=1, error="OSError"))
    assert run.all(End) == []


# -- the end --


def test_the_run_is_finished_when_its_last_checkpoint_is_committed_and_has_its_fingerprint() -> None:
    run = training(2, max_steps=3)
    finish(run)
    assert run.state.phase is Phase.CLOSING
    run.saved(0, 3)
    run.saved(1, 3)
    run.hear(committed(3))
    assert run.error is None
    assert run.records("finished") == [{"step": 3, "fingerprint": "state 3"}]


def test_a_last_checkpoint_that_fails_is_written_again_from_memory_after_a_pause() -> None:
    run = training(2, max_steps=3, last_save_backoff_s=2.0)
    finish(run)
    run.saved(1, 3, error="OSError: no space")
    assert run.state.phase is Phase.CLOSING
    assert len(run.all(Form)) == 1
    run.wait(2)
    assert isinstance(run.newest_form().source, FromMemory)
    assert run.newest_form().source.step == 3
    run.formed()
    for member in run.state.members:
        run.stopped(member, FINISHED, 3)
    for member in run.state.members:
        run.saved(member, 3)
    run.hear(committed(3, generation=2))
    assert run.error is None
    assert run.state.result_fingerprint == "state 3"


def test_a_last_checkpoint_that_fails_again_and_again_fails_the_run_with_the_reason() -> None:
    run = training(2, max_steps=3, last_save_retries=2)
    finish(run)
    for attempt in (1, 2, 3):
        assert run.all(End) == []
        run.saved(1, 3, error=f"OSError: attempt {attempt}")
        run.wait(10)
        if attempt < 3:
            run.formed()
            for member in run.state.members:
                run.stopped(member, FINISHED, 3)
    assert isinstance(run.error, RunFailed)
    assert "step 3) could not be written: worker 1: OSError: attempt 3" in str(run.error)


def test_a_last_checkpoint_that_is_never_written_fails_the_run_in_time() -> None:
    run = training(2, max_steps=3, save_timeout_s=100.0)
    finish(run)
    run.wait(100.25)
    assert "not written within 100" in str(run.error)


def test_a_loss_while_the_last_checkpoint_is_written_forms_again_and_saves_again() -> None:
    run = training(3, max_steps=3)
    finish(run)
    run.saved(0, 3)
    run.lost(1)
    form = run.newest_form()
    assert isinstance(form.source, FromMemory)
    assert (form.generation, form.source.step, set(form.members)) == (2, 3, {0, 2})
    run.formed()
    for member in run.state.members:
        run.stopped(member, FINISHED, 3)
    assert run.all(CollectSave)[-1] == CollectSave(generation=GenerationId(2), step=3, members=run.state.members)
    for member in run.state.members:
        run.saved(member, 3)
    run.hear(committed(3, generation=2))
    assert run.error is None


def test_a_loss_after_the_last_step_was_reported_forms_again_and_saves_again() -> None:
    run = training(3, max_steps=3)
    run.trained(1, 2, 3, saves=True)
    run.stopped(0, FINISHED, 3)
    run.stopped(1, FINISHED, 3)
    run.lost(1)
    run.stopped(2, FINISHED, 3)
    assert run.state.phase is Phase.FORMING
    assert (set(run.newest_form().members), run.newest_form().source.step) == ({0, 2}, 3)


def test_a_loss_after_the_last_parts_are_written_changes_nothing() -> None:
    run = training(2, max_steps=3)
    finish(run)
    run.saved(0, 3)
    run.saved(1, 3)
    run.lost(0)
    run.hear(committed(3))
    assert run.error is None


def test_a_worker_that_becomes_ready_at_the_end_is_left_alone() -> None:
    run = training(3, min_workers=2, max_steps=6, step=2)
    run.lost(1)
    run.stopped(0, ABORTED, 2)
    run.stopped(2, ABORTED, 2)
    run.formed()
    finish(run)
    run.ready(3)
    run.wait(10)
    assert run.state.phase is Phase.CLOSING
    assert len(run.all(Form)) == 2


def test_without_a_last_checkpoint_the_run_ends_with_its_fingerprint_alone() -> None:
    run = training(2, max_steps=2, save_at_end=False)
    run.trained(1, 2)
    run.stopped(0, FINISHED, 2)
    (asked,) = run.stopped(1, FINISHED, 2)
    assert asked == AskFingerprint(generation=GenerationId(1), members=run.state.members)
    run.saved(0, 2)
    (summed,) = run.saved(1, 2)
    assert isinstance(summed, SumFingerprint)
    run.hear(Fingerprinted(fingerprint="state 2"))
    assert run.error is None
    assert run.state.result_fingerprint == "state 2"
    assert run.records("checkpoint_failed") == []


def test_a_run_that_is_requested_to_stop_ends_now_without_an_error_or_a_fingerprint() -> None:
    run = training(2, step=3)
    run.hear(StopRequested())
    assert run.error is None
    assert run.state.result_fingerprint is None
    assert run.records("stopped") == [{"step": 3, "fingerprint": None}]


def test_when_the_run_is_over_nothing_is_done_any_more() -> None:
    run = training(2, step=3)
    run.hear(StopRequested())
    assert run.ready(7) + run.lost(0) + run.wait(1000) + run.hear(Tick()) + run.hear(StopRequested()) == []


def test_the_driver_requests_reports_as_long_as_it_trains() -> None:
    run = training(2)
    assert run.trained(1)[-1] == Poll(worker=run.state.members[0], generation=GenerationId(1), after_step=1)
    assert run.trained() == [Poll(worker=run.state.members[0], generation=GenerationId(1), after_step=1)]
    assert [type(command) for command in run.trained(2)] == [Record, Poll]
    run.lost(1)
    assert run.trained(3) == []


# -- damaged checkpoints, other data, crash loops --


def with_older_checkpoint() -> Run:
    """A run that is being formed from its checkpoint of step 4, with one of step 2 before it."""
    run = Run(max_workers=2, max_steps=20, checkpoint=BEFORE)
    run.state = replace(run.state, older_checkpoints=(Checkpointed(step=2, prefix="older"),))
    run.ready(0, 1)
    return run


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before_and_the_journal_reports_it() -> None:
    run = with_older_checkpoint()
    assert run.newest_form().source == FromCheckpoint(step=4, prefix=BEFORE.prefix)
    run.stopped(0, StopReason.REFUSED, 4, held=(), error=CorruptCheckpoint("chunk 3 of rank00000.safetensors"))
    run.stopped(1, ABORTED, 4, held=())
    assert run.newest_form().source == FromCheckpoint(step=2, prefix="older")
    (skipped,) = run.records("checkpoint_skipped")
    assert skipped == {"step": 4, "reason": "chunk 3 of rank00000.safetensors"}


def test_a_damaged_checkpoint_without_one_before_ends_the_run_with_its_name() -> None:
    run = Run(max_workers=2, max_steps=20, checkpoint=BEFORE)
    run.ready(0, 1)
    run.stopped(0, StopReason.REFUSED, 4, held=(), error=CorruptCheckpoint("chunk 3"))
    run.stopped(1, ABORTED, 4, held=())
    assert isinstance(run.error, CorruptCheckpoint)


def test_a_worker_that_finds_other_data_than_the_run_began_with_is_refused() -> None:
    run = Run(max_workers=2)
    run.state = replace(run.state, num_samples=99)  # as a resumed run reads it from its checkpoint
    run.ready(0)
    assert isinstance(run.error, ConfigError)
    assert "finds 100 samples, the run began with 99" in str(run.error)


@pytest.mark.parametrize(
    ("kept", "found", "then"),
    [
        ("", "a+b", "a+b"),  # a run of an earlier version, or without a checkpoint
        ("a", "a+b", "a+b"),
        ("+b", "+b", "+b"),
        ("a+b", "a", "a+b"),
        ("a+b", "", "a+b"),
        ("a+b", "a+c", None),
        ("a+b", "c+b", None),
        ("+b", "+c", None),
        ("a", "b", None),
    ],
)
def test_contents_of_data_are_compared_as_far_as_both_are_known(kept: str, found: str, then: str | None) -> None:
    run = Run(max_workers=2)
    run.state = replace(run.state, num_samples=100, contents=kept)
    run.ready(0, contents=found)
    if then is None:
        assert isinstance(run.error, ConfigError)
        assert "of the same length with other contents than the run began with" in str(run.error)
    else:
        assert run.state.contents == then


def test_workers_that_die_again_and_again_without_a_step_end_the_run() -> None:
    run = training(2, step=2, max_losses_without_step=3)
    for worker in range(10):
        if run.state.phase is Phase.OVER:
            break
        run.lost(worker)
        for other in sorted(run.state.awaited):
            run.stopped(other, ABORTED, 2)
        run.ready(*sorted(run.state.starting))
    assert isinstance(run.error, RunFailed)
    assert "workers were lost 4 times in a row, and the run did not get past step 3. The first: worker 0" in str(
        run.error
    )


def test_a_step_that_kills_its_only_worker_ends_the_run_though_the_steps_before_it_are_done_again_each_time() -> None:
    run = training(1, min_workers=1, max_losses_without_step=3)
    for worker in range(10):
        run.trained(*range(1, 5))
        run.lost(worker)
        if run.state.phase is Phase.OVER:
            break
        run.ready(worker + 1)
        assert isinstance(run.newest_form().source, FromStart)
        run.formed()
    assert isinstance(run.error, RunFailed)
    assert "workers were lost 4 times in a row, and the run did not get past step 5. The first: worker 0" in str(
        run.error
    )


def test_losses_count_anew_after_a_newer_checkpoint() -> None:
    run = training(1, min_workers=1, max_losses_without_step=1, max_steps=100)
    run.trained(*range(1, 10))
    run.lost(0)
    run.ready(1)
    run.formed()
    run.trained(1, saves=True)
    run.all_saved(1)
    run.committed(1)
    run.lost(1)
    assert run.all(End) == []


def test_many_that_are_lost_at_once_are_no_crash_loop() -> None:
    run = training(100, min_workers=1, step=2, max_losses_without_step=64)
    for worker in range(90):
        run.lost(worker)
    assert run.all(End) == []


def test_a_generation_that_loses_workers_again_and_again_while_it_forms_is_a_crash_loop() -> None:
    run = training(9, min_workers=1, step=2, max_losses_without_step=3)
    for worker in range(8, -1, -1):
        if run.state.phase is Phase.OVER:
            break
        run.lost(worker)
        for other in sorted(run.state.awaited):
            run.stopped(other, ABORTED, 2)
    assert isinstance(run.error, RunFailed)
