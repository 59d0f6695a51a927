"""A summary as people see it."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

from rich.console import Console, RenderableType

from raysharded.report.history.summary import summarise
from raysharded.report.history.tables import checkpoint_table, recovery_table, run_table, worker_table
from tests.report.entries import (
    checkpoint,
    failed_save,
    failing,
    generation,
    late,
    run_with_a_loss,
    started,
    with_times,
)

SUMMARY = summarise(with_times(run_with_a_loss()))


def text(table: RenderableType) -> str:
    out = StringIO()
    Console(file=out, width=140).print(table)
    return out.getvalue()


def test_the_recovery_table_has_every_phase_and_what_was_computed_again() -> None:
    shown = text(recovery_table(SUMMARY.recoveries))
    for part in ("3 to 2", "memory", "0.05 s", "0.25 s", "0.40 s", "0.70 s", "1 step"):
        assert part in shown
    assert "found" not in shown


def test_the_total_counts_from_the_loss_where_that_is_known() -> None:
    shown = text(recovery_table(SUMMARY.recoveries, found_s=[0.1]))
    assert "found" in shown
    assert "0.10 s" in shown
    assert "0.80 s" in shown


def test_a_name_that_looks_like_markup_is_shown_as_it_is() -> None:
    assert "a[/x][red]b" in text(run_table(replace(SUMMARY, run="a[/x][red]b")))


def test_the_run_table_shows_how_far_how_fast_and_with_how_many() -> None:
    shown = text(run_table(SUMMARY))
    for part in ("tiny", "finished, 6 of 6 steps", "0.833333 in step 6", "2 to 3", "loss 1.5 in step 5", "torch 2.9.0"):
        assert part in shown
    assert "resumed" not in shown
    took = "; the processes of all workers took 2.50 s of CPU time to start, mostly for imports"
    assert f" at work, {SUMMARY.goodput:.1%} of that in steps that count{took}" in " ".join(shown.split())


def test_shard_groups_are_shown_with_the_reason_for_the_newest_mesh() -> None:
    (decided, fields), formed = generation(1, [0, 1, 2, 3], 0)
    grouped = (decided, {**fields, "mesh": "2x2", "why": "2x2 takes 4.2; the next best, 1x4 takes 6"})
    shown = text(run_table(summarise(with_times([started(), grouped, formed]))))
    assert "2x2 since step 0: 2x2 takes 4.2; the next best, 1x4 takes 6" in shown
    assert "shard groups" not in text(run_table(SUMMARY))


def test_an_empty_run_has_a_table_too() -> None:
    assert "unfinished, 0 of 6 steps" in text(run_table(summarise(with_times([started()]))))


def test_messages_are_shown_as_they_are() -> None:
    failed = ("failed", {"step": 0, "fingerprint": None, "error": "TaskError: x[red] is [/] wrong"})
    assert "x[red] is [/] wrong" in text(run_table(summarise(with_times([started(), failed]))))


def test_workers_and_checkpoints_have_a_row_each() -> None:
    rows = [line.split() for line in text(worker_table(SUMMARY)).splitlines()]
    assert ["3", "1", "lost", "the", "process", "died"] in rows
    assert ["5", "3", "joined"] in rows
    assert text(checkpoint_table(SUMMARY.checkpoints)).count("checkpoints/step-") == 2


def test_a_run_without_checkpoints_shows_since_when() -> None:
    entries = [started(), checkpoint(1), late(2, writing=1), failed_save(3), failed_save(4), failing(4, 1, failed=2)]
    shown = text(run_table(summarise(with_times(entries))))
    assert "1 written, 2 failed or passed over, 1 left out" in shown
    assert "no checkpoint since step 1: 2 failures in a row" in shown
    assert "in a row" not in text(run_table(SUMMARY))
