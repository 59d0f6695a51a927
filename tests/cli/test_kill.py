"""`raysharded kill` strikes a worker of the run on this machine, and no other process."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.test_commands import invoke
from tests.report.entries import Entry, started, write_run

NAMED = "import sys, time; print(flush=True); time.sleep(600)"


@pytest.fixture
def process(request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A process whose command line begins with the parameter."""
    with subprocess.Popen(
        [request.param, "-c", NAMED], executable=sys.executable, stdout=subprocess.PIPE, text=True
    ) as made:
        assert made.stdout is not None
        made.stdout.readline()
        yield made
        made.kill()


def ready(worker: int, pid: int, node: str) -> Entry:
    return "worker_ready", {"worker": worker, "pid": pid, "node": node, "node_id": node}


def run_with(folder: Path, *entries: Entry) -> str:
    write_run(folder / "run", [started(), *entries])
    return str(folder / "run")


@pytest.mark.parametrize("process", ["ray::Tenant.call"], indirect=True)
def test_the_worker_of_that_number_is_killed(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    run = run_with(tmp_path, ready(0, os.getpid(), platform.node()), ready(1, process.pid, platform.node()))
    found = invoke("kill", run, "--worker", "1")
    assert (found.exit_code, found.stdout) == (0, f"worker 1, process {process.pid}: killed\n")
    assert process.wait(30) == -signal.SIGKILL


@pytest.mark.parametrize("process", ["python"], indirect=True)
def test_a_process_that_is_no_worker_is_left_alone(tmp_path: Path, process: subprocess.Popen[str]) -> None:
    run = run_with(tmp_path, ready(1, process.pid, platform.node()), ready(2, 1, platform.node()))
    for worker in ("1", "2"):
        found = invoke("kill", run, "--worker", worker)
        assert found.exit_code == 1
        assert "has exited" in found.stderr
    assert process.poll() is None


def test_a_worker_elsewhere_and_one_that_never_was_are_named(tmp_path: Path) -> None:
    run = run_with(tmp_path, ready(1, 10, "another"))
    assert f"worker 1 is on another, and this is {platform.node()}" in invoke("kill", run, "--worker", "1").stderr
    assert "has been ready; these have: 1." in invoke("kill", run, "--worker", "4").stderr
