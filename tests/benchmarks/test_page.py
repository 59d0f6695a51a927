"""docs/benchmarks.md, of sample results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.effort import Effort
from benchmarks.page import behind, text_of, write_page
from benchmarks.page_tables import tables
from benchmarks.result import Line, machine, write


def line(what: str, subject: str, unit: str, *values: float, **more: Any) -> Line:
    return Line(benchmark="steps", what=what, subject=subject, unit=unit, values=list(values), **more)


PLAIN = line("step", "torchrun", "s", 1.0, 1.1, 1.2)
EXACT = line(
    "step", "raysharded, exact", "s", 1.2, 1.3, 1.4, ratio=[1.2, 1.18, 1.17], against="times", asked="at most 1.05"
)
FAST = line("step", "raysharded, fast", "s", 1.0, 1.11, 1.2, ratio=[1.0, 1.0, 1.0], asked="at most 1.01")
ABSENT = line("step", "Ray Train", "s", note="it is not installed")


def test_the_page_lists_missed_goals_and_better_peers() -> None:
    said = behind([PLAIN, EXACT, FAST, ABSENT])
    assert said == [
        "- step, raysharded, exact: asked at most 1.05, measured 1.18 times.",
        "- step: torchrun 1.1 s; raysharded, exact 1.3 s (1.18 times).",
        "- Not measured: step, Ray Train: it is not installed",
    ]
    assert behind([PLAIN, FAST]) == ["In none of the figures below."]


def test_of_a_rate_more_is_better() -> None:
    peer, ours = line("rate", "peer", "MB/s", 200.0), line("rate", "raysharded", "MB/s", 100.0)
    assert behind([peer, ours]) == ["- rate: peer 200 MB/s; raysharded 100 MB/s (2.00 times)."]
    assert behind([line("rate", "peer", "MB/s", 50.0), ours]) == ["In none of the figures below."]


def test_a_page_has_every_line_its_machine_and_the_limits_kept_by_hand(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write(tmp_path / "steps.json", [PLAIN, EXACT, FAST, ABSENT], machine(Effort.QUICK))
    write_page(tmp_path, tmp_path / "docs", ["recovery", "steps"])
    page = (tmp_path / "docs" / "benchmarks.md").read_text()
    assert "|  | torchrun | raysharded, exact | raysharded, fast | Ray Train |" in page
    assert "| step, s | 1.1 (1 to 1.2; 3) | 1.3 (1.2 to 1.4; 3)<br>1.18 (1.17 to 1.2; 3) times<br>asked" in page
    assert "at most 1.05: **no**" in page
    assert "| step | raysharded, exact | at most 1.05 | 1.18 times | **no** |" in page
    assert "at most 1.01: yes" in page
    assert "of a quick run" in page
    assert "one Python process" in page  # of limits.txt
    assert machine()["commit"] in page
    assert "![The cost of a step](benchmarks/steps.png)" in page
    assert (tmp_path / "docs" / "benchmarks" / "steps.png").read_bytes().startswith(b"\x89PNG")


def test_a_table_lists_what_a_subject_did_not_do_and_of_one_subject_its_ratio_too() -> None:
    cut_off = line("SIGSTOP: progress", "torchrun", "s", note="> 120 s in 1 of 1: not waited for any longer")
    ours = line("SIGSTOP: progress", "raysharded", "s", 16.0)
    assert "| progress, s | > 120 s in 1 of 1 | 16 |" in tables([cut_off, ours])
    alone = line("stall", "raysharded", "s", 1.0, ratio=[1.3], against="times a copy", asked="at most 1.2")
    assert tables([alone])[-1] == "| stall, s | 1<br>1.3 times a copy<br>asked at most 1.2: **no** |"


@pytest.mark.parametrize(
    ("effort", "warning"),
    [(Effort.QUICK, "of a quick run"), (Effort.HOUR, "of one to three rounds: an order"), (Effort.FULL, None)],
)
def test_only_figures_of_a_full_run_carry_no_warning(effort: Effort, warning: str | None) -> None:
    page = text_of({"steps": [replace(PLAIN, machine=machine(effort))]}, {}, "", "")
    assert ("**Some of these figures" in page) == (warning is not None)
    assert warning is None or warning in page


def test_every_effort_has_its_own() -> None:
    assert [effort.pick(quick=1, hour=2, full=3) for effort in Effort] == [1, 2, 3]


def test_without_results_there_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make bench"):
        write_page(tmp_path, tmp_path, ["steps"])
