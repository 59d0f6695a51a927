"""The driver's promises about checkpoints that are late, that fail, and that are requested."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from raysharded.driver.state.commands import (
    Answer,
    CollectSave,
    Command,
    CommitSave,
    End,
    Interrupt,
    Probe,
    Record,
    RequestSave,
    SaveSnapshot,
    StartWorker,
    Train,
)
from raysharded.driver.state.events import (
    CheckpointRequested,
    CommitFailed,
    LeadershipLost,
    Overtaken,
    ResumeRequested,
    StopRequested,
)
from raysharded.driver.state.state import Checkpointed, Phase
from raysharded.errors import CorruptCheckpoint, RunFailed, RunOwnedElsewhere, TaskError
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import FromCheckpoint, FromMemory, StopReason, save_prefix
from tests.driver.scripted import Run, of, training

ABORTED, FINISHED = StopReason.ABORTED, StopReason.FINISHED


def written(run: Run, step: int, *, asked: bool = False) -> None:
    """A checkpoint of a step, from its beginning until it is committed."""
    run.trained(step, saves=True, asked=asked)
    run.all_saved(step)
    run.committed(step)


def lose_and_recover(run: Run, worker: int, step: int) -> None:
    run.lost(worker)
    for survivor in sorted(run.state.awaited):
        run.stopped(survivor, ABORTED, step)
    run.formed()


def finish(run: Run) -> None:
    last = run.state.limits.max_steps
    run.trained(*range(run.state.step + 1, last + 1), saves=True)
    for member in run.state.members:
        run.stopped(member, FINISHED, last)


# -- in the journal --


def test_a_checkpoint_is_in_the_journal_with_its_size_its_time_and_its_retries() -> None:
    run = training(2)
    run.trained(1, saves=True)
    run.at += 5
    run.all_saved(1)
    run.at += 1
    run.committed(1)
    (record,) = run.records("checkpoint")
    assert record["seconds"] == 6.0
    assert record["write_s"] == 2.0
    assert record["retries"] == 3  # one of each worker, one of the commit
    assert (record["bytes"], record["files"]) == (0, 0)


def test_a_checkpoint_keeps_the_numbers_of_its_step() -> None:
    run = training(2)
    run.trained(1, 2, saves=True)
    (commit,) = of(run.all_saved(2), CommitSave)
    assert commit.measured == {"loss": 0.5}


def test_a_checkpoint_of_the_last_step_that_is_written_again_keeps_its_numbers() -> None:
    run = training(2, max_steps=2)
    finish(run)
    run.saved(0, 2, error="OSError")
    run.wait(3)
    run.formed()
    for member in run.state.members:
        run.stopped(member, FINISHED, 2)
    (commit,) = of(run.all_saved(2), CommitSave)
    assert commit.measured == {"loss": 0.5}


# -- late --


def test_a_checkpoint_that_is_left_out_is_in_the_journal_with_what_it_would_have_waited_for() -> None:
    run = training(2)
    run.trained(1, saves=True)
    run.at += 40
    run.trained(2, late=True)
    assert run.records("checkpoint_late") == [{"step": 2, "writing": 1, "since_s": 40.0}]
    assert of(run.commands, CollectSave) == [CollectSave(generation=GenerationId(1), step=1, members=run.state.members)]


def test_a_checkpoint_that_is_left_out_for_one_that_failed_elsewhere_is_in_the_journal_too() -> None:
    run = training(2)
    run.trained(1, saves=True)
    run.saved(0, 1, error="OSError")
    run.trained(2, late=True)
    assert run.records("checkpoint_late") == [{"step": 2}]


# -- failing --


def fail(run: Run, *steps: int) -> None:
    for step in steps:
        run.trained(step, saves=True)
        run.saved(0, step, error="OSError: no space")


def test_after_so_many_failures_in_a_row_the_run_reports_it_and_continues() -> None:
    run = training(2, max_failed_saves=3)
    written(run, 1)
    fail(run, 2, 3)
    assert run.records("checkpoints_failing") == []
    fail(run, 4)
    (said,) = run.records("checkpoints_failing")
    assert said == {"step": 4, "failed": 3, "newest": 1, "error": "worker 0: OSError: no space"}
    assert run.state.phase is Phase.TRAINING


def test_a_checkpoint_between_failures_begins_the_count_anew() -> None:
    run = training(2, max_failed_saves=2)
    fail(run, 1)
    written(run, 2)
    fail(run, 3)
    assert run.records("checkpoints_failing") == []


def test_a_run_that_stops_on_failures_names_the_newest_checkpoint() -> None:
    run = training(2, max_failed_saves=2, stop_on_failed_saves=True)
    written(run, 1)
    fail(run, 2, 3)
    assert isinstance(run.error, RunFailed)
    assert "2 checkpoints in a row could not be written, and there is none since step 1" in str(run.error)
    assert isinstance(run.commands[-1], End)


def test_a_lost_worker_is_no_failure_of_storage_and_ends_no_run() -> None:
    run = training(3, max_failed_saves=1, stop_on_failed_saves=True)
    run.trained(1, saves=True)
    lose_and_recover(run, 1, 1)
    (record,) = run.records("checkpoint_failed")
    assert record["counted"] is False
    assert run.records("checkpoints_failing") == []
    assert run.state.phase is Phase.TRAINING


def test_a_save_that_a_worker_no_longer_knows_of_is_no_failure_of_storage_either() -> None:
    run = training(2, max_failed_saves=1, stop_on_failed_saves=True)
    ask(run, 1)
    run.trained(1, asked=True)
    commands = run.saved(0, 1, error="not known any more", unknown=True)
    assert [command.generation for command in of(commands, RequestSave)] == [1]
    assert run.records("checkpoints_failing") == []
    written(run, 2, asked=True)
    assert run.all(Answer) == [Answer(requests=(1,), step=2, prefix=save_prefix(2, GenerationId(1)))]


def test_the_last_checkpoint_of_a_generation_that_never_began_it_is_written_by_the_next() -> None:
    run = training(2, max_steps=2, last_save_retries=0)
    run.trained(1, 2, saves=True)
    lose_and_wait = [run.stopped(member, ABORTED, 2) for member in run.state.members]
    assert lose_and_wait
    run.formed()
    for member in run.state.members:
        run.stopped(member, FINISHED, 2)
    run.says = GenerationId(1)
    commands = run.saved(0, 2, error="not begun", unknown=True)
    assert of(commands, CollectSave) == [CollectSave(generation=GenerationId(2), step=2, members=run.state.members)]
    run.says = None
    run.all_saved(2)
    run.committed(2)
    assert run.error is None


# -- overtaken --


def test_a_checkpoint_whose_parts_arrive_after_those_of_a_newer_one_is_overtaken_and_has_not_failed() -> None:
    run = training(2, max_failed_saves=1, stop_on_failed_saves=True)
    ask(run, 1)
    run.trained(1, asked=True)
    run.trained(2, saves=True)
    run.all_saved(2)
    run.all_saved(1)
    run.committed(2)
    run.hear(Overtaken(generation=GenerationId(1), step=1, reason="StaleGeneration"))
    assert run.records("checkpoint_overtaken") == [{"step": 1, "newest": 2}]
    assert run.records("checkpoint_failed") == []
    assert run.all(Answer) == [Answer(requests=(1,), step=2, prefix=save_prefix(2, GenerationId(1)))]
    assert run.state.saves == {}


def test_a_checkpoint_that_one_of_an_older_step_overtook_is_requested_again() -> None:
    run = training(2)
    ask(run, 1)
    run.trained(1, 2, 3)
    run.trained(4, asked=True)
    run.all_saved(4)
    commands = run.hear(Overtaken(generation=GenerationId(1), step=4, reason="StaleGeneration"))
    assert len(of(commands, RequestSave)) == 1
    assert run.all(Answer) == []


def test_a_run_that_stops_after_a_checkpoint_is_content_with_the_one_that_overtook_it() -> None:
    run = training(2, step=3)
    run.hear(StopRequested(checkpoint_within_s=25.0))
    run.trained(4, asked=True)
    run.trained(5, saves=True)
    for step in (5, 4):
        run.all_saved(step)
    run.committed(5)
    run.hear(Overtaken(generation=GenerationId(1), step=4, reason="StaleGeneration"))
    assert run.error is None
    assert len(run.records("stopped")) == 1


# -- the last one waits for the one before --


def test_after_the_last_step_the_checkpoint_before_may_take_as_long_as_a_checkpoint_may() -> None:
    run = training(2, max_steps=2, progress_timeout_s=10.0, save_timeout_s=100.0)
    run.trained(1, 2, saves=True)
    waited, too_long = run.wait(50), run.wait(60)
    assert {type(command) for command in waited} <= {Probe}
    assert len(of(too_long, Interrupt)) == 2


def test_before_the_last_step_progress_is_requested_as_ever() -> None:
    run = training(2, max_steps=2, progress_timeout_s=10.0, save_timeout_s=100.0)
    run.trained(1, saves=True)
    run.wait(11)
    assert run.state.phase is Phase.STOPPING


def test_one_step_saved_by_two_generations_is_two_checkpoints() -> None:
    run = training(3)
    run.trained(1, 2, saves=True)
    run.all_saved(2)  # being committed when a worker is lost
    lose_and_recover(run, 1, 1)
    assert run.newest_form().source.step == 1
    run.trained(2, saves=True)
    run.hear(CommitFailed(generation=GenerationId(1), step=2, error="StaleGeneration"))
    assert len(of(run.all_saved(2), CommitSave)) == 1
    run.committed(2)
    assert run.state.checkpoint is not None
    assert run.state.checkpoint.prefix == save_prefix(2, GenerationId(2))


# -- requested --


def ask(run: Run, request: int) -> list[RequestSave]:
    return of(run.hear(CheckpointRequested(request=request)), RequestSave)


def test_a_request_for_a_checkpoint_is_answered_when_it_is_committed() -> None:
    run = training(2)
    assert ask(run, 7) == [RequestSave(worker=run.state.members[0], generation=GenerationId(1))]
    run.trained(1, asked=True)
    run.all_saved(1)
    assert run.all(Answer) == []
    run.committed(1)
    assert run.all(Answer) == [Answer(requests=(7,), step=1, prefix=save_prefix(1, GenerationId(1)))]


def test_simultaneous_requests_get_one_checkpoint_and_a_later_one_gets_the_next() -> None:
    run = training(2)
    ask(run, 1)
    ask(run, 2)
    run.trained(1, asked=True)
    ask(run, 3)
    run.all_saved(1)
    run.committed(1)
    written(run, 2, asked=True)
    assert [(answer.requests, answer.step) for answer in run.all(Answer)] == [((1, 2), 1), ((3,), 2)]


def test_a_checkpoint_that_happens_to_be_due_does_not_answer_a_request_that_came_after_it() -> None:
    run = training(2)
    ask(run, 1)
    written(run, 1)
    assert run.all(Answer) == []
    written(run, 2, asked=True)
    assert run.all(Answer)[0].step == 2


def test_a_request_that_cannot_be_met_is_answered_with_the_reason() -> None:
    run = training(2)
    ask(run, 1)
    run.trained(1, asked=True)
    run.saved(1, 1, error="OSError: no space")
    assert run.all(Answer) == [Answer(requests=(1,), step=1, error="worker 1: OSError: no space")]


def test_a_request_outlives_the_loss_of_a_worker() -> None:
    run = training(3)
    ask(run, 1)
    run.trained(1, asked=True)
    lose_and_recover(run, 1, 1)
    assert run.all(RequestSave)[-1].generation == 2
    assert run.all(Answer) == []
    written(run, 2, asked=True)
    assert run.all(Answer) == [Answer(requests=(1,), step=2, prefix=save_prefix(2, GenerationId(2)))]


def test_a_request_that_comes_before_training_waits_for_it() -> None:
    run = Run(max_workers=2)
    assert ask(run, 1) == []
    run.ready(0, 1)
    assert of(run.formed(), RequestSave) == [RequestSave(worker=WorkerId(0), generation=GenerationId(1))]


def test_the_last_checkpoint_answers_all_requests() -> None:
    run = training(2, max_steps=2)
    ask(run, 1)
    finish(run)
    ask(run, 2)
    run.all_saved(2)
    run.committed(2)
    assert sorted(number for answer in run.all(Answer) for number in answer.requests) == [1, 2]
    assert run.error is None


# -- stopping --


def test_a_run_that_stops_with_a_checkpoint_continues_until_it_is_committed() -> None:
    run = training(2, step=3)
    commands = run.hear(StopRequested(checkpoint_within_s=25.0))
    assert len(of(commands, RequestSave)) == 1
    run.trained(4, asked=True)
    run.trained(5)
    run.all_saved(4)
    assert run.all(End) == []
    run.committed(4)
    assert run.error is None
    assert run.records("stopped") == [{"step": 5, "fingerprint": None}]


def test_a_run_that_stops_with_a_checkpoint_does_not_wait_longer_than_it_may() -> None:
    run = training(2, step=3)
    run.hear(StopRequested(checkpoint_within_s=25.0))
    run.wait(24.75)
    assert run.all(End) == []
    run.wait(0.25)
    assert run.error is None
    assert len(run.records("stopped")) == 1


def test_a_run_that_is_requested_to_stop_twice_ends_at_once() -> None:
    run = training(2, step=3)
    run.hear(StopRequested(checkpoint_within_s=math.inf))
    run.hear(StopRequested(checkpoint_within_s=math.inf))
    assert run.error is None


def test_a_run_with_nothing_to_lose_stops_at_once() -> None:
    run = training(2, step=3)
    run.hear(CheckpointRequested(request=1))
    written(run, 4, asked=True)
    run.hear(StopRequested(checkpoint_within_s=25.0))
    assert run.error is None
    fresh = Run()
    fresh.hear(StopRequested(checkpoint_within_s=25.0))
    assert fresh.error is None


def test_a_checkpoint_that_fails_before_a_stop_is_retried_within_its_time() -> None:
    run = training(2, step=3)
    run.hear(StopRequested(checkpoint_within_s=25.0))
    run.trained(4, asked=True)
    assert len(of(run.saved(0, 4, error="OSError"), RequestSave)) == 1
    run.trained(5, asked=True)
    run.all_saved(5)
    run.committed(5)
    assert run.error is None
    assert run.state.checkpoint is not None
    assert run.state.checkpoint.step == 5


def test_a_run_that_is_requested_to_stop_while_it_writes_its_last_checkpoint_finishes() -> None:
    run = training(2, max_steps=3)
    finish(run)
    run.hear(StopRequested(checkpoint_within_s=25.0))
    run.all_saved(3)
    run.committed(3)
    assert run.error is None
    assert len(run.records("finished")) == 1


# -- owned elsewhere, and damaged --


def test_a_driver_that_no_longer_owns_the_run_ends_without_an_entry_in_the_journal() -> None:
    run = training(2, step=3)
    commands = run.hear(LeadershipLost(reason="driver b has taken over"))
    assert isinstance(run.error, RunOwnedElsewhere)
    assert of(commands, Record) == []


def test_a_damaged_checkpoint_is_passed_over_for_one_that_was_committed_meanwhile() -> None:
    old = Checkpointed(step=4, prefix="old", digest="d")
    run = Run(max_workers=2, max_steps=20, checkpoint=old)
    run.ready(0, 1)
    assert run.newest_form().source == FromCheckpoint(step=4, prefix="old", digest="d")
    run.state = replace(run.state, checkpoint=Checkpointed(step=6, prefix="new"), older_checkpoints=(old,))
    run.stopped(0, StopReason.REFUSED, 4, held=(), error=CorruptCheckpoint("chunk 3"))
    run.stopped(1, ABORTED, 4, held=())
    assert run.newest_form().source == FromCheckpoint(step=6, prefix="new")
    assert run.records("checkpoint_skipped") == [{"step": 4, "reason": "chunk 3"}]


def test_what_is_damaged_elsewhere_than_in_a_checkpoint_ends_the_run() -> None:
    run = training(3, step=2)
    run.state = replace(run.state, checkpoint=Checkpointed(step=1, prefix="one"), older_checkpoints=())
    run.lost(1)
    for worker in (0, 2):
        run.stopped(worker, ABORTED, 2)
    assert isinstance(run.newest_form().source, FromMemory)
    run.stopped(0, StopReason.REFUSED, 2, error=CorruptCheckpoint("of something else"))
    run.stopped(2, ABORTED, 2)
    assert isinstance(run.error, CorruptCheckpoint)


@pytest.mark.parametrize("checkpoint_within_s", [None, 25.0])
def test_when_the_run_is_over_no_request_is_accepted(checkpoint_within_s: float | None) -> None:
    run = training(2, step=3)
    run.hear(StopRequested())
    assert run.hear(CheckpointRequested(request=1)) == []
    assert run.hear(StopRequested(checkpoint_within_s=checkpoint_within_s)) == []


# -- by time --


def requests(commands: list[Command]) -> list[RequestSave]:
    return of(commands, RequestSave)


def test_a_checkpoint_is_requested_when_the_newest_one_began_long_ago() -> None:
    run = training(2, save_every_s=60.0, max_steps=100)
    assert not requests(run.trained(1))  # the time begins with the first step
    run.at += 59
    assert not requests(run.trained(2))
    run.at += 1
    (request,) = requests(run.trained(3))
    assert request.worker == run.state.members[0]
    assert not requests(run.trained(4))  # once
    run.trained(5, saves=True, asked=True)
    run.at += 61
    assert not requests(run.trained(6))  # that one is still being written
    run.all_saved(5)
    run.committed(5)
    assert requests(run.trained(7))


def test_any_checkpoint_puts_off_the_next_one_by_time() -> None:
    run = training(2, save_every_s=60.0, max_steps=100)
    run.trained(1)
    run.at += 50
    written(run, 2)
    run.at += 50
    assert not requests(run.trained(3))
    run.at += 10
    assert requests(run.trained(4))


def test_a_request_by_time_that_is_lost_with_its_generation_is_made_again() -> None:
    run = training(3, save_every_s=60.0, max_steps=100)
    run.trained(1)
    run.at += 60
    assert requests(run.trained(2))
    lose_and_recover(run, 2, 2)
    assert requests(run.trained(3))


def test_without_a_time_nothing_is_requested() -> None:
    run = training(2, max_steps=100)
    run.trained(1)
    run.at += 1e6
    assert not requests(run.trained(2))


# -- abandoned, and repeated --


def test_a_checkpoint_that_is_lost_with_a_worker_is_repeated_at_the_first_step_that_can() -> None:
    run = training(3)
    run.trained(1, saves=True)
    run.saved(0, 1)
    run.lost(1)
    for survivor in sorted(run.state.awaited):
        run.stopped(survivor, ABORTED, 1)
    assert run.records("checkpoint_failed") == [
        {"step": 1, "error": "worker 1 was lost before it had written its part", "counted": False}
    ]
    assert requests(run.formed()) == [RequestSave(worker=run.state.members[0], generation=GenerationId(2))]
    assert not requests(run.trained(2)), "one request is enough"
    written(run, 3, asked=True)
    assert not requests(run.trained(4)), "it is made up for"


def test_a_repetition_that_is_lost_is_repeated() -> None:
    run = training(3)
    run.trained(1, saves=True)
    lose_and_recover(run, 1, 1)
    run.trained(2, asked=True)
    run.ready(3)
    lose_and_recover(run, 2, 2)
    assert [request.generation for request in run.all(RequestSave)] == [2, 3]
    written(run, 3, asked=True)
    assert run.state.given_up is None


def test_a_failed_checkpoint_is_repeated_after_a_wait_that_doubles_and_repetitions_do_not_count() -> None:
    run = training(2, max_steps=1000, max_failed_saves=2, stop_on_failed_saves=True)
    fail(run, 1)
    waits, step = list[float](), 1
    for _ in range(3):
        since = run.at
        while True:
            run.at += 1
            step += 1
            if requests(run.trained(step)):
                break
        waits.append(run.at - since)
        step += 1
        run.trained(step, asked=True)
        run.saved(0, step, error="OSError: no space")
    assert waits == [2.0, 4.0, 8.0]
    assert run.records("checkpoints_failing") == []
    assert run.all(End) == []
    fail(run, step + 1)
    assert isinstance(run.error, RunFailed)


def test_a_checkpoint_by_time_counts_although_failed_ones_are_repeated_meanwhile() -> None:
    run = training(2, max_steps=100_000, save_every_s=120.0, max_failed_saves=2, stop_on_failed_saves=True)
    began, step = run.at, 0
    while not run.all(End):
        assert run.at < began + 600, "storage has failed for ten minutes"
        run.at += 1
        step += 1
        if requests(run.trained(step)):
            step += 1
            run.trained(step, asked=True)
            run.saved(0, step, error="OSError: no space")
    assert isinstance(run.error, RunFailed)
    assert run.at >= began + 240


def test_no_checkpoint_is_repeated_that_a_later_one_makes_up_for() -> None:
    run = training(2, max_steps=100)
    run.trained(1, saves=True)
    run.trained(2, saves=True)
    run.saved(0, 1, error="OSError: no space")
    run.at += 10
    assert not requests(run.trained(3)), "one is being written"
    run.all_saved(2)
    run.committed(2)
    assert not requests(run.trained(4))


def test_what_the_end_of_a_run_leaves_unwritten_is_in_the_journal() -> None:
    run = training(2, step=3)
    run.trained(4, saves=True)
    run.saved(0, 4)
    run.hear(StopRequested())
    (entry,) = run.records("checkpoint_failed")
    assert (entry["step"], "the run ended before" in entry["error"]) == (4, True)
    other = training(2, step=3)
    other.trained(4, saves=True)
    other.all_saved(4)  # it is being committed
    other.hear(StopRequested())
    assert other.records("checkpoint_failed") == []


# -- before an end with an error --


def raise_in(run: Run, step: int, *, error: Exception | None = None) -> list[Command]:
    """Worker 0 raises in this step; the others are freed."""
    error = error or TaskError("ValueError in the loss", "traceback")
    commands = run.stopped(0, StopReason.TASK_ERROR, step - 1, error=error)
    for worker in sorted(run.state.awaited):
        commands += run.stopped(worker, ABORTED, step - 1)
    return commands


def failing(step: int, **limits: Any) -> Run:
    """A run whose task raises in this step for the last time that is tolerated."""
    run = training(2, step=step - 1, max_steps=100, **limits)
    raise_in(run, step)
    run.formed()
    raise_in(run, step)
    return run


def rest(run: Run) -> None:
    """The generation that does no step is formed, and stands still."""
    run.formed()
    assert run.all(Train)[-1].rest
    for member in run.state.members:
        run.stopped(member, StopReason.BOUNDARY, run.state.step)


def test_a_failing_task_leaves_a_checkpoint_of_the_newest_complete_step() -> None:
    run = failing(5)
    assert run.all(End) == []
    rest(run)
    assert run.all(SaveSnapshot)
    run.all_saved(4)
    run.committed(4)
    assert isinstance(run.error, TaskError)
    assert run.state.checkpoint is not None
    assert run.state.checkpoint.step == 4
    assert [entry["step"] for entry in run.records("failed")] == [4]
    assert not run.records("paused")


def test_a_failing_task_ends_the_run_at_once_if_there_is_nothing_new_to_write() -> None:
    for run in (failing(1), failing(5, save_at_end=False)):
        assert isinstance(run.error, TaskError)
        assert not run.all(SaveSnapshot)


def test_a_failing_task_ends_the_run_with_its_error_if_the_checkpoint_cannot_be_written() -> None:
    run = failing(5)
    rest(run)
    run.saved(0, 4, error="OSError: no space")
    assert isinstance(run.error, TaskError)
    assert len(run.records("checkpoint_failed")) == 1
    late = failing(5, save_timeout_s=20.0)
    rest(late)
    late.wait(20)
    assert isinstance(late.error, TaskError)


def test_a_task_that_raises_while_its_last_state_is_collected_ends_the_run() -> None:
    run = failing(5)
    raise_in(run, 5, error=TaskError("ValueError in build_model", "other traceback"))
    assert isinstance(run.error, TaskError)
    assert "in the loss" in str(run.error)


def test_nothing_continues_a_run_that_only_writes_its_last_checkpoint() -> None:
    run = failing(5)
    rest(run)
    run.hear(ResumeRequested())
    assert run.state.phase is Phase.PAUSED
    run.hear(StopRequested(checkpoint_within_s=10.0))
    run.hear(StopRequested(checkpoint_within_s=10.0))
    assert isinstance(run.error, TaskError)


def ends_with_its_newest_step(run: Run) -> None:
    """The others stop after step 4 and write it; then the run ends as one that lost too many workers."""
    for worker in sorted(run.state.awaited):
        run.stopped(worker, ABORTED, 4)
    rest(run)
    run.all_saved(4)
    run.committed(4)
    assert isinstance(run.error, RunFailed)
    assert "1 workers were lost" in str(run.error)


def test_a_run_that_lost_too_many_workers_leaves_a_checkpoint_of_the_newest_complete_step() -> None:
    run = training(3, step=4, max_worker_losses=0)
    run.lost(1)
    ends_with_its_newest_step(run)
    assert not [command for command in run.all(StartWorker) if command.worker > 2]


def test_a_further_loss_does_not_cancel_the_last_checkpoint() -> None:
    run = training(6, step=4, max_worker_losses=0)
    run.lost(1)
    run.lost(4)
    assert run.all(End) == []
    ends_with_its_newest_step(run)


def test_a_run_whose_newest_step_is_lost_with_its_workers_ends_at_once() -> None:
    run = training(3, step=4, max_worker_losses=1, min_workers=1)
    run.lost(1)
    run.lost(2)
    run.stopped(0, ABORTED, 4)
    assert isinstance(run.error, RunFailed)
