"""The driver's promises to workers that are requested to leave, one event after the other."""

from __future__ import annotations

from typing import Any

from raysharded.driver.state.commands import (
    CollectSave,
    Form,
    Interrupt,
    KillWorker,
    RequestBoundary,
    RequestSave,
    StartWorker,
)
from raysharded.driver.state.state import Phase
from raysharded.ids import WorkerId
from raysharded.protocol.messages import FromCheckpoint, FromMemory, StopReason
from raysharded.protocol.worker_launcher import LeaveNotice
from tests.driver.scripted import Run, of, training

ABORTED, BOUNDARY = StopReason.ABORTED, StopReason.BOUNDARY


def told(run: Run, *workers: int, within_s: float = 25.0, whole_node: bool = False) -> list[Any]:
    ids = tuple(map(WorkerId, workers))
    return run.hear(LeaveNotice(workers=ids, reason="told", within_s=within_s, whole_node=whole_node))


def stop_at_boundary(run: Run, step: int) -> None:
    """All members do one more step, report their shards, and stop."""
    run.trained(step)
    members, held = run.state.members, {member: run.holding(member, step) for member in run.state.members}
    for member in members:
        run.stopped(member, BOUNDARY, step, held=held[member])


def test_a_notice_stops_the_generation_at_the_next_boundary_and_disturbs_no_step() -> None:
    run = training(3, step=2)
    commands = told(run, 1)
    assert len(of(commands, RequestBoundary)) == 1
    assert of(commands, Interrupt) == []
    assert run.records("worker_leaving") == [
        {"worker": 1, "step": 2, "node": "node1", "reason": "told", "notice_s": 25.0}
    ]


def test_the_next_generation_is_formed_from_memory_without_the_leaver_and_loses_no_step() -> None:
    run = training(3, step=2)
    told(run, 1)
    stop_at_boundary(run, 3)
    assert set(run.newest_form().members) == {0, 2}
    assert isinstance(run.newest_form().source, FromMemory)
    assert run.newest_form().source.step == 3


def test_the_leaver_is_ended_when_the_others_have_formed_and_not_before_and_is_no_loss() -> None:
    run = training(3, step=2, max_worker_losses=0)
    told(run, 1)
    stop_at_boundary(run, 3)
    assert run.all(KillWorker) == []
    assert of(run.formed(), KillWorker) == [KillWorker(worker=WorkerId(1), at_once=False)]
    assert run.records("worker_left")[0]["worker"] == 1
    assert run.records("worker_lost") == []
    assert (run.state.losses, run.state.preemptions) == (0, 1)
    assert len(of(run.trained(4), StartWorker)) == 1


def test_a_leaver_that_is_lost_before_it_is_ended_is_no_loss() -> None:
    run = training(3, step=2, max_worker_losses=0)
    told(run, 1)
    stop_at_boundary(run, 3)
    assert of(run.lost(1), Interrupt) == []
    run.formed()
    assert run.state.phase is Phase.TRAINING
    assert run.state.losses == 0


def test_a_leaver_that_is_lost_in_mid_step_breaks_the_step_but_does_not_count_as_a_loss() -> None:
    run = training(3, step=2, max_worker_losses=0)
    told(run, 1)
    assert len(of(run.lost(1), Interrupt)) == 2
    assert run.error_or_none() is None
    assert run.records("worker_lost")[0]["worker"] == 1
    assert run.state.losses == 0


def test_one_notice_for_a_node_lets_all_its_workers_go_at_one_boundary() -> None:
    run = Run(max_workers=6, min_workers=2)
    run.ready(*range(6))
    run.state = run.with_nodes({0: "a", 1: "b", 2: "a", 3: "b", 4: "a", 5: "b"})
    run.formed()
    run.trained(1)
    first = run.state.members[0]
    there = {member for member in run.state.members if (member - first) % 2 == 0}
    assert len(of(told(run, first, whole_node=True), RequestBoundary)) == 1
    assert set(run.state.leaving) == there
    stop_at_boundary(run, 2)
    assert set(run.newest_form().members) == set(range(6)) - there


def test_neighbours_that_hold_each_others_mirrors_go_one_after_the_other() -> None:
    run = training(4, step=2, min_workers=2)
    first, second = run.state.members[1:3]
    told(run, first, second)
    stop_at_boundary(run, 3)
    assert run.newest_form().source.step == 3
    assert len(run.newest_form().members) == 3
    run.formed()
    assert run.state.boundary_requested
    stop_at_boundary(run, 4)
    assert set(run.newest_form().members) == set(range(4)) - {first, second}
    assert run.newest_form().source.step == 4


