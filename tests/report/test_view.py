"""The view of a run that is watched from another process."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from raysharded.report.history.summary import summarise
from raysharded.report.live.screen import screen, sparkline
from raysharded.report.live.tracker import Curve, Watched
from raysharded.report.live.view import lines, view
from tests.report.entries import Entry, data, finished, generation, run_with_a_loss, started, step, with_times
from tests.report.standing import Stands

JOURNALS = Path(__file__).parent / "journals"


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (JOURNALS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def seen(entries: Sequence[dict[str, Any]], standing: Stands | None, width: int = 140) -> str:
    """The screen after these entries, a minute after the newest."""
    watched, out = Watched(0), StringIO()
    for entry in entries:
        watched.take(entry["kind"], entry, entry["at"])
    Console(file=out, width=width).print(screen(watched, standing, entries[-1]["at"] + 60))
    return out.getvalue()


def test_the_screen_has_all_that_people_look_for() -> None:
    asked = [
        ("resize", {"step": 4, "workers": 2, "who": "asked"}),
        ("some_refused", {}),
        ("pause_refused", {"step": 5, "reason": "the run is ending"}),
    ]
    found = seen(with_times([*run_with_a_loss(), *asked]), Stands())
    for text in (
        "tiny, at /runs/tiny",
        "training, 1 x 2",
        "step 6/6  loss 0.8333",
        "█▄▂▂▁▁",
        "trainer-2",
        "4713",
        "forward",
        "0.75 s",
        "worker 1 lost: the process died",
        "recovered in 0.70 s, 3 to 2 workers",
        "step 5: worker 3 joined, 3 workers",
        "step 6: checkpoint committed",
    ):
        assert text in found, text
    assert ["resize" in line or "pause" in line for line in found.splitlines()[-2:]] == [True, True]
    joined = next(line for line in found.splitlines() if "worker 3 joined" in line)
    assert joined.rstrip().endswith("4.00 s")  # from the last step before it until its workers had met
    assert next(line for line in found.splitlines() if "recovered" in line).rstrip().endswith("0.70 s")


def test_neither_a_slow_start_nor_a_pause_is_an_incident() -> None:
    short = ("waiting", {"ready": 0, "needed": 1, "missing": "Each worker needs 1 GPU."})
    slow = ("waiting", {"ready": 0, "needed": 1, "missing": ""})
    stop: list[Entry] = [
        ("pause", {"step": 1}),
        ("paused", {"step": 1, "workers": [0]}),
        ("resume", {"step": 1, "seconds": 5.0}),
    ]
    watched = Watched(0)
    for entry in with_times([started(), slow, short, *generation(1, [0], 0), step(1), *stop, step(2)]):
        watched.take(entry["kind"], entry, entry["at"])
    assert [one.text for one in watched.incidents] == ["0 workers ready, at least 1 needed. Each worker needs 1 GPU."]
    assert [one.text.split(":")[1][:7] for one in watched.asked] == [" a paus", " paused", " goes o"]


@pytest.mark.parametrize("name", ["losses", "two_drivers"])
def test_a_run_that_took_place_is_shown_as_its_report_has_it(name: str) -> None:
    entries = recorded(name)
    found, summary = seen(entries, None), summarise(entries)
    assert f"step {summary.last_step}" in found
    assert f"loss {summary.steps[-1].loss:.4f}" in found
    if summary.recoveries:
        newest = summary.recoveries[-1]
        assert f"step {newest.resumed_after_step + 1}: recovered in {newest.total_s:.2f} s" in found
    assert summary.committed[-1].fingerprint in found


def test_a_view_may_begin_at_any_entry() -> None:
    entries = recorded("two_drivers")
    for first in range(len(entries)):
        assert seen(entries[first:], Stands())


def test_names_and_errors_give_no_orders_to_the_terminal() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J[red]x[/red]\x9b31m"
    lost = ("worker_lost", {"worker": 1, "step": 1, "reason": hostile})
    standing = Stands(name=hostile, url=hostile, nodes={0: hostile}, driver=hostile, doing={0: hostile})
    found = seen(with_times([started(), data(), *generation(1, [0, 1], 0), step(1), lost]), standing)
    assert not {"\x1b", "\x07", "\x9b"} & set(found)
    assert "[red]x[/red]" in found


def test_of_very_many_workers_the_slowest_are_shown_on_a_small_terminal() -> None:
    many = tuple(range(1000))
    busy = {worker: 1.0 + (worker == 617) for worker in many}
    standing = Stands(workers=many, nodes=dict.fromkeys(many, "n" * 80), pids={}, doing={}, busy_s=busy)
    found = seen(with_times([started(), *generation(1, [0], 0), step(1)]), standing, width=60)
    assert "1000 workers, the 12 slowest" in found
    assert " 617 " in found
    assert max(map(len, found.splitlines())) <= 60


@pytest.mark.parametrize("number", [1, 7, 255, 256, 257, 10_000])
def test_a_curve_keeps_its_shape_in_few_points(number: int) -> None:
    curve = Curve(256)
    for index in range(number):
        curve.add(float(index))
    curve.add(math.nan)
    assert min(number, 127) <= len(curve.points) <= 256
    assert curve.points == sorted(curve.points)
    assert len(sparkline(curve.points, 60)) == min(60, len(curve.points))
    assert sparkline(curve.points, 60)[0] == "▁"


def test_the_lines_show_the_newest_of_the_past_and_then_everything() -> None:
    entries = with_times(run_with_a_loss())
    told = list(lines([entries[:15], [], entries[15:]], 6, past=True))
    assert len([line for line in told if "joined" in line or "finished, f" in line]) == 2
    assert told[-1].startswith("2023-11-14 22:15:36 UTC  step 6/6  loss 0.8333  ")
    past = [*with_times([("worker_lost", {"worker": n, "step": 1, "reason": "x"}) for n in range(20)])]
    assert [line.split("worker ")[1] for line in lines([past], 6, past=True)] == [f"{n} lost: x" for n in range(15, 20)]
    assert len(list(lines([past], 6))) == 20


def test_the_view_is_redrawn_in_place_and_requests_the_status_now_and_then() -> None:
    out, clock, asked = StringIO(), [0.0], []

    def batches() -> Iterator[list[dict[str, Any]]]:
        for entry in with_times([*run_with_a_loss(), finished(6)]):
            clock[0] += 0.5
            yield [entry]
            yield []

    def status() -> Stands:
        asked.append(clock[0])
        return replace(Stands(), phase="over" if len(asked) > 10 else "training")

    view(batches(), status, Console(file=out, force_terminal=True, width=100, height=50), now=lambda: clock[0])
    assert "\x1b[2K" in out.getvalue()  # erases what was drawn before
    assert 10 <= len(asked) <= 15  # in ten seconds
    assert "over" in out.getvalue().split("\x1b[2K")[-1] or "over" in out.getvalue()[-6000:]
    assert out.getvalue().endswith("\x1b[?25h")  # the cursor is back
