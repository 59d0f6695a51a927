"""A benchmark that is told to end ends whom it has started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from benchmarks.result import ROOT

pytestmark = pytest.mark.procs

PROGRAM = """
import benchmarks.__main__ as benchmarks

benchmarks.NAMES["sleeping"] = "tests.benchmarks.sleeping"
benchmarks.main()
"""


def test_sigterm_leaves_no_process_behind() -> None:
    command = [sys.executable, "-c", PROGRAM, "sleeping"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as benchmark:
        assert benchmark.stdout is not None
        word, pid = benchmark.stdout.readline().split()
        assert word == "sleeping"
        os.kill(int(pid), 0)
        benchmark.terminate()
        assert benchmark.wait(60) == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