def test_with_too_few_others_the_leaver_trains_on_until_its_replacement_is_there() -> None:
    run = training(2, step=2, min_workers=2)
    commands = told(run, 1)
    assert of(commands, RequestBoundary) == []
    assert len(of(commands, StartWorker)) == 1
    assert len(of(commands, RequestSave)) == 1
    run.trained(3)
    assert run.state.phase is Phase.TRAINING
    assert len(of(run.ready(2), RequestBoundary)) == 1
    stop_at_boundary(run, 4)
    assert set(run.newest_form().members) == {0, 2}
    assert run.newest_form().source.step == 4


def test_it_waits_for_the_replacement_as_long_as_after_a_loss_but_half_of_the_notice_at_most() -> None:
    for wait_s, notice_s, expected in ((10.0, 100.0, 10.0), (60.0, 20.0, 10.0)):
        run = training(3, step=2, replacement_wait_s=wait_s)
        commands = told(run, 1, within_s=notice_s)
        assert of(commands, RequestBoundary) == []
        assert len(of(commands, StartWorker)) == 1
        assert of(run.wait(expected - 0.5), RequestBoundary) == []
        assert len(of(run.wait(0.75), RequestBoundary)) == 1


def test_the_only_worker_hands_over_to_the_one_that_takes_its_place() -> None:
    run = training(1, step=2, min_workers=1)
    assert len(of(told(run, 0), RequestSave)) == 1
    assert len(of(run.ready(1), RequestBoundary)) == 1
    stop_at_boundary(run, 3)
    assert set(run.newest_form().members) == {0, 1}  # for a step: it alone has the state
    run.formed()
    assert run.state.boundary_requested
    stop_at_boundary(run, 4)
    assert run.newest_form().members == (1,)
    assert run.newest_form().source.step == 4


def test_the_only_worker_leaves_after_one_more_checkpoint_if_nobody_takes_its_place_in_half_of_its_time() -> None:
    run = training(1, step=2, min_workers=1, max_worker_losses=0)
    told(run, 0, within_s=20.0)
    run.trained(3, asked=True)
    run.all_saved(3)
    assert of(run.committed(3), KillWorker) == []
    for step in (4, 5, 6):
        run.at += 3.0
        assert of(run.trained(step), RequestSave) == []
    run.at += 3.0
    assert len(of(run.trained(7), RequestSave)) == 1
    run.trained(8, asked=True)
    run.all_saved(8)
    assert of(run.committed(8), KillWorker) == [KillWorker(worker=WorkerId(0), at_once=False)]
    assert run.state.losses == 0


def test_without_mirrors_it_leaves_when_a_checkpoint_is_committed() -> None:
    run = training(3, step=2, mirrors=False, max_worker_losses=0)
    commands = told(run, 1)
    assert of(commands, RequestBoundary) == []
    assert len(of(commands, RequestSave)) == 1
    run.trained(3, asked=True)
    run.all_saved(3)
    assert of(run.committed(3), KillWorker) == [KillWorker(worker=WorkerId(1), at_once=False)]
    for member in (0, 2):
        run.stopped(member, ABORTED, 3, held=[])
    assert isinstance(run.newest_form().source, FromCheckpoint)
    assert run.newest_form().source.step == 3
    assert run.state.losses == 0


def test_a_checkpoint_for_a_leaver_that_fails_is_requested_again() -> None:
    run = training(3, step=2, mirrors=False)
    told(run, 1)
    run.trained(3, asked=True)
    assert len(of(run.saved(0, 3, error="OSError: no space"), RequestSave)) == 1


def test_an_idle_worker_that_must_leave_is_ended_at_once_and_replaced() -> None:
    run = training(2, step=2, spares=1)
    run.ready(2)
    commands = told(run, 2)
    assert of(commands, KillWorker) == [KillWorker(worker=WorkerId(2), at_once=False)]
    assert len(of(commands, StartWorker)) == 1
    assert run.state.phase is Phase.TRAINING
    assert len(run.all(Form)) == 1


# -- nobody stays --


def told_all(run: Run, within_s: float = 60.0) -> list[Any]:
    return told(run, *run.state.members, within_s=within_s)


def saved(run: Run, step: int, seconds: float) -> list[Any]:
    """The members do this step, and write its checkpoint in so many seconds."""
    run.trained(step, asked=True)
    run.at += seconds
    run.all_saved(step)
    return run.committed(step)


def test_if_all_workers_must_leave_they_train_on_and_write_a_checkpoint_at_once_and_another_in_time() -> None:
    run = training(4, step=2, min_workers=1, max_worker_losses=0, max_steps=100)
    commands = told_all(run)
    assert len(of(commands, RequestSave)) == 1
    assert of(saved(run, 3, seconds=5.0), KillWorker) == []
    asked_at = None
    for step in range(4, 70):
        run.at += 1.0
        commands = run.trained(step)
        assert of(commands, RequestBoundary) == []  # a generation of some of them would end as soon
        if of(commands, RequestSave):
            asked_at = run.at
            break
    assert asked_at is not None
    assert 60.0 - 1.0 - 2 * (5.0 + 2.0) <= asked_at <= 60.0 - 1.0 - 5.0
    commands = saved(run, step + 1, seconds=5.0)
    assert [command.worker for command in of(commands, KillWorker)] == [0, 1, 2, 3]
    assert run.at < 59.0
    assert run.state.phase is Phase.GATHERING
    assert (run.state.losses, run.state.checkpoint and run.state.checkpoint.step) == (0, step + 1)
    run.ready(4, 5, 6, 7)
    run.wait(3.0)
    assert run.newest_form().source.step == step + 1


