"""A benchmark that receives a signal to end ends the processes that it has started."""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

import pytest

from tests.forked import server

pytestmark = pytest.mark.procs


def measure(pipe: Connection) -> None:
    """`python -m benchmarks sleeping`, with its stdout into the pipe."""
    from benchmarks import __main__ as benchmarks

    os.dup2(pipe.fileno(), 1)
    benchmarks.NAMES["sleeping"] = "tests.benchmarks.sleeping"
    sys.argv = ["benchmarks", "sleeping"]
    benchmarks.main()


def test_sigterm_leaves_no_process_behind() -> None:
    context = server()
    ours, theirs = context.Pipe(duplex=False)
    benchmark = context.Process(target=measure, args=(theirs,))
    benchmark.start()
    theirs.close()
    with os.fdopen(os.dup(ours.fileno())) as printed:
        word, pid = printed.readline().split()
    assert word == "sleeping"
    os.kill(int(pid), 0)
    benchmark.terminate()
    benchmark.join(60)
    assert benchmark.exitcode == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid), 0)
