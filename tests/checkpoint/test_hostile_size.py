"""A manifest or a box index with a million entries is read or refused in seconds, and in 2 GiB of memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.huge import CASES
from tests.paths import ROOT

VALID = ("a tree as large as may be",)
TRIED = ("numbers in the metadata",)
"""Cases of every test run; the others run before a release. Smaller indexes that expand are tried in `test_index`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [case if case in TRIED else pytest.param(case, marks=pytest.mark.long) for case in CASES]
)
def test_a_million_entries_are_refused_in_seconds_and_in_bounded_memory(tmp_path: Path, case: str) -> None:
    """The process has 2 GiB of address space more than after its imports; it prints the result itself."""
    command = [sys.executable, "-m", "tests.checkpoint.huge", str(tmp_path), case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout)
    assert (result["error"] == "") == (case in VALID)
    assert "memory" not in result["message"]
    assert len(result["message"]) < 2000
    assert result["seconds"] < 10
