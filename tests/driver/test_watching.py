"""Members that are stuck, stopped or cut off are found by a deadline that follows the measured step time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, strategies as st

from raysharded.driver.state import step_watch
from raysharded.driver.state.commands import Interrupt, KillWorker, Probe, Record, StartWorker
from raysharded.driver.state.events import Tick, WorkerReply
from raysharded.driver.state.state import Checkpointed, Phase
from raysharded.driver.state.step_watch import StepWatch
from raysharded.ids import WorkerId
from raysharded.protocol.messages import FromMemory, StopReason
from tests.driver.scripted import Run, of, training


def records(run: Run, kind: str) -> list[Record]:
    return [command for command in of(run.commands, Record) if command.kind == kind]


def steady(workers: int, *, seconds: float = 2.0, steps: int = 4, **limits: Any) -> Run:
    """A run whose steps take so many seconds."""
    run = training(workers, max_steps=100, **limits)
    for step in range(run.state.step + 1, run.state.step + steps + 1):
        run.wait(seconds)
        run.trained(step)
    return run


def test_a_member_that_does_not_answer_is_killed_at_the_deadline_and_the_others_are_freed() -> None:
    run = steady(3)
    run.waiting, run.mute = frozenset({0, 2}), frozenset({1})
    assert of(run.wait(9.75), KillWorker) == []
    found = run.wait(0.25)  # five times as long as a step
    assert [command.worker for command in of(found, KillWorker)] == [1]
    assert {command.worker for command in of(found, Interrupt)} == {0, 2}
    assert run.state.phase is Phase.STOPPING
    (stuck,) = records(run, "stuck")
    assert (stuck.fields["worker"], stuck.fields["step"]) == (1, run.state.step + 1)
    assert "stopped or cut off" in str(stuck.fields["reason"])


def test_who_is_in_foreign_code_while_the_others_wait_is_named_with_its_stack() -> None:
    run = steady(3)
    run.waiting = frozenset({0, 1})
    run.wait(12)
    (stuck,) = records(run, "stuck")
    assert stuck.fields["worker"] == 2
    assert (stuck.fields["phase"], stuck.fields["stack"], stuck.fields["node"]) == ("data", "the stack", "node2")
    assert "train.py:7 in read" in str(stuck.fields["reason"])
    assert of(run.commands, KillWorker)[-1].worker == 2


def test_when_all_wait_for_each_other_nobody_is_killed_and_the_generation_is_formed_anew() -> None:
    run = steady(3)
    run.waiting = frozenset({0, 1, 2})
    run.wait(12)
    assert of(run.commands, KillWorker) == []
    assert run.state.phase is Phase.STOPPING
    (stuck,) = records(run, "stuck")
    assert "wait for each other" in str(stuck.fields["reason"])


def test_when_all_wait_the_one_whose_gpu_has_not_begun_the_collective_is_named_and_not_killed() -> None:
    run = steady(4)
    run.waiting = frozenset({0, 1, 2, 3})
    run.in_collective = {0: True, 1: True, 2: False}  # of the last one nothing is known
    run.wait(12)
    assert of(run.commands, KillWorker) == []
    (stuck,) = records(run, "stuck")
    assert stuck.fields["behind"] == [2]
    assert "; 2 had not begun the collective that the GPUs of others are in" in str(stuck.fields["reason"])


@pytest.mark.parametrize("inside", [{}, {0: True, 1: True, 2: True}, {0: False, 1: False, 2: False}])
def test_where_no_gpu_is_in_a_collective_or_all_are_nobody_is_named(inside: dict[int, bool]) -> None:
    run = steady(3)
    run.waiting, run.in_collective = frozenset({0, 1, 2}), inside
    run.wait(12)
    (stuck,) = records(run, "stuck")
    assert "behind" not in stuck.fields


def test_a_member_that_waited_at_the_first_probe_has_moved_since_and_is_not_stuck() -> None:
    run = steady(3)
    run.waiting = frozenset({0, 1, 2})
    run.wait(9.75)
    assert of(run.commands, Probe)
    run.waiting = frozenset({0, 1})  # a link heals just before the deadline: worker 2 computes the next step
    found = run.wait(0.5)
    assert (of(found, KillWorker), of(found, Interrupt), run.state.phase) == ([], [], Phase.TRAINING)
    found = run.wait(11.0)  # where it hangs
    assert [command.worker for command in of(found, KillWorker)] == [2]


def test_when_all_compute_they_are_slow_and_not_stuck() -> None:
    run = steady(3, progress_timeout_s=60.0)
    assert of(run.wait(59), Interrupt) == []
    assert len(of(run.wait(2), Interrupt)) == 3


def test_two_that_are_stopped_are_one_incident() -> None:
    run = steady(4)
    run.waiting, run.mute = frozenset({0, 2}), frozenset({1, 3})
    killed = of(run.wait(11), KillWorker)
    assert [command.worker for command in killed] == [1, 3]
    assert run.state.incident is not None
    assert set(run.state.incident.lost) == {1, 3}


def test_a_driver_that_stood_still_queries_before_it_kills() -> None:
    run = steady(3)
    run.at += 100
    first = run.wait(0.25)
    assert len(of(first, Probe)) == 3
    assert of(first, KillWorker) == []


def test_a_member_that_is_stopped_while_a_generation_forms_does_not_hold_it_up() -> None:
    run = steady(4, forming_patience_s=10.0)
    run.lost(3)
    for worker in (0, 1, 2):
        run.stopped(worker, StopReason.ABORTED, run.state.step)
    assert run.state.phase is Phase.FORMING
    run.formed(0, 2)
    run.mute = frozenset({1})
    run.wait(9)
    assert of(run.commands, KillWorker) == []
    run.wait(2)
    assert [command.worker for command in of(run.commands, KillWorker)] == [1]


def test_a_member_that_is_stopped_while_a_generation_forms_is_waited_for_if_nobody_else_holds_its_shard() -> None:
    run = steady(4, forming_patience_s=10.0, progress_timeout_s=300.0)
    step = run.state.step
    run.lost(3)  # which kept the mirror of 2
    for worker in (0, 1, 2):
        run.stopped(worker, StopReason.ABORTED, step)
    run.formed(0, 1)
    run.mute = frozenset({2})
    run.wait(11)
    assert of(run.commands, KillWorker) == []
    (stuck,) = records(run, "stuck")
    assert (stuck.fields["worker"], run.state.phase) == (2, Phase.STOPPING)
    assert "nobody else holds" in str(stuck.fields["reason"])
    run.wait(100)  # it is in the journal once
    assert records(run, "stuck") == [stuck]
    held = run.state.holdings
    for worker in (0, 1, 2):  # it wakes up
        run.stopped(worker, StopReason.ABORTED, step, held=held[WorkerId(worker)].held)
    assert isinstance(run.newest_form().source, FromMemory)
    assert run.newest_form().source.step == step


@pytest.mark.parametrize("begins", ["start", "checkpoint"])
def test_who_holds_nothing_is_not_waited_for(begins: str) -> None:
    checkpoint = Checkpointed(step=2, prefix="before") if begins == "checkpoint" else None
    run = Run(checkpoint=checkpoint, max_workers=3, forming_patience_s=10.0, stopping_patience_s=3.0)
    run.ready(0, 1, 2)
    run.mute = frozenset({1, 2})
    run.lost(0)
    run.wait(4)
    assert [command.worker for command in of(run.commands, KillWorker)] == [1, 2]


def test_two_that_are_stopped_and_hold_each_others_shard_are_waited_for() -> None:
    run = steady(4, progress_timeout_s=300.0)
    step = run.state.step
    run.waiting, run.mute = frozenset({0, 3}), frozenset({1, 2})
    assert of(run.wait(11), KillWorker) == []
    assert [record.fields["worker"] for record in records(run, "stuck")] == [1, 2]
    assert run.state.phase is Phase.STOPPING
    for worker in (0, 1, 2, 3):
        run.stopped(worker, StopReason.ABORTED, step)
    assert run.newest_form().source.step == step
    assert len(run.state.members) == 4


def test_nobody_is_waited_for_when_a_shard_is_lost_anyway() -> None:
    run = steady(5, stopping_patience_s=3.0)
    run.lost(0)
    run.lost(1)  # the keeper of its mirror
    run.stopped(2, StopReason.ABORTED, run.state.step)
    run.stopped(4, StopReason.ABORTED, run.state.step)
    run.mute = frozenset({3})
    run.wait(4)
    assert [command.worker for command in of(run.commands, KillWorker)] == [3]


def test_the_only_worker_is_slow_and_not_stuck_and_when_it_is_silent_it_is_waited_for() -> None:
    run = steady(1, min_workers=1, progress_timeout_s=300.0)
    assert of(run.wait(100), Interrupt) == []
    run.mute = frozenset({0})
    run.wait(20)
    assert run.state.phase is Phase.STOPPING
    assert of(run.commands, KillWorker) == []
    run.wait(300)
    assert [command.worker for command in of(run.commands, KillWorker)] == [0]


def test_a_member_that_is_stopped_after_the_last_step_is_abandoned_at_the_deadline_of_a_step() -> None:
    run = steady(3)
    for step in range(run.state.step + 1, 101):
        run.wait(2)
        run.trained(step)
    run.waiting, run.mute = frozenset({0, 2}), frozenset({1})
    found = run.wait(11)
    assert [command.worker for command in of(found, KillWorker)] == [1]


def test_a_member_that_is_stopped_while_the_last_checkpoint_is_written_is_abandoned_and_it_is_written_again() -> None:
    run = training(3, max_steps=2, forming_patience_s=10.0)
    run.trained(1)
    run.trained(2, saves=True)
    for worker in (0, 1, 2):
        run.stopped(worker, StopReason.FINISHED, 2)
    assert run.state.phase is Phase.CLOSING
    run.saved(0, 2)
    run.wait(60)  # storage may be slow: they answer
    assert of(run.commands, KillWorker) == []
    run.mute = frozenset({1})
    run.saved(2, 2)
    run.wait(11)
    assert [command.worker for command in of(run.commands, KillWorker)] == [1]
    (stuck,) = records(run, "stuck")
    assert stuck.fields["step"] == 2
    assert set(run.newest_form().members) == {0, 2}
    assert run.newest_form().source.step == 2


def test_two_that_are_stopped_while_the_last_checkpoint_is_written_are_one_recovery() -> None:
    run = training(4, max_steps=2, forming_patience_s=10.0)
    run.trained(1)
    run.trained(2, saves=True)
    for worker in (0, 1, 2, 3):
        run.stopped(worker, StopReason.FINISHED, 2)
    run.mute = frozenset({0, 2})
    run.wait(11)
    assert [command.worker for command in of(run.commands, KillWorker)] == [0, 2]
    assert set(run.newest_form().members) == {1, 3}
    assert run.state.generation == 2


def test_a_driver_that_stood_still_after_a_query_receives_the_answers_before_it_kills() -> None:
    run = steady(3)
    run.waiting, run.mute = frozenset({0, 2}), frozenset({1})
    run.wait(5)  # all are probed; it then stands still
    run.at += 60
    assert of(run.hear(Tick()), KillWorker) == []
    run.hear(WorkerReply(worker=WorkerId(1), message=run.seen(WorkerId(1))))
    assert of(run.wait(0.5), KillWorker) == []


def test_an_answer_that_also_makes_a_straggler_known_counts_as_an_answer() -> None:
    run = steady(3)

    def answer() -> None:
        for worker in run.state.members:
            seen = replace(run.seen(worker), busy={"forward": 2.0 if worker == 0 else 1.0}, num_steps=20)
            run.hear(WorkerReply(worker=worker, message=seen))

    for looks in range(3):
        run.at += 10
        assert len(of(run.trained(run.state.step + 1), Probe)) == 3
        if looks < 2:
            answer()
    run.mute = frozenset({0, 1, 2})
    assert len(of(run.wait(25.25), Probe)) == 3  # at half of the deadline, before they have answered
    answer()
    assert [record.fields["worker"] for record in records(run, "straggler")] == [0]
    assert run.state.watch.seen.keys() == {0, 1, 2}


def test_a_query_because_of_a_hang_is_no_further_sample_of_how_fast_they_are() -> None:
    run = steady(3)
    for _ in range(4):
        for worker in run.state.members:
            seen = replace(run.seen(worker), busy={"forward": 2.0 if worker == 0 else 1.0}, num_steps=20)
            run.hear(WorkerReply(worker=worker, message=seen))
    assert records(run, "straggler") == []


def test_who_is_evicted_again_and_again_on_one_node_is_replaced_elsewhere() -> None:
    run = Run(max_workers=3, max_steps=1000, evict_slower_than=1.5, max_node_failures=1)
    run.ready(0, 1, 2)
    run.formed()
    for _ in range(3):
        run.at += 10
        for asked in of(run.trained(run.state.step + 1), Probe):
            seen = replace(run.seen(asked.worker), busy={"forward": 2.0 if asked.worker == 1 else 1.0}, num_steps=20)
            run.hear(WorkerReply(worker=asked.worker, message=seen))
    assert 1 in run.state.leaving
    for worker in run.state.members:
        run.stopped(worker, StopReason.BOUNDARY, run.state.step)
    run.formed()
    run.trained(run.state.step + 1)
    assert [start.avoid for start in of(run.commands, StartWorker)][-1] == ("node1",)


@pytest.mark.parametrize("complete", [True, False], ids=["the others hold all", "it may hold what nobody else has"])
def test_a_member_that_is_stopped_while_the_others_are_freed_is_abandoned_if_they_hold_all(complete: bool) -> None:
    run = steady(4, stopping_patience_s=3.0)
    run.lost(0 if complete else 1)
    for worker in (1, 3) if complete else (0, 3):  # each holds its own and the mirror of the one before
        run.stopped(worker, StopReason.ABORTED, run.state.step)
    run.mute = frozenset({2})
    run.wait(4)
    assert [command.worker for command in of(run.commands, KillWorker)] == ([2] if complete else [])


def test_who_was_queried_as_a_phase_ended_is_queried_again_in_the_next_one() -> None:
    run = steady(4, stopping_patience_s=20.5, stop_timeout_s=10.0, forming_patience_s=10.0)
    for worker in (0, 1, 3):
        run.stopped(worker, StopReason.ABORTED, run.state.step)
    run.wait(10.25)  # worker 2, which is silent, is probed, and abandoned: the next generation forms
    assert run.state.phase is Phase.FORMING
    run.mute = frozenset({0})
    run.wait(10.25)
    assert [command.worker for command in of(run.commands, KillWorker)] == [2, 0]  # not 1 and 3, which answer


def test_the_first_step_that_compiles_may_take_long() -> None:
    run = steady(2, compiles=True, progress_timeout_s=100.0)
    run.lost(1)
    run.stopped(0, StopReason.ABORTED, run.state.step)
    run.ready(2)
    run.formed()
    run.waiting, run.mute = frozenset({0}), frozenset({2})
    run.wait(90)
    assert of(run.commands, KillWorker) == []


@given(st.lists(st.floats(0.001, 1000), max_size=80), st.floats(0.1, 100), st.floats(100, 1000))
def test_the_deadline_follows_the_newest_steps_within_its_bounds(
    durations: list[float], shortest: float, longest: float
) -> None:
    watch = StepWatch()
    for seconds in durations:
        watch = step_watch.measured(watch, seconds, first=False)
    found = step_watch.deadline_s(watch, shortest_s=shortest, longest_s=longest, first=False)
    assert shortest <= found <= longest
    if durations:
        assert found == longest or found >= 5 * max(durations[-8:])
        assert found <= max(shortest, 5 * max(durations[-64:]))
        assert found <= step_watch.deadline_s(watch, shortest_s=shortest, longest_s=longest, first=True)
    else:
        assert found == longest


def after(*durations: float) -> float:
    """The deadline after steps of these durations."""
    watch = StepWatch()
    for seconds in durations:
        watch = step_watch.measured(watch, seconds, first=False)
    return step_watch.deadline_s(watch, shortest_s=0.1, longest_s=300.0, first=False)


@given(st.lists(st.floats(3.0, 40.0), min_size=1, max_size=30), st.integers(0, 30))
def test_a_deadline_that_slow_steps_stretched_comes_back_within_8_steps(slow: list[float], before: int) -> None:
    fast = [1.0] * before
    assert after(*fast, *slow) >= 5 * max(slow[-8:])
    assert after(*fast, *slow, *[1.0] * 7) >= 5 * slow[-1]
    assert after(*fast, *slow, *[1.0] * 8) == 5.0
    assert after(*fast, *slow, 1.0, 1.0, *slow, *[1.0] * 8) == 5.0, "slow again at once: one stretch"


@pytest.mark.parametrize("every", [9, 16, 20, 31])
def test_long_steps_that_recur_keep_their_deadline_between_them(every: int) -> None:
    steps = [10.0 if step % every == 0 else 1.0 for step in range(1, 4 * every)]
    assert {after(*steps[: 2 * every + more]) for more in range(every)} == {50.0}


def test_a_slow_first_step_of_a_generation_does_not_lengthen_the_deadline_of_those_that_follow() -> None:
    run = steady(3, seconds=2.0)
    run.lost(1)
    for worker in (0, 2):
        run.stopped(worker, StopReason.ABORTED, run.state.step, held=run.holding(worker, run.state.step))
    run.formed()
    run.wait(4.0)
    run.trained(run.state.step + 1)
    assert step_watch.deadline_s(run.state.watch, shortest_s=5.0, longest_s=300.0, first=False) == 10.0


def test_a_member_that_hangs_after_a_slow_stretch_is_found_as_fast_as_before_it() -> None:
    run = steady(3, seconds=40.0)
    assert step_watch.deadline_s(run.state.watch, shortest_s=5.0, longest_s=300.0, first=False) == 200.0
    for _ in range(8):
        run.wait(1.0)
        run.trained(run.state.step + 1)
    assert step_watch.deadline_s(run.state.watch, shortest_s=5.0, longest_s=300.0, first=False) == 5.0
    run.mute = frozenset({1})
    run.wait(60.0)
    assert [command.worker for command in of(run.commands, KillWorker)] == [1]


def test_nobody_is_blamed_for_an_evaluation() -> None:
    run = steady(2)
    run.waiting = frozenset({1})
    seen = {worker: replace(run.seen(worker), phase="evaluate") for worker in run.state.members}
    assert step_watch.judge(StepWatch(seen=seen)) == step_watch.HangVerdict()
