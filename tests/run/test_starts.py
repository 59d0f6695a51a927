"""A run between the request for its start and its driver's first entry, and a start that fails."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.policy import Keep
from raysharded.driver.checkpoints.committer import RunFiles
from raysharded.driver.driver import Driver
from raysharded.errors import ClusterError, ConfigError
from raysharded.journal.log import read
from raysharded.ownership.start_mark import is_starting, mark_start
from raysharded.report.live.follow import follow
from raysharded.report.overview import look
from raysharded.report.state_meaning import meaning
from raysharded.run.attach import attach
from raysharded.run.removal.execution import remove_run
from raysharded.testing.processes import ProcessLauncher
from tests.cli.test_commands import fail, succeed
from tests.driver.scripted import LIMITS
from tests.driver.test_slow_starts import NeverReady
from tests.report.entries import ManualClock
from tests.run.test_handles import WAIT_S, trainer


@pytest.mark.procs
def test_a_run_that_starts_is_said_to_start_by_every_command(tmp_path: Path) -> None:
    asked, may_go_on = threading.Event(), threading.Event()

    def launch(job: Any) -> ProcessLauncher:
        asked.set()
        assert may_go_on.wait(WAIT_S)
        return ProcessLauncher(job)

    run = trainer(tmp_path / "runs").start_with(launch)
    try:
        assert asked.wait(WAIT_S)
        assert "new: it is starting: its driver has written nothing yet" in succeed("status", run.url)
        (listed,) = json.loads(succeed("runs", tmp_path / "runs", "--json"))
        assert (listed["state"], listed["step"], listed["url"]) == ("new", 0, run.url)
        assert f"the run at {run.url} is starting" in fail("report", run.url)
        attached = attach(run.url)
        assert (attached.status().state, attached.is_over()) == ("new", False)
        storage = open_storage(run.url)
        (glance,) = look([storage])

        def pause(_: float) -> None:
            may_go_on.set()
            time.sleep(0.05)

        told = [change for changes in follow(storage, glance, 0, every_s=0.1, pause=pause) for change in changes]
        assert [change["state"] for change in told if change["kind"] == "state"] == ["running", "finished"]
    finally:
        may_go_on.set()
    assert attached.wait(WAIT_S).fingerprint == run.wait(WAIT_S).fingerprint
    assert not is_starting(open_storage(run.url))
    assert not (tmp_path / "runs" / "asked" / "lease" / "start.json").exists()


def test_a_start_that_fails_before_it_owns_the_run_leaves_nothing(tmp_path: Path) -> None:
    def launch(job: Any) -> ProcessLauncher:
        raise ClusterError("no machine")

    run = trainer(tmp_path / "runs").start_with(launch)
    with pytest.raises(ClusterError, match="no machine"):
        run.wait(WAIT_S)
    assert list(tmp_path.iterdir()) == []


def test_a_mark_counts_while_its_process_is_there_or_it_is_fresh(tmp_path: Path) -> None:
    storage, now = open_storage(str(tmp_path / "x")), [1000.0]
    unmark = mark_start(storage, driver_is_here=False, wall=lambda: now[0])
    assert is_starting(storage, wall=lambda: 1060.0)
    assert not is_starting(storage, wall=lambda: 5000.0)
    unmark_here = mark_start(storage, driver_is_here=True, wall=lambda: now[0])
    assert is_starting(storage, wall=lambda: 5000.0)
    with pytest.raises(ConfigError, match=r"stays: it is starting\."):
        remove_run(storage.url)
    unmark_here()
    assert not is_starting(storage)
    unmark()
    assert not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match="there is no run at"):
        attach(str(tmp_path / "x"))


class Interrupted(NeverReady):
    """A launcher whose driver gets a Ctrl-C while it waits."""

    def wait(self, timeout_s: float) -> list[Any]:
        raise KeyboardInterrupt


def test_ctrl_c_is_the_journal_s_last_entry(tmp_path: Path) -> None:
    storage, clock = open_storage(str(tmp_path / "x")), ManualClock()
    files = RunFiles(name="x", storage=storage, keep=Keep(last=1), metadata={}, global_batch_size=8, key=None)
    told: list[str] = []
    driver = Driver(LIMITS, Interrupted(clock, "", failing=False), files, clock, lambda kind, _: told.append(kind))
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    last = list(read(storage))[-1]
    assert (last["kind"], last["interrupted"], last["step"], told[-1]) == ("stopped", True, 0, "stopped")
    (found,) = look([storage])
    assert (found.state, found.interrupted) == ("stopped", True)
    assert meaning(found).startswith("it was stopped before its first step, so nothing of it was trained")
