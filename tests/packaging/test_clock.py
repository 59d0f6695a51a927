"""`.ci/clock.py` counts the processor time of a command with all that it started, and reports its end."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.paths import ROOT

SCRIPT = ROOT / ".ci" / "clock.py"
BUSY = "import time\nwhile time.process_time() < 0.5: pass"


@pytest.fixture
def clock(tmp_path: Path) -> Path:
    """A copy that writes into a folder of the test."""
    (tmp_path / ".ci").mkdir()
    return Path(shutil.copy(SCRIPT, tmp_path / ".ci"))


def lines(clock: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (clock.parents[1] / "build" / "clock.jsonl").read_text().splitlines()]


def test_a_command_is_counted_with_its_orphans_and_ends_as_it_ended(clock: Path) -> None:
    orphan = f"import os, subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {BUSY!r}])\nos._exit(3)"
    done = subprocess.run([sys.executable, clock, "run", "orphan", sys.executable, "-c", orphan], check=False)
    assert done.returncode == 3
    (line,) = lines(clock)
    assert (line["part"], line["status"], line["processes_left"]) == ("orphan", 3, 0)
    assert line["cpu_s"] >= 0.5
    killed = "import os\nos.kill(os.getpid(), 9)"
    done = subprocess.run([sys.executable, clock, "run", "killed", sys.executable, "-c", killed], check=False)
    assert done.returncode == 128 + 9


def test_the_table_has_the_sum_and_what_needed_a_second_try(clock: Path) -> None:
    file = clock.parents[1] / "build" / "clock.jsonl"
    file.parent.mkdir()
    part = {"cpu_s": 30.4, "wall_s": 20.0, "load": [0.1, 2.0], "status": 0, "processes_left": 0}
    again = {"second_try": "tests/test_a.py::test_b", "seconds": 1.5, "error": "AssertionError: c"}
    file.write_text(
        "".join(f"{json.dumps(line)}\n" for line in ({"part": "one", **part}, {"part": "two", **part}, again))
    )
    shown = subprocess.run([sys.executable, clock, "table"], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in shown.splitlines() if line]
    assert ["all", "61", "40"] in rows
    assert ["tests/test_a.py::test_b", "1.5", "AssertionError:", "c"] in rows
