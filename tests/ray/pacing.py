"""The pace of a run on Ray, so that other events come neither too early nor too late."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan
from tests.training.harness import Tokens

PATIENT_S = 300.0
"""A `hang_timeout_s` for runs whose workers wait."""


class SlowTokens(Tokens):
    """Slow enough for a step to be hit in its middle."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.03)
        return super().__getitem__(index)


def waiting(folder: Path, *moments: tuple[int, int]) -> FaultPlan:
    """For every (step, worker): no worker that was started before that one does the step until it is ready."""
    faults = [
        Fault(worker=WorkerId(other), step=step, phase="forward", kind="wait", until=WorkerId(worker))
        for step, worker in moments
        for other in range(worker)
    ]
    return FaultPlan(faults=tuple(faults), folder=str(folder))


def script_at_a_step(script: str, folder: Path, **environment: str) -> subprocess.Popen[str]:
    """A process that runs the script, in a separate session. It has printed `step`, as for each entry its kind."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(folder)],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert any(line.strip() == "step" for line in process.stdout), process.communicate()
    return process
