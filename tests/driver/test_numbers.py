"""The machine when numbers go wrong: steps left out, rewinds, audits, and the budgets that name the first cause."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from raysharded.driver.state.commands import DeleteCheckpoints, End, Form, KillWorker, Record
from raysharded.driver.state.events import CommitFailed, WorkerReply
from raysharded.driver.state.state import Checkpointed, Phase
from raysharded.errors import DataError, InexactError, NonFiniteLoss, RunFailed, TaskError
from raysharded.ids import WorkerId
from raysharded.protocol.messages import (
    Corruption,
    FromCheckpoint,
    FromMemory,
    FromStart,
    NonFinite,
    Progress,
    Stopped,
    StopReason,
)
from tests.driver.scripted import Run, committed, of, training
from tests.driver.simulated_workers import SPEC, report_of

TWICE_ON_0 = (
    "(Raised in worker 0 on node0, then in worker 0 on node0. It is the same worker each time: its node may be the "
    "cause.)"
)
ABORTED, TASK_ERROR, BOUNDARY = StopReason.ABORTED, StopReason.TASK_ERROR, StopReason.BOUNDARY


def reported(run: Run, step: int, **fields: Any) -> None:
    report = replace(report_of(run.newest_form(), step, run.at), **fields)
    progress = Progress(generation=run.state.generation, reports=(report,))
    run.hear(WorkerReply(worker=run.state.members[0], message=progress))


def all_raise(run: Run, step: int, text: str = "the loss is nan") -> None:
    """All members of the generation find that `step` is not finite."""
    for member in run.state.members:
        run.stopped(member, TASK_ERROR, step - 1, error=NonFiniteLoss(f"step {step}: {text}"))


def found_wrong(run: Run, step: int, *culprits: int, speak: tuple[int, ...] | None = None) -> None:
    """The audit of `step` finds that these compute wrong numbers; all members report it, or those that `speak`."""
    corruption = Corruption(
        step=step,
        what="gradient",
        culprits=tuple(map(WorkerId, culprits)),
        workers=run.state.members,
        microbatches=(1,),
    )
    for member in run.state.members if speak is None else map(WorkerId, speak):
        held = tuple(run.holding(member, step - 1))
        stopped = Stopped(
            generation=run.state.generation,
            reason=StopReason.CORRUPT,
            step=step - 1,
            phase="backward",
            stopped_at=run.at,
            held=held,
            specs={step - 1: SPEC},
            corruption=corruption,
        )
        run.hear(WorkerReply(worker=member, message=stopped))


# -- not finite --


def test_without_a_policy_the_run_ends_and_is_not_retried() -> None:
    run = training(2, step=2, save_at_end=False)
    all_raise(run, 3)
    assert isinstance(run.error, NonFiniteLoss)


def test_a_rewind_goes_back_to_the_newest_checkpoint_with_the_data_after_the_step_that_went_wrong() -> None:
    run = training(2, step=1, rewind=True, save_every_steps=2, global_batch_size=8)
    run.trained(2, saves=True)
    run.all_saved(2)
    run.committed(2)
    run.trained(3)
    all_raise(run, 4)
    (entry,) = run.records("rewind")
    assert (entry["step"], entry["to_step"], entry["skip_samples"]) == (4, 2, 2 * 8)
    spec = run.newest_form()
    assert isinstance(spec.source, FromCheckpoint)
    assert (spec.source.step, spec.decisions.skips) == (2, ((2, 16),))
    assert run.all(End) == []


def test_the_step_that_a_rewind_goes_back_to_does_not_depend_on_the_checkpoints_that_there_are() -> None:
    run = saved_at(1, 4, 6, rewind=True, save_every_steps=4, global_batch_size=8, max_steps=20)
    all_raise(run, 7)
    (entry,) = run.records("rewind")
    assert (entry["to_step"], entry["skip_samples"], entry["distrusted"]) == (4, 3 * 8, [committed(6).prefix])
    assert run.all(DeleteCheckpoints) == [DeleteCheckpoints(prefixes=(committed(6).prefix,))]
    assert run.newest_form().source.step == 4
    run = saved_at(1, 3, rewind=True, save_every_steps=4, global_batch_size=8, max_steps=20)  # that of step 4 failed
    run.trained(4, 5, 6)
    all_raise(run, 7)
    (entry,) = run.records("rewind")
    assert (entry["to_step"], entry["skip_samples"]) == (4, 3 * 8)
    assert "distrusted" not in entry
    spec = run.newest_form()
    assert (spec.source.step, spec.decisions.skips) == (3, ((4, 24),))


def test_a_rewind_below_all_checkpoints_ends_the_run_with_what_to_keep() -> None:
    run = training(2, rewind=True, save_every_steps=4, max_steps=20)
    run.trained(1, 2, 3, 4, 5)
    run.trained(6, saves=True)
    run.all_saved(6)
    run.committed(6)
    all_raise(run, 7)
    assert "there is no checkpoint of that step or an older one. Keep more" in str(run.error)


def test_a_rewind_of_a_fork_goes_no_further_back_than_to_its_beginning() -> None:
    parents = Checkpointed(step=5, prefix="checkpoints/x", url="s3://b/parent", digest="d", fingerprint="f")
    run = Run(checkpoint=parents, max_workers=2, rewind=True, save_every_steps=4, resumed={"step": 5})
    run.ready(0, 1)
    run.formed()
    run.trained(6)
    all_raise(run, 7)
    assert run.records("rewind")[0]["to_step"] == 5
    assert run.newest_form().source.step == 5


def saved_at(*steps: int, **limits: Any) -> Run:
    """A run of two workers with checkpoints of these steps, each committed."""
    run = training(2, **limits)
    for step in range(1, steps[-1] + 1):
        run.trained(step, saves=step in steps)
        if step in steps:
            run.all_saved(step)
            run.committed(step)
    return run


def test_a_rewind_deletes_later_checkpoints_that_storage_did_not_confirm() -> None:
    run = training(2, step=1, rewind=True, save_every_steps=2, global_batch_size=8)
    run.trained(2, saves=True)
    run.all_saved(2)
    run.committed(2)
    run.trained(3, saves=True)
    run.all_saved(3)
    run.hear(CommitFailed(generation=run.state.generation, step=3, error="a timeout"))
    all_raise(run, 4)
    (entry,) = run.records("rewind")
    assert entry["distrusted"] == [committed(3).prefix]
    assert run.all(DeleteCheckpoints) == [DeleteCheckpoints(prefixes=(committed(3).prefix,))]
    kinds = [
        one.kind if isinstance(one, Record) else ""
        for one in run.commands
        if isinstance(one, Record | DeleteCheckpoints)
    ]
    assert kinds.index("rewind") < kinds.index("")
    assert run.state.unconfirmed_saves == ()


def test_a_rewind_waits_for_the_checkpoint_that_is_being_written() -> None:
    run = training(2, step=1, rewind=True, save_every_steps=2, global_batch_size=8)
    run.trained(2, saves=True)
    run.trained(3)
    all_raise(run, 4)
    assert run.state.phase is Phase.STOPPING
    assert len(run.all(Form)) == 1
    run.all_saved(2)
    run.wait(100)
    assert len(run.all(Form)) == 1
    run.committed(2)
    assert run.newest_form().source.step == 2
    assert run.newest_form().decisions.skips == ((2, 16),)


@pytest.mark.parametrize("how", ["fails", "is lost"])
def test_a_rewind_does_not_wait_for_a_checkpoint_that_will_not_come(how: str) -> None:
    run = training(2, rewind=True, save_every_steps=1, min_workers=1)
    run.trained(1, saves=True)
    all_raise(run, 2)
    assert len(run.all(Form)) == 1
    if how == "fails":
        run.saved(0, 1, error="no space")
    else:
        run.lost(1)
    assert isinstance(run.newest_form().source, FromStart)
    assert len(run.all(Form)) == 2


def test_a_rewind_does_not_wait_for_a_worker_that_is_stopped_while_it_writes_its_part() -> None:
    run = training(2, rewind=True, save_every_steps=1, min_workers=1, forming_patience_s=10.0)
    run.trained(1, saves=True)
    all_raise(run, 2)
    run.saved(0, 1)
    run.wait(100)  # storage may be slow
    assert len(run.all(Form)) == 1
    run.mute = frozenset({1})
    run.wait(11)
    assert of(run.commands, KillWorker) == [KillWorker(worker=WorkerId(1))]
    assert isinstance(run.newest_form().source, FromStart)
    assert run.newest_form().members == (0,)


@pytest.mark.parametrize("why", ["not finite", "wrong numbers"])
def test_nobody_is_waited_for_who_holds_what_is_taken_back(why: str) -> None:
    run = training(4, step=3, rewind=True, save_every_steps=2, stopping_patience_s=3.0)
    if why == "not finite":
        run.stopped(0, TASK_ERROR, 3, error=NonFiniteLoss("step 4: the loss is nan"))
    else:
        found_wrong(run, 4, 0, speak=(0,))
    run.stopped(1, ABORTED, 3)
    run.mute = frozenset({2, 3})
    run.wait(4)
    assert {2, 3} <= {command.worker for command in of(run.commands, KillWorker)}


def test_what_is_left_in_memory_of_the_steps_that_were_taken_back_is_not_resumed_from() -> None:
    run = training(3, step=4, rewind=True, save_every_steps=8)
    abandoned = {member: run.holding(member, 4) for member in run.state.members}
    all_raise(run, 5)
    assert isinstance(run.newest_form().source, FromStart)
    run.lost(1)
    for member in (0, 2):
        run.stopped(member, ABORTED, 0, held=abandoned[WorkerId(member)])
    assert isinstance(run.newest_form().source, FromStart)
    assert run.newest_form().decisions.skips == ((0, 5),)


def test_the_second_time_at_one_checkpoint_ends_the_run_with_both_causes() -> None:
    run = training(2, step=3, rewind=True, save_every_steps=8)
    all_raise(run, 4, "the loss is nan")
    run.formed()
    run.trained(1)
    all_raise(run, 2, "the gradient is not finite")
    assert isinstance(run.error, NonFiniteLoss)
    assert str(run.error).startswith("step 2: the gradient is not finite")
    assert "because of step 4: the loss is nan" in str(run.error)


def test_steps_left_out_are_counted_in_a_row_and_once_each() -> None:
    nan = NonFinite(what="loss", loss=float("nan"), microbatches=(3,))
    run = training(3, max_skipped_steps=2)
    reported(run, 1, skipped=nan)
    reported(run, 2)
    reported(run, 3, skipped=nan)
    reported(run, 4, skipped=nan)
    run.lost(2)
    for member in (0, 1):
        run.stopped(member, ABORTED, 3)
    run.formed()
    assert run.newest_form().source.step == 3
    reported(run, 4, skipped=nan)  # the same again
    assert run.all(End) == []
    assert [entry["step"] for entry in run.records("step_skipped")] == [1, 3, 4, 4]
    reported(run, 5, skipped=nan)
    assert isinstance(run.error, NonFiniteLoss)
    assert "3 steps in a row (3 to 5)" in str(run.error)
    assert "the first: step 3: the loss is nan (microbatch 3)" in str(run.error)


# -- audits --


def test_a_worker_that_computes_wrong_numbers_is_removed_and_steps_since_the_newest_audit_are_computed_again() -> None:
    run = training(3, step=1, max_worker_losses=1)
    for step in (2, 4, 6):
        run.trained(*range(run.state.step + 1, step))
        reported(run, step, save_started=True, audit_s=0.5 if step == 4 else None)
        run.all_saved(step)
        run.committed(step)
    found_wrong(run, 8, 1)
    assert [entry["step"] for entry in run.records("audit")] == [4]
    (entry,) = run.records("corruption")
    assert (entry["step"], entry["culprits"], entry["verified_step"]) == (8, [1], 4)
    assert of(run.commands, KillWorker) == [KillWorker(worker=WorkerId(1))]
    (distrust,) = run.all(DeleteCheckpoints)
    assert [committed(6).prefix] == list(distrust.prefixes) == entry["distrusted"]
    spec = run.newest_form()
    assert isinstance(spec.source, FromCheckpoint)
    assert (spec.source.step, spec.members) == (4, (0, 2))
    (lost,) = run.records("worker_lost")
    assert "computed wrong numbers" in lost["reason"]


def test_a_checkpoint_that_becomes_real_after_its_step_was_found_wrong_is_deleted() -> None:
    run = training(3, step=1)
    run.trained(2, saves=True)
    run.all_saved(2)
    found_wrong(run, 3, 1)
    assert isinstance(run.newest_form().source, FromStart)
    commands = run.hear(committed(2, generation=1))
    assert of(commands, DeleteCheckpoints) == [DeleteCheckpoints(prefixes=(committed(2).prefix,))]
    assert run.state.checkpoint is None


def test_an_unverified_checkpoint_that_storage_did_not_confirm_is_deleted_too() -> None:
    run = training(3, step=1)
    run.trained(2, saves=True)
    run.all_saved(2)
    run.hear(CommitFailed(generation=run.state.generation, step=2, error="a timeout"))
    found_wrong(run, 3, 1)
    assert run.records("corruption")[0]["distrusted"] == [committed(2).prefix]
    assert run.all(DeleteCheckpoints) == [DeleteCheckpoints(prefixes=(committed(2).prefix,))]


def test_memory_is_not_trusted_after_wrong_numbers() -> None:
    run = training(3, step=2)
    held = {member: run.holding(member, 2) for member in run.state.members}
    found_wrong(run, 3, 1)
    run.lost(0)
    run.stopped(2, ABORTED, 0, held=held[WorkerId(2)])
    run.ready(3)
    run.wait(5)
    assert isinstance(run.newest_form().source, FromStart)


def test_wrong_numbers_in_a_step_that_an_audit_has_passed_meanwhile_are_a_new_matter() -> None:
    run = training(3, step=2, min_workers=1)
    found_wrong(run, 3, 1)
    run.formed()
    run.trained(1, 2)
    reported(run, 3, audit_s=0.5)
    run.lost(0)
    run.stopped(2, ABORTED, 3, held=())  # nothing is left in memory
    run.formed()
    run.trained(1, 2)
    run.ready(3, 4)
    for member in run.state.members:
        run.stopped(member, BOUNDARY, 2)
    run.formed()
    found_wrong(run, 3, 3)
    assert run.all(End) == []
    assert KillWorker(worker=WorkerId(3)) in run.commands


def test_wrong_numbers_again_in_the_same_step_are_not_blamed_on_another_worker() -> None:
    run = training(3, step=2)
    found_wrong(run, 3, 1)
    run.formed()
    run.trained(1, 2)
    found_wrong(run, 3, 0)
    assert isinstance(run.error, InexactError)
    assert "computation is not reproducible" in str(run.error)


# -- budgets --


def test_too_many_losses_name_the_first_and_the_last() -> None:
    run = training(3, step=2, max_worker_losses=1, min_workers=1, save_at_end=False)
    run.lost(1)
    for member in (0, 2):
        run.stopped(member, ABORTED, 2)
    run.formed()
    run.trained(3)
    run.lost(2)
    assert isinstance(run.error, RunFailed)
    assert "2 workers were lost, more than FailureConfig.max_worker_losses=1." in str(run.error)
    assert "The first: worker 1 in step 3: " in str(run.error)
    assert "The last: worker 2 in step 4: " in str(run.error)


def test_a_task_that_raises_ends_the_run_with_its_first_error_and_a_word_about_another_last_one() -> None:
    run = training(2, step=2, task_error_retries=1, save_at_end=False)
    run.stopped(0, TASK_ERROR, 2, error=TaskError("the first", "its traceback"))
    run.stopped(1, ABORTED, 2)
    run.formed()
    run.stopped(0, TASK_ERROR, 2, error=DataError("the second"))
    run.stopped(1, ABORTED, 2)
    assert isinstance(run.error, TaskError)
    assert run.error.user_traceback == "its traceback"
    first, other, who = str(run.error).split("\n")
    assert (first, other) == ("the first", "(Attempt 2 ended with another error, DataError: the second)")
    assert who == TWICE_ON_0


def test_the_same_error_every_time_is_reported_once() -> None:
    run = training(2, step=2, task_error_retries=1, save_at_end=False)
    for _ in range(2):
        run.stopped(0, TASK_ERROR, 2, error=TaskError("the same"))
        run.stopped(1, ABORTED, 2)
        if run.all(End):
            break
        run.formed()
    assert str(run.error) == f"the same\n{TWICE_ON_0}"


def test_several_workers_that_raise_at_once_and_one_that_is_lost_besides_are_one_task_error() -> None:
    run = training(3, step=2, task_error_retries=1, max_worker_losses=1, save_at_end=False)
    run.stopped(0, TASK_ERROR, 2, error=TaskError("the bug"))
    run.stopped(1, TASK_ERROR, 2, error=TaskError("the bug"))
    run.lost(2)
    assert run.state.task_errors == 1
    assert run.state.losses == 1
    assert run.all(End) == []
    run.formed()
    run.stopped(0, TASK_ERROR, 2, error=TaskError("the bug"))
    run.stopped(1, ABORTED, 2)
    assert str(run.error) == f"the bug\n{TWICE_ON_0}"


def test_losses_do_not_use_up_the_budget_of_task_errors() -> None:
    run = training(3, step=2, task_error_retries=0, max_worker_losses=2)
    run.lost(1)
    for member in (0, 2):
        run.stopped(member, ABORTED, 2)
    assert isinstance(run.newest_form().source, FromMemory)
    assert run.state.task_errors == 0
