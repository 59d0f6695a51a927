"""The report of a run that is on disk."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from raysharded.errors import StorageError
from raysharded.report import load
from tests.report.entries import (
    avoided,
    checkpoint,
    data,
    finished,
    generation,
    lost,
    recovery,
    run_with_a_loss,
    started,
    step,
    write_run,
)


def shown(url: str) -> str:
    out = StringIO()
    Console(file=out, width=140).print(load(url))
    return out.getvalue()


def test_a_run_in_which_nothing_was_lost_is_shown_to_be_so(tmp_path: Path) -> None:
    report = load(write_run(tmp_path, run_with_a_loss()))
    assert report.ok
    assert report.ledger is not None
    assert (report.ledger.steps_checked, report.ledger.samples_lost, report.ledger.samples_repeated) == (6, 0, 0)
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert found["workers_by_step"] == [3, 3, 2, 2, 3, 3]
    assert (found["samples_lost"], found["samples_repeated"], found["fingerprint"]) == (0, 0, "f" * 32)
    assert found["recoveries"][0]["steps_redone"] == 1
    assert found["evaluations"] == {"5": {"loss": 1.5}}


def test_a_node_that_was_avoided_is_shown_with_the_reasons(tmp_path: Path) -> None:
    url = write_run(tmp_path, [started(), *generation(1, [0, 1], 0), step(1), avoided(1), step(2)])
    (node,) = load(url).as_dict()["avoided_nodes"]
    assert (node["host"], node["step"], node["failures"], node["reasons"][-1]) == ("trainer-7", 1, 3, "died again")
    assert "trainer-7 (4f6ad2aa)" in shown(url)
    assert "died again" in shown(url)


def test_a_run_that_was_resumed_is_checked_as_one(tmp_path: Path) -> None:
    first = [started(), data(), *generation(1, [0, 1], 0), step(1), step(2), checkpoint(2), step(3), step(4)]
    second = [started(2), data(), *generation(2, [0], 2, "checkpoint"), *[step(n, 1, 2) for n in range(3, 7)]]
    report = load(write_run(tmp_path, first, [*second, finished(6)]))
    assert report.ok
    assert report.summary.starts == 2
    assert report.ledger is not None
    assert report.ledger.steps_checked == 6
    assert "resumed 1 time" in shown(str(tmp_path))


def test_a_step_that_read_other_samples_is_found(tmp_path: Path) -> None:
    wrong = step(2, digest=["00", "01"], reads=5)
    url = write_run(tmp_path, [started(), data(), *generation(1, [0, 1], 0), step(1), wrong, step(3)])
    report = load(url)
    assert not report.ok
    assert report.ledger is not None
    assert (report.ledger.steps_wrong, report.ledger.samples_repeated) == ((2,), 1)
    assert "steps read wrongly" in shown(url)


def test_a_step_without_a_record_is_found(tmp_path: Path) -> None:
    url = write_run(tmp_path, [started(), data(), *generation(1, [0, 1], 0), step(1), step(3)])
    report = load(url)
    assert report.ledger is not None
    assert (report.ledger.steps_missing, report.ledger.samples_lost) == ((2,), 4)
    assert report.as_dict()["losses"] == [5.0, None, 5.0 / 3]


def test_a_step_that_came_out_differently_is_shown(tmp_path: Path) -> None:
    again = step(1, 1, 2, loss=0.5)
    entries = [started(), data(), *generation(1, [0, 1], 0), step(1), lost(1, 1), *generation(2, [0], 0), again]
    url = write_run(tmp_path, [*entries, recovery(1, 0)])
    assert not load(url).ok
    assert "step 1: another loss when it was computed again" in shown(url)


def test_a_run_that_failed_before_its_first_step_has_a_report(tmp_path: Path) -> None:
    failed = ("failed", {"step": 0, "fingerprint": None, "error": "ClusterError: 0 of at least 2 workers"})
    report = load(write_run(tmp_path, [started(), failed]))
    assert (report.summary.status, report.ledger, report.ok) == ("failed", None, True)
    assert "ClusterError: 0 of at least 2 workers" in shown(report.url)
    json.dumps(report.as_dict(), allow_nan=False)


def test_numbers_that_json_cannot_hold_are_left_out(tmp_path: Path) -> None:
    report = load(write_run(tmp_path, [started(), data(), *generation(1, [0], 0), step(1, loss=float("nan"))]))
    assert report.as_dict()["losses"] == [None]


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"there is no run at {tmp_path}"):
        load(str(tmp_path))
    with pytest.raises(StorageError, match=f"there is no run at {tmp_path}/nothing"):
        load(str(tmp_path / "nothing"))


def test_where_the_time_went_and_the_incidents_are_in_the_text_and_in_the_data(tmp_path: Path) -> None:
    report = load(write_run(tmp_path, run_with_a_loss()))
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert sum(found["times_s"].values()) == pytest.approx(found["elapsed_s"])
    assert found["goodput"] == pytest.approx(found["times_s"]["computing"] / found["elapsed_s"])
    assert [(incident["kind"], incident["step"]) for incident in found["incidents"]] == [
        ("recovery", 3),
        ("reshard", 5),
    ]
    assert [cost["name"] for cost in found["incidents"][0]["costs"]][:2] == ["found", "stopped"]
    assert "Worker 1 was lost in step 3" in shown(report.url)
    assert "from when a loss was noticed until the state was whole again" in shown(report.url)


def test_the_report_loads_neither_torch_nor_ray() -> None:
    import subprocess
    import sys

    code = "import sys, raysharded.report; assert not {'torch', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_steps_whose_entries_were_dropped_are_not_lost_and_the_report_names_them(tmp_path: Path) -> None:
    gap = ("entries_dropped", {"entries": 4, "steps": 3, "first_step": 2, "last_step": 5})
    # step 4 was computed again, and is recorded
    entries = [started(), data(), *generation(1, [0, 1], 0), step(1), gap, step(4), step(6)]
    report = load(write_run(tmp_path, [*entries, ("finished", {"step": 6, "fingerprint": "f" * 32})]))
    assert report.ledger is not None
    assert (report.ledger.samples_lost, report.ledger.steps_missing, report.ledger.steps_checked) == (0, (), 3)
    assert report.summary.entries_dropped == 4
    assert "4 entries of the journal dropped, with those of steps 2 to 5" in shown(str(tmp_path))
    assert "4 not recorded, because storage took none for too long" in shown(str(tmp_path))
