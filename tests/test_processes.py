"""Ending a process that is known by its id and its start time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from raysharded.actors.process.os_processes import kill_process, start_ticks
from raysharded.ray_backend.node_agent import Agent


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is stopped (SIGSTOP)."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    os.kill(process.pid, signal.SIGSTOP)
    yield process
    process.kill()
    process.wait(10)


def test_a_stopped_process_is_ended_at_once(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_ticks(sleeper.pid)
    assert started is not None
    began = time.monotonic()
    assert kill_process(sleeper.pid, started)
    assert sleeper.wait(10) == -signal.SIGKILL
    assert time.monotonic() - began < 1.0


def test_a_process_that_took_over_the_id_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_ticks(sleeper.pid)
    assert started is not None
    assert not kill_process(sleeper.pid, started - 1)
    assert sleeper.poll() is None


def test_a_process_that_has_exited_has_no_start_time_and_is_not_killed(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_ticks(sleeper.pid)
    assert started is not None
    sleeper.kill()
    sleeper.wait(10)
    assert start_ticks(sleeper.pid) is None
    assert not kill_process(sleeper.pid, started)


def test_a_process_that_its_parent_has_not_collected_counts_as_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    deadline = time.monotonic() + 60
    while start_ticks(process.pid) is not None:
        assert time.monotonic() < deadline
    assert process.returncode is None  # not collected: its id cannot be anybody else's yet
    process.wait(10)


def test_an_agent_lets_a_process_end_by_itself_and_ends_one_that_does_not(sleeper: subprocess.Popen[bytes]) -> None:
    agent, started = Agent(), start_ticks(sleeper.pid)
    assert started is not None
    assert agent.kill_after(sleeper.pid, started, 0.2)
    assert sleeper.wait(10) == -signal.SIGKILL
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"]) as ending:
        began = start_ticks(ending.pid)
        assert began is not None
        assert not agent.kill_after(ending.pid, began, 60.0)
        assert ending.wait(10) == 0  # nobody ended it
