"""The harness's findings from the lines of trained processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.incidents import (
    Struck,
    final_steps,
    goodput,
    incident,
    loss_difference,
    resized,
    samples_amiss,
    steps_done,
)
from benchmarks.lines import Event, Follower, Speaker


def ids(step: int) -> list[int]:
    return list(range(4 * step, 4 * step + 4))


def steps(
    first: int, last: int, begin: float, *, world: int = 2, pid: int = 100, step_s: float = 1.0
) -> Iterator[Event]:
    """The lines of `world` processes about these steps, the first of which is done a step's time after `begin`."""
    for step in range(first, last + 1):
        for rank in range(world):
            yield Event(
                event="step",
                at=begin + (step - first + 1) * step_s + 0.01 * rank,
                pid=pid + rank,
                rank=rank,
                world=world,
                step=step,
                loss=float(step + rank),
                samples=ids(step)[rank::world],
            )


def test_a_step_is_done_when_all_have_done_it_and_done_again_by_the_next_group() -> None:
    before, after = list(steps(1, 3, 0.0)), list(steps(3, 4, 10.0, pid=200))
    halves = [event for event in steps(4, 4, 3.0) if event.rank == 0]  # the other process was killed in step 4
    done = steps_done([*before, *halves, *after])
    assert [step.step for step in done] == [1, 2, 3, 3, 4]
    assert done[-1].at == pytest.approx(12.01)
    assert done[-1].loss == 4.5
    assert final_steps(done)[3].at == pytest.approx(11.01)


def test_an_incident_has_found_stopped_restored_first_and_beyond() -> None:
    events = [
        *steps(1, 5, 0.0),
        Event(event="failed", at=5.8, pid=100),
        *[Event(event="restored", at=at, pid=pid, step=4) for at, pid in ((8.0, 200), (8.5, 201))],
        *steps(5, 8, 9.0, pid=200),
    ]
    struck = Struck(at=5.5, victims=frozenset({101}), survivors=frozenset({100}), ended={100: 6.0})
    found = incident(events, struck)
    assert found.found_s == pytest.approx(0.3)
    assert found.stopped_s == pytest.approx(0.5)
    assert found.restored_s == pytest.approx(3.0)
    assert found.first_step_s == pytest.approx(4.51)
    assert found.beyond_s == pytest.approx(5.51)
    assert found.extra_s == pytest.approx(4.51)
    assert (found.steps_again, found.workers_after) == (1, 2)


def test_a_subject_that_never_gets_beyond_the_broken_step_is_noted() -> None:
    struck = Struck(at=5.5, victims=frozenset({101}), survivors=frozenset({100}))
    found = incident([*steps(1, 5, 0.0), *steps(4, 5, 8.0, pid=200)], struck)
    assert found.first_step_s == pytest.approx(3.51)
    assert (found.beyond_s, found.extra_s, found.steps_again) == (None, None, 2)


def test_samples_that_are_left_out_and_those_that_are_read_twice_are_counted() -> None:
    final = final_steps(steps_done(steps(1, 3, 0.0)))
    assert samples_amiss(final, range(1, 4), ids) == (0, 0)
    final[2] = replace(final[2], samples=(8, 9, 9))
    del final[3]
    assert samples_amiss(final, range(1, 4), ids) == (2 + 4, 1)


def test_the_loss_difference_is_that_of_steps_which_both_have() -> None:
    final = final_steps(steps_done(steps(1, 3, 0.0)))
    assert loss_difference(final, range(1, 4), {1: 1.5, 3: 3.75, 9: 0.0}) == 0.25
    assert loss_difference(final, range(4, 9), {1: 1.5}) is None


def told(*parts: Sequence[Event] | Iterator[Event]) -> list[Event]:
    return [event for part in parts for event in part]


def test_goodput_counts_a_step_once_and_not_what_lies_between() -> None:
    # Ten steps; a fault in the eleventh; steps 9 to 20 from second 15 on: 2 done again, 5 seconds without any.
    done = steps_done(told(steps(1, 10, 0.0, world=1), steps(9, 20, 15.0, world=1, pid=200)))
    found = goodput(done, [10.5], 0.0, 27.0)
    assert (found.steps, found.again) == (20, 2)
    assert found.undisturbed_rate == pytest.approx(1.0)
    assert found.useful_share == pytest.approx(20 / 27)
    assert found.rate_share == pytest.approx(20 / 27)


def test_goodput_of_an_undisturbed_run_is_all_of_its_time() -> None:
    found = goodput(steps_done(steps(1, 20, 0.0, world=1)), [], 1.0, 20.0)
    assert found.useful_share == pytest.approx(1.0)
    assert found.again == 0


def test_lines_of_several_processes_are_followed_as_they_come(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    first, second = Speaker(path, rank=0, world=2), Speaker(path, rank=1, world=2)
    follower = Follower(path)
    assert list(follower.read()) == []
    first.say("step", step=1, loss=2.5, samples=[1, 2])
    with path.open("ab") as file:
        file.write(b'{"event": "st')
    assert [(event.rank, event.step, event.samples) for event in follower.read()] == [(0, 1, [1, 2])]
    with path.open("ab") as file:
        file.write(b'art", "at": 1.0, "pid": 7}\n')
    second.say("failed")
    assert [(event.event, event.rank) for event in follower.read()] == [("start", 0), ("failed", 1)]


def test_a_change_of_size_is_over_when_two_steps_of_the_new_number_are_new() -> None:
    before, after = list(steps(1, 7, 0.0, world=3)), list(steps(5, 9, 20.0, world=4, pid=200))
    at = 5.5  # steps 6 and 7 come between the request and the change, which returns to a checkpoint of step 4
    assert resized(steps_done([*before, *steps(5, 8, 20.0, world=4, pid=200)]), at, 4) is None
    found = resized(steps_done([*before, *after]), at, 4)
    assert found is not None
    assert found.until_s == pytest.approx(21.03 - at)
    assert found.pause_s == pytest.approx(24.03 - 7.02 - 1.0)
    assert found.steps_again == 3


def test_a_change_of_size_without_a_pause_has_none() -> None:
    events = [*steps(1, 5, 0.0, world=4), *steps(6, 8, 5.0, world=3)]
    found = resized(steps_done(events), 5.5, 3)
    assert found is not None
    assert found.pause_s == pytest.approx(0.0, abs=0.02)
    assert found.steps_again == 0