def test_how_long_checkpoints_took_when_others_left_is_not_believed() -> None:
    run = training(2, step=2, min_workers=1, max_worker_losses=0, max_steps=100)
    told_all(run, within_s=40.0)
    saved(run, 3, seconds=24.0)
    assert run.state.leavers_save_s == 24.0
    run.ready(2, 3)
    for step in (4, 5):  # worker 0 goes, then worker 1: they hold each other's mirrors
        stop_at_boundary(run, step)
        run.formed()
    assert set(run.state.members) == {2, 3}
    told_all(run, within_s=50.0)
    assert of(saved(run, 6, seconds=1.0), KillWorker) == []  # the first of two
    assert run.state.leavers_save_s == 1.0


def test_if_it_takes_as_long_as_the_notice_they_train_until_they_are_taken_away() -> None:
    run = training(3, step=2, min_workers=1, max_steps=100)
    assert len(of(told_all(run, within_s=10.0), RequestSave)) == 1
    commands = saved(run, 3, seconds=6.0)
    for step in range(4, 8):
        run.at += 1.0
        commands += run.trained(step)
    assert of(commands, RequestSave) == []
    assert of(commands, KillWorker) == []


def test_if_one_goes_much_later_the_others_hand_over_to_it() -> None:
    run = training(3, step=2, min_workers=1)
    told(run, 0, within_s=500.0)
    told(run, 1, 2, within_s=20.0)
    stop_at_boundary(run, 3)
    assert 0 in run.newest_form().members
    assert len(run.newest_form().members) == 2  # one alone does not hold the whole state
    run.formed()
    stop_at_boundary(run, 4)
    assert run.newest_form().members == (0,)
    assert run.newest_form().source.step == 4


def test_a_worker_that_comes_in_time_takes_over_also_after_the_last_checkpoint_was_requested() -> None:
    run = training(2, step=2, min_workers=1, max_steps=100)
    told_all(run, within_s=20.0)
    saved(run, 3, seconds=4.0)
    run.at += 8.0
    run.trained(4)
    assert all(departure.saves_last for departure in run.state.leaving.values())
    assert len(of(run.ready(2), RequestBoundary)) == 1
    assert of(saved(run, 5, seconds=1.0), KillWorker) == []
    stop_at_boundary(run, 6)
    assert 2 in run.newest_form().members
    assert run.newest_form().source.step == 6


def test_its_part_of_a_checkpoint_is_waited_for() -> None:
    run = training(3, step=2)
    run.trained(3, saves=True)
    told(run, 1)
    stop_at_boundary(run, 4)
    assert of(run.formed(), KillWorker) == []
    run.says = run.state.generation.__class__(1)
    run.saved(0, 3)
    run.saved(2, 3)
    assert of(run.saved(1, 3), KillWorker) == [KillWorker(worker=WorkerId(1), at_once=False)]
    assert run.records("checkpoint_failed") == []


def test_when_it_exits_without_its_part_of_the_last_checkpoint_the_others_write_their_own() -> None:
    run = training(4, min_workers=1, max_steps=3)
    run.trained(1, 2, 3, saves=True)
    run.saved(3, 3)
    told(run, 1)
    run.lost(3)
    for member in (0, 1, 2):
        run.stopped(member, StopReason.FINISHED, 3)
    assert set(run.newest_form().members) == {0, 2}
    run.formed()
    for member in run.state.members:
        run.stopped(member, StopReason.FINISHED, 3)
    assert run.state.phase is Phase.CLOSING  # it waits for the checkpoint that was begun first
    run.lost(1)
    assert of(run.wait(0.25), CollectSave) == [
        CollectSave(generation=run.state.generation, step=3, members=run.state.members)
    ]
    run.all_saved(3)
    run.committed(3)
    assert run.error is None


def test_a_spare_takes_part_in_the_next_generation_after_a_loss() -> None:
    run = training(3, step=2, spares=1)
    assert len(run.all(StartWorker)) == 4
    assert of(run.ready(3), RequestBoundary) == []
    run.lost(1)
    for member in (0, 2):
        run.stopped(member, ABORTED, 2, held=run.holding(member, 2))
    assert set(run.newest_form().members) == {0, 2, 3}
    run.formed()
    assert len(of(run.trained(3), StartWorker)) == 1
