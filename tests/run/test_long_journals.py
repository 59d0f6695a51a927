"""Runs of weeks: a new driver's memory, and the report, grow with what happened and not with the steps."""

from __future__ import annotations

import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from raysharded.checkpoint import SigningKey, Storage
from raysharded.journal.log import read
from raysharded.journal.verified import JournalReader
from raysharded.report import load
from tests.paths import ROOT
from tests.run import long_journal
from tests.run.long_journal import KEY


def made(folder: Path, steps: int, losses: int) -> Storage:
    return long_journal.make(str(folder), steps=steps, losses=losses)


@pytest.mark.procs
def test_a_report_of_many_losses_is_a_page_with_each_loss_once_and_a_new_driver_keeps_what_happened(
    tmp_path: Path,
) -> None:
    steps, losses = 1_000, 40
    storage = made(tmp_path, steps, losses)
    report, out = load(storage.url), StringIO()
    assert report.ok
    assert report.summary.last_step == steps
    assert len(report.summary.recoveries) == losses
    assert [one.kind for one in report.summary.incidents if "lost" in one.text] == ["recovery"] * losses
    Console(file=out, width=160).print(report)
    assert 0 < out.getvalue().count("\n") < 160
    assert f"and {len(report.summary.incidents) - 25} more, which cost less" in out.getvalue()

    kept = JournalReader(storage, None).read().entries
    of_steps = [entry for entry in kept if entry["kind"] == "step"]
    others = [entry for entry in read(storage) if entry["kind"] != "step"]
    assert [entry for entry in kept if entry["kind"] != "step"] == others
    assert of_steps[-1] == {"kind": "step", "step": steps}
    assert len(of_steps) <= len(others)


@pytest.mark.long
@pytest.mark.parametrize("signed", [False, True])
def test_a_driver_resumes_a_run_of_a_million_steps_within_seconds_of_cpu_and_400_mb(
    tmp_path: Path, signed: bool
) -> None:
    key = SigningKey(KEY.encode()) if signed else None
    long_journal.make(str(tmp_path), steps=1_000_000, losses=1_000, key=key)
    command = [
        sys.executable,
        "-m",
        "tests.run.long_journal",
        "resume",
        str(tmp_path),
        *(["--signed"] if signed else []),
    ]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=True)
    cpu_s, _, peak = ran.stdout.partition(" s of CPU to its first step, at most ")
    assert float(cpu_s.rpartition(" ")[2]) <= (7.0 if signed else 5.0), ran.stdout  # two digests of 600 MB more
    assert float(peak.split()[0]) <= 400.0, ran.stdout
