"""The page's lines about the incidents."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.incidents import Incident
from benchmarks.recovery_lines import LIMIT_S, Planned, compared_lines, incident_lines, planned_lines
from benchmarks.result import NOT_SEEN, Line

GOOD = Incident(
    found_s=0.1,
    stopped_s=0.2,
    restored_s=0.5,
    first_step_s=1.5,
    beyond_s=1.5,
    steps_again=0,
    samples_lost=0,
    samples_repeated=0,
    loss_difference=0.0,
    workers_after=3,
    normal_step_s=1.0,
)
LATE = replace(GOOD, restored_s=None, first_step_s=None, beyond_s=None, workers_after=0)


def of(lines: list[Line], words: str) -> Line:
    [found] = [line for line in lines if line.what.endswith(words)]
    return found


def test_ours_is_held_to_the_goal() -> None:
    lines = incident_lines("SIGKILL", "raysharded", [GOOD, replace(GOOD, beyond_s=1.6)])
    assert of(lines, "less a normal step").values == pytest.approx([0.5, 0.6])
    assert of(lines, "less a normal step").met is True
    assert of(incident_lines("SIGKILL", "raysharded", [replace(GOOD, beyond_s=1.8)]), "less a normal step").met is False
    assert of(incident_lines("SIGKILL", "raysharded", [replace(GOOD, samples_lost=1)]), "samples lost").met is False
    assert all(line.asked is None for line in incident_lines("SIGKILL", "torchft", [GOOD]))


def test_who_was_not_waited_for_any_longer_is_not_left_out() -> None:
    lines = incident_lines("SIGSTOP", "torchrun", [LATE])
    beyond = of(lines, ": progress beyond the broken step")
    assert beyond.values == []
    assert beyond.note.startswith("> 120 s in 1 of 1")
    assert of(lines, "found").values == [0.1]
    assert of(lines, "steps computed again").values == of(lines, "samples lost").values == []  # of none, and not 0


def test_peers_are_compared_round_by_round_and_the_cut_off_with_the_limit() -> None:
    found = {"raysharded": [GOOD, replace(GOOD, beyond_s=2.0)], "torchft": [replace(GOOD, beyond_s=15.0), LATE]}
    [line] = compared_lines("SIGKILL", found)
    assert line.subject == "torchft"
    assert line.ratio == [10.0, LIMIT_S / 2.0]
    assert line.met is True
    assert "not waited for" in line.note
    assert compared_lines("SIGKILL", {"torchft": [GOOD]}) == []


def test_a_planned_change_has_its_rows() -> None:
    change = Planned(until_s=4.0, pause_s=0.25, steps_again=4, samples_lost=0, samples_repeated=0, loss_difference=None)
    lines = planned_lines("4 to 3 workers", "torchrun", [change, replace(change, loss_difference=0.5)])
    assert of(lines, "steps computed again").values == [4.0, 4.0]
    assert of(lines, "undisturbed run").values == [0.5]


def test_a_planned_change_that_was_not_waited_for_any_longer_is_not_left_out() -> None:
    change = Planned(until_s=4.0, pause_s=0.25, steps_again=4, samples_lost=0, samples_repeated=0, loss_difference=None)
    first = of(planned_lines("3 to 4 workers", "Ray Train", [change, None]), "first step of the new number")
    assert (first.values, first.note) == ([4.0], f"> {LIMIT_S:.0f} s in 1 of 2: not waited for any longer")
    never = planned_lines("3 to 4 workers", "Ray Train", [None])
    assert of(never, "first step of the new number").note.startswith(f"> {LIMIT_S:.0f} s in 1 of 1")
    assert of(never, "samples lost").note == NOT_SEEN
