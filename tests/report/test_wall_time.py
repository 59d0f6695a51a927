"""The wall time of a run by its uses: every microsecond of it, once."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from raysharded.report.history.run_summary import RunSummary
from raysharded.report.history.summary import summarise
from raysharded.report.history.tables import run_table, time_table
from raysharded.report.history.wall_time import PARTS
from tests.report.entries import (
    Entry,
    checkpoint,
    data,
    finished,
    generation,
    lost,
    recovery,
    run_with_a_loss,
    started,
    step,
    with_times,
)
from tests.report.test_tables import text

JOURNALS = Path(__file__).parent / "journals"
"""Journals of runs that took place: a kill, a stop and a lost message; a run that a second driver took over."""


def told(at: Iterable[tuple[float, Entry]]) -> RunSummary:
    """The summary of entries, each with the second it was made in."""
    return summarise([{"kind": kind, "at": 1e9 + seconds, **fields} for seconds, (kind, fields) in at])


def spent(summary: RunSummary) -> dict[str, float]:
    """The parts that took any time, in seconds."""
    return {part: summary.times.seconds(part) for part in PARTS if summary.times.parts[part]}


def made(number: int, members: list[int], after: int, decided: float, formed: float) -> list[tuple[float, Entry]]:
    first, second = generation(number, members, after)
    return [(decided, first), (formed, second)]


def check(summary: RunSummary, entries: Sequence[Mapping[str, Any]]) -> None:
    """The parts are a partition of the time from the first entry to the newest."""
    counted = list(entries)
    while counted[-1]["kind"] == "checkpoint_skipped":  # found before the driver records its start
        counted.pop()
    times, pieces = summary.times, summary.track.pieces
    assert times.total == round((max(entry["at"] for entry in counted) - counted[0]["at"]) * 1e6)
    assert all(part >= 0 for part in times.parts.values())
    assert sum(piece.end - piece.begin for piece in pieces) == times.total
    assert all(a.end == b.begin and a.part != b.part for a, b in pairwise(pieces))
    assert list(summary.track.ends) == sorted(summary.track.ends)
    assert all(begin <= end for begin, end in zip(summary.track.begins, summary.track.ends, strict=True))


KINDS: list[Entry] = [
    started(),
    started(2),
    data(),
    *generation(1, [0, 1], 0),
    *generation(2, [0], 1),
    *generation(3, [0, 1, 2], 2),
    *[step(number, 2, gen) for gen in (1, 2, 3) for number in (1, 2, 3)],
    step(6, 2, 3, seconds={"compute": 5.0, "save": 3.0}),
    lost(1, 2),
    lost(9, 2),
    recovery(1, 1, 1),
    recovery(1, 2, total_s=1e4),
    checkpoint(2),
    ("waiting", {"ready": 0, "needed": 2, "missing": ""}),
    ("pause", {"step": 2}),
    ("paused", {"step": 2, "workers": [0]}),
    ("resume", {"step": 2, "seconds": 5.0}),
    ("stuck", {"step": 1, "reason": "nobody answers"}),
    ("checkpoint_skipped", {"step": 1, "reason": "damaged"}),
    finished(6),
    ("stopped", {"step": 2, "fingerprint": None}),
    ("failed", {"step": 2, "fingerprint": None, "error": "no"}),
]


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.floats(-3, 60)), max_size=40))
def test_in_every_journal_every_moment_is_spent_once(story: list[tuple[Entry, float]]) -> None:
    now, entries = 1e9, [{"kind": started()[0], "at": 1e9, **started()[1]}]
    formed = False
    for (kind, fields), seconds in story:
        formed = formed or kind == "generation"
        if kind == "formed" and not formed:
            continue  # no driver records that first
        now += seconds  # also back: clocks are set, and those of two machines differ
        entries.append({"kind": kind, "at": now, **fields})
    check(summarise(entries), entries)


@pytest.mark.parametrize("name", ["losses", "two_drivers"])
def test_the_time_of_a_run_that_took_place_adds_up(name: str) -> None:
    entries = [json.loads(line) for line in (JOURNALS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]
    summary = summarise(entries)
    check(summary, entries)
    recoveries = sum(found.abort_s + found.wait_s + found.reshard_s for found in summary.recoveries)
    assert summary.times.seconds("recovering") == pytest.approx(recoveries, abs=0.02)
    steps = sum(record.total_s for record in summary.steps)
    assert summary.times.seconds("computing") == pytest.approx(steps, rel=0.2)
    assert summary.times.seconds("no driver") == pytest.approx(0.18 if name == "two_drivers" else 0, abs=0.01)


def test_a_loss_is_broken_off_work_until_it_is_found_and_then_recovery() -> None:
    fields: dict[str, Any] = {"abort_s": 1.0, "reshard_s": 3.0, "first_step_s": 10.0, "total_s": 14.0}
    summary = told(
        [
            (0, started()),
            *made(1, [0, 1], 0, 20, 25),
            (35, step(1)),
            (45, step(2)),
            (52, lost(1, 2)),
            *made(2, [0], 2, 52.5, 55),
            (65, step(3, 1, 2)),
            (65, recovery(1, 2, 0, **fields)),  # found at 51
            (75, step(4, 1, 2)),
        ]
    )
    assert spent(summary) == {"computing": 40.0, "lost": 6.0, "recovering": 4.0, "starting": 25.0}
    assert summary.goodput == 40 / 75


def test_steps_that_are_computed_again_were_lost() -> None:
    summary = told(
        [
            (0, started()),
            *made(1, [0, 1], 0, 1, 2),
            *[(2 + 10 * number, step(number)) for number in (1, 2, 3)],
            *made(2, [0], 1, 36, 37),  # with no recorded loss before: a change of members
            (47, step(2, 1, 2)),
        ]
    )
    assert spent(summary) == {"starting": 2.0, "computing": 20.0, "lost": 20.0, "resharding": 5.0}
    assert list(summary.track.counts) == [1, 0, 0, 1]


def test_who_joins_between_two_steps_costs_resharding_alone() -> None:
    entries = [
        (0.0, started()),
        *made(1, [0], 0, 1, 2),
        (12.0, step(1, 1)),
        *made(2, [0, 1], 1, 12.5, 13),
        (23.0, step(2, 2, 2)),
    ]
    assert spent(told(entries)) == {"starting": 2.0, "computing": 20.0, "resharding": 1.0}


def test_a_loss_while_a_change_of_members_is_under_way_is_recovery_from_then_on() -> None:
    entries = [(0.0, started()), *made(1, [0], 0, 1, 2), (12.0, step(1, 1)), (12.5, generation(2, [0, 1], 1)[0])]
    entries += [(14.0, lost(1, 1)), *made(3, [0], 1, 15, 16), (26.0, step(2, 1, 3))]
    assert spent(told(entries)) == {"starting": 2.0, "computing": 20.0, "resharding": 2.0, "recovering": 2.0}


def test_a_pause_is_neither_lost_time_nor_work_and_a_loss_in_it_costs_only_the_way_back() -> None:
    entries = [(0.0, started()), *made(1, [0, 1], 0, 1, 2), (12.0, step(1)), (13.0, ("pause", {"step": 1}))]
    entries += [(22.0, step(2)), (22.5, ("paused", {"step": 2, "workers": [0, 1]})), (50.0, lost(1, 2))]
    entries += [*made(2, [0], 2, 51, 52), (100.0, ("resume", {"step": 2, "seconds": 77.5})), *made(3, [0], 2, 101, 103)]
    entries += [(113.0, step(3, 1, 3)), (113.0, recovery(1, 2, total_s=13.0)), (120.0, ("pause", {"step": 3}))]
    entries += [(121.0, ("resume", {"step": 3, "seconds": 0.0})), (123.0, step(4, 1, 3))]
    summary = told(entries)
    assert spent(summary) == {"starting": 2.0, "computing": 40.0, "paused": 78.0, "recovering": 3.0}
    assert summary.times.goodput == pytest.approx(40 / 45)
    assert [incident.kind for incident in summary.incidents] == ["worker", "recovery"]
    assert summary.incidents[1].cost_s < 1.0


def test_a_step_that_waits_for_a_checkpoint_and_the_last_checkpoint_are_checkpointing() -> None:
    late = step(1, seconds={"compute": 7.0, "save": 3.0})
    entries = [
        (0.0, started()),
        *made(1, [0, 1], 0, 1, 2),
        (12.0, late),
        (22.0, step(2)),
        (25.0, checkpoint(2)),
        (26.0, finished(2)),
    ]
    assert spent(told(entries)) == {"starting": 2.0, "computing": 17.0, "checkpointing": 7.0}


def test_steps_that_are_recorded_together_are_distinguished_by_how_long_they_took() -> None:
    entries = [
        (0.0, started()),
        *made(1, [0, 1], 0, 1, 2),
        *[(32.0, step(number, seconds={"all": 10.0})) for number in (1, 2, 3)],
    ]
    summary = told(entries)
    assert list(summary.track.ends) == [12_000_000, 22_000_000, 32_000_000]
    assert spent(summary) == {"starting": 2.0, "computing": 30.0}


def test_too_few_workers_is_waiting_from_when_the_run_reports_it_until_it_continues() -> None:
    waiting = ("waiting", {"ready": 0, "needed": 1, "missing": "no GPU"})
    entries = [
        (0.0, started()),
        (10.0, waiting),
        *made(1, [0], 0, 30, 32),
        (42.0, step(1, 1)),
        (43.0, lost(0, 1)),
        (50.0, waiting),
    ]
    entries += [*made(2, [1], 0, 70, 71), (81.0, step(1, 1, 2))]
    found = spent(told(entries))
    assert found == {"starting": 12.0, "waiting": 40.0, "lost": 11.0, "recovering": 8.0, "computing": 10.0}


def test_a_slow_start_is_a_start() -> None:
    slow = ("waiting", {"ready": 0, "needed": 1, "missing": ""})
    entries = [(0.0, started()), (30.0, slow), *made(1, [0], 0, 40, 42), (52.0, step(1, 1)), (53.0, lost(0, 1))]
    entries += [(90.0, slow), *made(2, [1], 0, 100, 101), (111.0, step(1, 1, 2))]
    assert spent(told(entries)) == {
        "starting": 42.0,
        "lost": 11.0,
        "recovering": 38.0,
        "waiting": 10.0,
        "computing": 10.0,
    }


def test_between_two_drivers_there_is_none_and_what_the_second_repeats_was_lost() -> None:
    first = [(0.0, started()), *made(1, [0], 0, 1, 2), (12.0, step(1, 1)), (22.0, step(2, 1)), (24.0, checkpoint(1))]
    second = [(124.0, started(1)), *made(2, [0], 1, 130, 134), (144.0, step(2, 1, 2))]
    summary = told([*first, *second])
    assert spent(summary) == {"computing": 20.0, "lost": 12.0, "starting": 12.0, "no driver": 100.0}
    assert summary.elapsed_s == 44.0
    at_work = "44 s at work, 45.5% of that in steps that count"
    whole = "2 min 24 s with the time without a driver, 13.9% of that in steps that count"
    assert f" {at_work}; {whole} " in " ".join([*text(run_table(summary)).split(), ""])
    shares = {
        row.split()[0]: row.split("%")[0].split()[-1]
        for row in text(time_table(summary.times)).splitlines()
        if "%" in row
    }
    assert (shares["computing"], shares["all"]) == ("13.9", "100")


def test_a_run_in_progress_has_a_step_that_is_not_done_yet() -> None:
    entries = [(0.0, started()), *made(1, [0], 0, 1, 2), (12.0, step(1, 1)), (17.0, checkpoint(1))]
    assert spent(told(entries)) == {"starting": 2.0, "computing": 10.0, "lost": 5.0}


def test_a_driver_with_a_slower_clock_takes_no_time_back() -> None:
    entries = [
        (0.0, started()),
        *made(1, [0], 0, 1, 2),
        (12.0, step(1, 1)),
        (9.0, started(1)),
        *made(2, [0], 1, 10, 11),
    ]
    found = told([*entries, (21.0, step(2, 1, 2)), (31.0, step(3, 1, 2))])
    assert spent(found) == {"starting": 2.0, "computing": 29.0}


def test_the_example_of_the_other_tests_in_full() -> None:
    summary = summarise(with_times(run_with_a_loss()))
    assert sum(spent(summary).values()) == summary.elapsed_s == 2.0 * (len(run_with_a_loss()) - 1)


def test_nothing_took_no_time() -> None:
    assert summarise([]).times.total == 0
