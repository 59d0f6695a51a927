"""The driver's promises to people who change the learning rate or a mixture, or rewind: one event after the other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from raysharded.driver.handlers import run_changes
from raysharded.driver.state.commands import (
    Answer,
    Command,
    DeleteCheckpoints,
    End,
    Form,
    Record,
    RequestBoundary,
    Train,
)
from raysharded.driver.state.events import (
    CheckpointRequested,
    CommitFailed,
    Deleted,
    LearningRateRequested,
    MixtureWeightsRequested,
    PauseRequested,
    Recorded,
    RewindRequested,
    StopRequested,
)
from raysharded.driver.state.state import Phase
from raysharded.errors import IncompleteCheckpoint, NonFiniteLoss
from raysharded.ids import GenerationId
from raysharded.layout import Held
from raysharded.protocol.messages import FromCheckpoint, FromMemory, StopReason
from tests.driver.scripted import Run, committed, of, training

BOUNDARY, ABORTED, REFUSED = StopReason.BOUNDARY, StopReason.ABORTED, StopReason.REFUSED
TASK_ERROR = StopReason.TASK_ERROR


def saved_every_two(step: int, **limits: Any) -> Run:
    """Two workers, `step` steps, a checkpoint of every second one."""
    run = training(2, global_batch_size=4, **limits)
    for done in range(1, step + 1):
        run.trained(done, saves=done % 2 == 0)
        if done % 2 == 0:
            run.all_saved(done)
            run.committed(done)
    return run


def at_a_boundary(run: Run, step: int) -> list[Command]:
    """All members stop after `step`."""
    commands = run.trained(step)
    for member in run.state.members:
        commands += run.stopped(member, BOUNDARY, step)
    return commands


def recorded(run: Run) -> list[Command]:
    return run.hear(Recorded(generation=run.state.generation))


def held_by_all(run: Run, step: int) -> dict[int, Sequence[Held]]:
    return {int(member): run.holding(member, step) for member in run.state.members}


# -- the learning rate --


def test_another_learning_rate_is_in_the_journal_before_a_step_is_trained_with_it() -> None:
    run = training(2, step=2)
    assert of(run.hear(LearningRateRequested(factor=0.5)), RequestBoundary)
    at_a_boundary(run, 3)
    assert run.newest_form().decisions.rates == ((4, 0.5),)
    assert isinstance(run.newest_form().source, FromMemory)
    formed = run.formed()
    assert of(formed, Train) == []
    assert run.records("learning_rate") == [{"step": 3, "factor": 0.5, "from_step": 4}]
    (record,) = [one for one in of(formed, Record) if one.kind == "learning_rate"]
    assert record.durable
    assert record.awaited_by == run.state.generation
    assert of(run.wait(200), Train) == []  # storage is slow: nothing is broken by that
    assert run.state.phase is Phase.FORMING
    assert len(of(recorded(run), Train)) == 1


def test_what_is_requested_while_a_generation_forms_waits_for_the_next_boundary() -> None:
    run = training(2, step=2)
    run.hear(LearningRateRequested(factor=0.5))
    at_a_boundary(run, 3)
    assert run.hear(LearningRateRequested(factor=0.25)) == []
    run.formed()
    recorded(run)
    assert of(run.trained(4), RequestBoundary)
    at_a_boundary(run, 5)
    assert run.newest_form().decisions.rates == ((4, 0.5), (6, 0.25))


def test_a_factor_holds_for_no_step_that_was_done_before_also_if_that_has_to_be_done_again() -> None:
    run = saved_every_two(3)
    run.hear(LearningRateRequested(factor=0.5))
    run.trained(4)
    run.lost(1)
    run.stopped(0, ABORTED, 4, held=())
    run.ready(2)
    run.wait(3)
    assert run.newest_form().source.step == 2
    assert run.newest_form().decisions.rates == ((5, 0.5),)


def test_a_worker_lost_while_it_is_recorded_does_not_undo_it() -> None:
    run = training(3, step=2, min_workers=2)
    run.hear(LearningRateRequested(factor=0.5))
    at_a_boundary(run, 3)
    run.formed()
    run.lost(2)
    for member in (0, 1):
        run.stopped(member, ABORTED, 3)
    assert run.newest_form().decisions.rates == ((4, 0.5),)
    assert of(run.formed(), Train) == []
    first = GenerationId(run.state.generation - 1)
    assert len(of(run.hear(Recorded(generation=first)), Train)) == 1
    assert len(run.records("learning_rate")) == 1


@pytest.mark.parametrize("factor", [-0.5, math.nan, math.inf])
def test_a_factor_that_no_learning_rate_can_have_is_refused(factor: float) -> None:
    run = training(2, step=2)
    assert run.hear(LearningRateRequested(factor=factor))[1:] == []
    (entry,) = run.records("learning_rate_refused")
    assert entry["reason"] == run_changes.rate_refusal(run.state, factor)
    assert str(factor) in entry["reason"]


def test_after_the_last_step_nothing_is_changed() -> None:
    run = saved_every_two(9)
    run.hear(LearningRateRequested(factor=0.5))
    run.hear(RewindRequested(step=4))
    run.trained(10)
    for member in run.state.members:
        run.stopped(member, StopReason.FINISHED, 10)
    assert run.state.phase is Phase.CLOSING
    assert len(run.records("learning_rate_refused")) == len(run.records("rewind_refused")) == 1
    assert "last step" in run_changes.rate_refusal(run.state, 1.0)
    assert "last step" in run_changes.rewind_refusal(run.state, 4)


# -- going back --


def test_a_run_goes_back_when_that_is_in_the_journal_and_then_deletes_what_came_after() -> None:
    run = saved_every_two(7)
    assert of(run.hear(RewindRequested(step=4)), RequestBoundary)
    at_a_boundary(run, 8)
    spec = run.newest_form()
    assert isinstance(spec.source, FromCheckpoint)
    assert (spec.source.step, spec.decisions.skips) == (4, ())
    assert run.records("rewind") == []
    run.formed()
    (entry,) = run.records("rewind")
    assert (entry["step"], entry["to_step"], entry["skip_samples"], entry["who"]) == (8, 4, 0, "asked")
    assert entry["distrusted"] == [committed(6).prefix]
    assert run.all(DeleteCheckpoints) == []
    commands = recorded(run)
    assert of(commands, DeleteCheckpoints) == [DeleteCheckpoints(prefixes=(committed(6).prefix,))]
    assert of(commands, Train)
    assert run.state.checkpoint is not None
    assert run.state.checkpoint.step == 4
    assert [checkpoint.step for checkpoint in run.state.older_checkpoints] == [2]


def test_the_data_read_since_is_passed_over_if_that_is_wanted_and_a_new_learning_rate_holds_at_once() -> None:
    run = saved_every_two(5)
    run.hear(LearningRateRequested(factor=0.5))
    at_a_boundary(run, 6)
    run.formed()
    recorded(run)
    run.hear(RewindRequested(step=4, skip_data=True))
    run.hear(LearningRateRequested(factor=0.1))
    at_a_boundary(run, 7)
    run.formed()
    (entry,) = run.records("rewind")
    assert entry["skip_samples"] == 3 * 4
    assert entry["learning_rate"] == []
    assert run.state.decisions.skips == ((4, 12),)
    assert run.state.decisions.rates == ((5, 0.1),)
    kinds = [record.kind for record in run.all(Record) if record.kind in ("rewind", "learning_rate")]
    assert kinds == ["learning_rate", "rewind", "learning_rate"]


def test_a_learning_rate_that_was_requested_before_going_back_is_undone_with_it_though_it_never_held() -> None:
    run = saved_every_two(5)
    run.hear(LearningRateRequested(factor=0.5))
    run.hear(RewindRequested(step=4))
    at_a_boundary(run, 6)
    assert run.newest_form().decisions.rates == ()
    run.formed()
    assert run.state.decisions.rates == ()
    assert run.records("learning_rate") == []
    (entry,) = run.records("learning_rate_refused")
    assert (entry["factor"], entry["reason"]) == (0.5, "it is undone: going back to step 4 was asked for after it.")
    recorded(run)
    assert not of(run.trained(5), RequestBoundary)  # nothing is left to decide


def test_a_learning_rate_in_the_making_is_undone_by_going_back_and_one_requested_after_it_holds() -> None:
    run = saved_every_two(5)
    run.hear(LearningRateRequested(factor=0.5))
    at_a_boundary(run, 6)
    run.hear(RewindRequested(step=4))
    run.hear(LearningRateRequested(factor=0.1))
    run.formed()
    recorded(run)
    assert run.state.decisions.rates == ((7, 0.5),)
    assert of(run.trained(7), RequestBoundary)
    at_a_boundary(run, 8)
    run.formed()
    assert run.state.decisions.rates == ((5, 0.1),)
    assert run.records("learning_rate_refused") == []


def test_a_checkpoint_that_cannot_be_read_is_not_gone_back_to_and_nothing_is_lost() -> None:
    run = saved_every_two(5)
    run.hear(RewindRequested(step=2))
    at_a_boundary(run, 6)
    held = {member: run.state.holdings[member].held for member in run.state.members}
    for member in run.state.members:
        run.stopped(member, REFUSED, 2, held=held[member], error=IncompleteCheckpoint("a file is missing"))
    (entry,) = run.records("rewind_refused")
    assert "a file is missing" in entry["reason"]
    assert isinstance(run.newest_form().source, FromMemory)
    assert run.newest_form().source.step == 6
    assert run.records("rewind") == []
    assert of(run.formed(), Train)
    assert run.all(DeleteCheckpoints) == []


def test_what_is_requested_again_is_another_request() -> None:
    run = saved_every_two(5)
    run.hear(LearningRateRequested(factor=0.5))
    at_a_boundary(run, 6)
    run.hear(RewindRequested(step=4))
    run.hear(LearningRateRequested(factor=0.5))  # like the first, but to hold after the rewind
    run.formed()
    recorded(run)
    at_a_boundary(run, 7)
    run.formed()
    assert run.state.decisions.rates == ((5, 0.5),)


def test_going_back_again_undoes_a_learning_rate_that_was_requested_between() -> None:
    run = saved_every_two(5)
    run.hear(RewindRequested(step=4))
    run.hear(LearningRateRequested(factor=0.1))
    at_a_boundary(run, 6)
    run.hear(RewindRequested(step=4))
    run.formed()
    recorded(run)
    assert [entry["from_step"] for entry in run.records("learning_rate")] == [5]
    at_a_boundary(run, 5)
    run.formed()
    assert run.state.decisions.rates == ()
    assert len(run.records("rewind")) == 2


def test_a_learning_rate_stays_undone_if_the_run_is_to_go_back_elsewhere_meanwhile() -> None:
    run = saved_every_two(7)
    run.hear(LearningRateRequested(factor=0.5))
    run.hear(RewindRequested(step=4))
    at_a_boundary(run, 8)
    run.hear(RewindRequested(step=6))
    run.formed()
    recorded(run)
    at_a_boundary(run, 5)
    assert len(run.records("rewind_refused")) == 1  # step 6 is undone
    assert len(run.records("learning_rate_refused")) == 1
    run.formed()
    assert run.state.decisions.rates == ()


def test_nothing_is_trained_before_all_that_was_decided_is_in_the_journal() -> None:
    run = saved_every_two(5)
    run.hear(RewindRequested(step=4))
    run.hear(LearningRateRequested(factor=0.1))
    at_a_boundary(run, 6)
    decided = [record for record in of(run.formed(), Record) if record.durable]
    assert [record.kind for record in decided] == ["rewind", "learning_rate"]
    assert [record.awaited_by for record in decided] == [None, run.state.generation]


def test_a_learning_rate_that_would_hold_for_no_step_is_refused_also_if_steps_are_computed_again() -> None:
    run = saved_every_two(9)
    run.trained(10)
    run.lost(1)
    run.stopped(0, ABORTED, 10, held=())
    run.ready(2)
    run.wait(3)
    run.formed()
    assert (run.state.step, run.state.reached) == (8, 10)
    run.hear(LearningRateRequested(factor=0.5))
    assert len(run.records("learning_rate_refused")) == 1


@pytest.mark.parametrize("request_", [LearningRateRequested(factor=0.5), RewindRequested(step=4)])
@pytest.mark.parametrize("within_s", [None, math.inf])
def test_what_is_not_decided_when_the_run_is_stopped_is_refused(
    request_: LearningRateRequested | RewindRequested, within_s: float | None
) -> None:
    run = saved_every_two(7)
    run.hear(request_)
    run.hear(StopRequested(checkpoint_within_s=within_s))
    if within_s is not None:
        run.trained(8, asked=True)
        for member in run.state.members:
            run.stopped(member, BOUNDARY, 8)
        run.says = GenerationId(1)  # the generation whose step it is
        run.saved(0, 8)
        run.saved(1, 8)
        run.committed(8)
    assert run.state.phase is Phase.OVER
    refused = [record for record in run.all(Record) if record.kind.endswith("_refused")]
    assert [record.fields["reason"] for record in refused] == ["the run ended before it was decided."]


@pytest.mark.parametrize("refused", [True, False])
def test_a_learning_rate_outlives_a_rewind_that_was_impossible(refused: bool) -> None:
    run = saved_every_two(5)
    run.hear(LearningRateRequested(factor=0.5))
    run.hear(RewindRequested(step=3 if refused else 2))
    at_a_boundary(run, 6)
    if not refused:
        held = {member: run.state.holdings[member].held for member in run.state.members}
        for member in run.state.members:
            run.stopped(member, REFUSED, 2, held=held[member], error=IncompleteCheckpoint("a file is missing"))
    assert len(run.records("rewind_refused")) == 1
    run.formed()
    assert run.state.decisions.rates == ((7, 0.5),)


def test_a_stop_with_a_checkpoint_on_the_way_back_loses_no_step() -> None:
    run = saved_every_two(7)
    run.hear(RewindRequested(step=4))
    at_a_boundary(run, 8)
    run.hear(StopRequested(checkpoint_within_s=math.inf))
    assert run.all(End) == []
    run.formed()
    recorded(run)
    run.trained(5, asked=True)
    run.all_saved(5)
    run.committed(5)
    assert run.state.phase is Phase.OVER
    assert [entry["to_step"] for entry in run.records("rewind")] == [4]


def test_paused_on_the_way_back_the_run_holds_what_it_had_done() -> None:
    run = saved_every_two(7, min_workers=2)
    run.hear(RewindRequested(step=4))
    at_a_boundary(run, 8)
    held = held_by_all(run, 8)
    run.hear(PauseRequested())
    run.lost(1)
    run.stopped(0, ABORTED, 4, held=held[0])
    assert run.state.phase is Phase.PAUSED
    (answer,) = of(run.hear(CheckpointRequested(request=5)), Answer)
    assert (answer.step, bool(answer.error)) == (8, True)  # and not the checkpoint of step 6
    run.hear(StopRequested(checkpoint_within_s=math.inf))
    assert run.all(End) == []


def test_data_that_a_bad_number_was_in_is_not_read_again_by_going_back_further() -> None:
    run = saved_every_two(8, rewind=True, save_every_steps=2)
    run.hear(RewindRequested(step=4, skip_data=True))
    for member in run.state.members:
        run.stopped(member, TASK_ERROR, 8, error=NonFiniteLoss("step 9"))
    run.formed()
    recorded(run)
    assert [entry["to_step"] for entry in run.records("rewind")] == [8, 4]
    assert run.state.decisions.skips == ((4, 5 * 4),)  # steps 5 to 9


def test_going_back_twice_past_the_data_passes_over_all_of_it() -> None:
    run = saved_every_two(8)
    run.hear(RewindRequested(step=8, skip_data=True))
    at_a_boundary(run, 9)
    run.hear(RewindRequested(step=4, skip_data=True))
    run.formed()
    recorded(run)
    assert run.state.decisions.skips == ((8, 4),)
    run.lost(1)
    run.stopped(0, ABORTED, 8)
    run.ready(2)
    run.wait(3)
    run.formed()
    assert run.state.decisions.skips == ((4, 5 * 4),)


def test_workers_lost_on_the_way_back_do_not_keep_the_run_from_it() -> None:
    run = training(3, global_batch_size=4, min_workers=2)
    run.trained(1)
    run.trained(2, saves=True)
    run.all_saved(2)
    run.committed(2)
    run.trained(3)
    run.hear(RewindRequested(step=2))
    at_a_boundary(run, 4)
    run.lost(2)
    for member in (0, 1):
        run.stopped(member, ABORTED, 2, held=())
    assert run.newest_form().source.step == 2
    run.formed()
    recorded(run)
    assert [entry["to_step"] for entry in run.records("rewind")] == [2]


def test_after_it_is_in_the_journal_memory_of_undone_steps_is_not_resumed_from() -> None:
    run = saved_every_two(4, min_workers=1)
    undone = held_by_all(run, 5)
    run.hear(RewindRequested(step=2))
    at_a_boundary(run, 5)
    run.formed()
    run.lost(1)
    run.stopped(0, ABORTED, 2, held=undone[0])
    assert run.newest_form().source.step == 2
    assert len(run.all(Form)) == 3


def test_a_checkpoint_of_an_undone_step_that_becomes_real_meanwhile_is_deleted() -> None:
    run = saved_every_two(3)
    run.trained(4, saves=True)
    run.all_saved(4)
    run.hear(RewindRequested(step=2))
    at_a_boundary(run, 5)
    run.formed()
    assert run.records("rewind")[0]["distrusted"] == [committed(4).prefix]
    assert of(run.hear(committed(4)), DeleteCheckpoints) == []
    assert of(recorded(run), DeleteCheckpoints) == [DeleteCheckpoints(prefixes=(committed(4).prefix,))]
    assert run.state.checkpoint is not None
    assert run.state.checkpoint.step == 2


def test_a_checkpoint_whose_commit_storage_did_not_confirm_is_deleted_with_its_step() -> None:
    run = saved_every_two(3)
    run.trained(4, saves=True)
    run.all_saved(4)
    failed = CommitFailed(generation=run.state.generation, step=4, error="a timeout")
    run.hear(failed)
    run.hear(RewindRequested(step=2))
    at_a_boundary(run, 5)
    run.formed()
    assert run.records("rewind")[0]["distrusted"] == [committed(4).prefix]
    assert of(recorded(run), DeleteCheckpoints) == [DeleteCheckpoints(prefixes=(committed(4).prefix,))]
    assert run.state.unconfirmed_saves == ()
    assert of(run.hear(failed), DeleteCheckpoints) == [DeleteCheckpoints(prefixes=(committed(4).prefix,))]


def test_unconfirmed_checkpoints_are_forgotten_once_no_rollback_can_undo_them() -> None:
    run = saved_every_two(1)
    for step in (2, 4, 6):
        run.trained(*range(run.state.step + 1, step), saves=False)
        run.trained(step, saves=True)
        run.all_saved(step)
        run.hear(CommitFailed(generation=run.state.generation, step=step, error="a timeout"))
    assert [step for step, _ in run.state.unconfirmed_saves] == [2, 4, 6]
    run.trained(7)
    run.trained(8, saves=True)
    run.all_saved(8)
    run.committed(8)
    run.trained(9, saves=True)
    run.all_saved(9)
    run.hear(CommitFailed(generation=run.state.generation, step=9, error="a timeout"))
    assert [step for step, _ in run.state.unconfirmed_saves] == [9]


def test_a_step_without_a_checkpoint_is_refused_with_those_that_there_are() -> None:
    run = saved_every_two(7)
    assert "2, 4, 6" in run_changes.rewind_refusal(run.state, 5)
    assert run_changes.rewind_refusal(run.state, 4) == ""
    run.hear(Deleted(prefixes=(committed(2).prefix,)))
    assert run_changes.rewind_refusal(run.state, 2).endswith("checkpoints of: 4, 6.")
    run.hear(RewindRequested(step=5))
    assert run.records("rewind_refused")[0]["to_step"] == 5
    assert run.state.wanted_rewind is None
    fresh = replace(run.state, checkpoint=None, older_checkpoints=())
    assert "nor of any other yet" in run_changes.rewind_refusal(fresh, 5)


# -- the weights of a mixture --


def of_a_mixture(run: Run) -> Run:
    run.state = replace(run.state, blocks=(-7, run.state.limits.global_batch_size))
    return run


A, B = (("a", 1.0),), (("a", 1.0), ("b", 3.0))


def test_other_weights_are_in_the_journal_before_a_sample_is_read_with_them() -> None:
    run = of_a_mixture(training(2, step=2, global_batch_size=4))
    assert of(run.hear(MixtureWeightsRequested(weights=B)), RequestBoundary)
    at_a_boundary(run, 3)
    assert run.newest_form().decisions.weights == ((4, 12, B),)
    formed = run.formed()
    assert of(formed, Train) == []
    fields = {"step": 3, "weights": {"a": 1.0, "b": 3.0}, "from_step": 4, "from_position": 12}
    assert run.records("mixture_weights") == [fields]
    (record,) = [one for one in of(formed, Record) if one.kind == "mixture_weights"]
    assert record.durable
    assert record.awaited_by == run.state.generation
    assert len(of(recorded(run), Train)) == 1
    assert not of(run.trained(4), RequestBoundary)  # nothing is left to decide


def test_a_learning_rate_and_weights_are_decided_together() -> None:
    run = of_a_mixture(training(2, step=2, global_batch_size=4))
    run.hear(MixtureWeightsRequested(weights=B))
    run.hear(LearningRateRequested(factor=0.5))
    at_a_boundary(run, 3)
    run.formed()
    kinds = [record.kind for record in run.all(Record) if record.awaited_by is not None]
    assert kinds == ["mixture_weights"]  # the last one: the journal is written in order
    assert len(run.records("learning_rate")) == 1
    assert (run.state.decisions.rates, run.state.decisions.weights) == (((4, 0.5),), ((4, 12, B),))


def test_going_back_undoes_weights_of_later_samples_and_keeps_those_of_earlier_ones() -> None:
    run = of_a_mixture(saved_every_two(2, max_steps=30))
    for weights, boundary in ((A, 3), (B, 6)):
        run.hear(MixtureWeightsRequested(weights=weights))
        at_a_boundary(run, boundary)
        run.formed()
        recorded(run)
        run.trained(boundary + 1, saves=(boundary + 1) % 2 == 0)
        if (boundary + 1) % 2 == 0:
            run.all_saved(boundary + 1)
            run.committed(boundary + 1)
    assert [change[:2] for change in run.state.decisions.weights] == [(4, 12), (7, 24)]
    run.hear(RewindRequested(step=4, skip_data=True))
    at_a_boundary(run, 8)
    run.formed()
    (entry,) = run.records("rewind")
    assert entry["mixture_weights"] == [[4, 12, {"a": 1.0}]]
    assert run.state.decisions.weights == ((4, 12, A),)
    recorded(run)
    run.hear(MixtureWeightsRequested(weights=B))
    at_a_boundary(run, 5)
    assert run.newest_form().decisions.weights == ((4, 12, A), (6, 5 * 4 + 4 * 4, B)), "after the skipped samples"


def test_of_several_weights_that_wait_for_a_boundary_the_last_ones_are_decided() -> None:
    run = of_a_mixture(training(2, step=2, global_batch_size=4))
    for weights in (A, B, A, B):
        run.hear(MixtureWeightsRequested(weights=weights))
    at_a_boundary(run, 3)
    run.formed()
    (entry,) = run.records("mixture_weights")
    assert entry["weights"] == dict(B)
    assert run.records("mixture_weights_refused") == []
    recorded(run)
    assert not of(run.trained(4), RequestBoundary)


def test_weights_that_were_requested_before_going_back_are_undone_with_it() -> None:
    run = of_a_mixture(saved_every_two(5))
    run.hear(MixtureWeightsRequested(weights=B))
    run.hear(RewindRequested(step=4))
    at_a_boundary(run, 6)
    run.formed()
    assert run.state.decisions.weights == ()
    assert run.records("mixture_weights") == []
    (entry,) = run.records("mixture_weights_refused")
    why = "it is undone: going back to step 4 was asked for after it."
    assert (entry["weights"], entry["reason"]) == ({"a": 1.0, "b": 3.0}, why)
    assert "mixture_weights" not in run.records("rewind")[0]


def test_weights_that_no_mixture_can_have_are_refused_and_also_those_of_other_data() -> None:
    run = of_a_mixture(training(2, step=2))
    for weights in ((("a", -1.0),), (("a", math.nan),), (("a", math.inf),), (("a", 0.0),), ()):
        assert run.hear(MixtureWeightsRequested(weights=weights))[1:] == []
    assert len(run.records("mixture_weights_refused")) == 5
    other = training(2, step=2)
    other.hear(MixtureWeightsRequested(weights=B))
    (entry,) = other.records("mixture_weights_refused")
    assert "the data of the run are no raysharded.Mixture" in entry["reason"]


@pytest.mark.parametrize("mixed", [True, False])
def test_weights_that_are_wanted_before_the_first_worker_are_decided_once_the_data_are_known(mixed: bool) -> None:
    run = Run(max_workers=2)
    assert run.state.num_samples is None
    run.hear(MixtureWeightsRequested(weights=B))
    assert run.records("mixture_weights_refused") == []
    if mixed:
        run.state = replace(run.state, blocks=(-7, run.state.limits.global_batch_size))
    run.ready(0, 1)
    refused = [entry["reason"] for entry in run.records("mixture_weights_refused")]
    assert run.newest_form().decisions.weights == (((1, 0, B),) if mixed else ())
    assert refused == (
        [] if mixed else ["the data of the run are no raysharded.Mixture: there is nothing that has weights."]
    )


def test_weights_that_would_hold_for_no_step_are_refused() -> None:
    run = of_a_mixture(saved_every_two(9))
    run.hear(MixtureWeightsRequested(weights=B))
    run.trained(10)
    for member in run.state.members:
        run.stopped(member, StopReason.FINISHED, 10)
    assert len(run.records("mixture_weights_refused")) == 1
    assert "last step" in run_changes.weights_refusal(run.state, B)
