"""`raysharded run FILE --chaos ...` on a separate Ray, as a user types it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from raysharded.report import load
from tests.paths import ROOT
from tests.ray.test_main_job import undisturbed

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.long]

STEPS = 16
TRAINER = f"""
from pathlib import Path
import raysharded as rs
from tests.ray.test_main_job import trainer as make

def trainer():
    return make(Path("runs"), (1, 3), steps={STEPS}, failure=rs.FailureConfig(task_error_retries=10))
"""


def test_any_run_can_be_given_faults_from_the_command_line_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    (tmp_path / "chaotic.py").write_text(TRAINER)
    (tmp_path / "runs").mkdir()
    command = [sys.executable, "-m", "raysharded", "run", "chaotic.py", "--seed", "3"]
    ran = subprocess.run(
        [*command, "--chaos", "kill:every=5s,raise:every=5s"],
        cwd=tmp_path,
        env={**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)},  # no other Ray of this machine
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    report = load(str(tmp_path / "runs" / "job"))
    injected = {event.reason.split()[0] for event in report.summary.worker_events if event.what == "injected"}
    assert injected  # by then one of them has struck, on any machine
    assert injected <= {"kill", "raise"}
    assert report.ok
    assert report.summary.fingerprint == undisturbed(STEPS).fingerprint
