"""A run between the request for its start and its driver's first entry, and a start that fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.policy import Keep
from raysharded.driver.checkpoints.committer import RunFiles
from raysharded.driver.driver import Driver
from raysharded.errors import ClusterError, ConfigError, RunFailed
from raysharded.journal.log import read
from raysharded.ownership.start_mark import StartMark, is_starting, read_start
from raysharded.report.live.follow import follow
from raysharded.report.overview import look
from raysharded.report.state_meaning import meaning
from raysharded.run.attach import attach
from raysharded.run.removal.execution import remove_run
from raysharded.testing.processes import ProcessLauncher
from tests.cli.test_commands import fail, invoke, succeed
from tests.driver.scripted import LIMITS
from tests.driver.test_slow_starts import NeverReady
from tests.report.entries import Entry, ManualClock, data, generation, run_with_a_loss, started, step, write_run
from tests.run.test_handles import WAIT_S, trainer

REFUSAL = "was started with batch="


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
    asked, here = (StartMark(storage, wall=lambda: now[0]) for _ in range(2))
    asked.put(driver_is_here=False)
    assert is_starting(storage, wall=lambda: 1060.0)
    assert not is_starting(storage, wall=lambda: 5000.0)
    here.put(driver_is_here=True)
    assert is_starting(storage, wall=lambda: 5000.0)
    with pytest.raises(ConfigError, match=r"stays: it is starting\."):
        remove_run(storage.url)
    here.remove()
    assert not is_starting(storage)
    asked.remove()
    assert not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match="there is no run at"):
        attach(str(tmp_path / "x"))


def with_another_batch(folder: Path) -> tuple[str, rs.Run]:
    """The URL of a run that was stopped, and the handle on a new start of it with another batch, which is refused."""
    url = write_run(folder / "asked", [started(run="asked"), data(), *generation(1, [0, 1], 0), step(1), stopped(1)])
    return url, trainer(folder).start_with(ProcessLauncher)


def stopped(at_step: int) -> Entry:
    return "stopped", {"step": at_step, "fingerprint": None}


def test_the_reason_of_a_refused_start_is_told_until_the_next_start(tmp_path: Path) -> None:
    url, run = with_another_batch(tmp_path)
    with pytest.raises(ConfigError, match=REFUSAL):
        run.wait_until_begun(WAIT_S)
    with pytest.raises(ConfigError, match=REFUSAL):
        run.wait(WAIT_S)
    assert (run.status().state, run.status().driver, run.status().step) == ("failed", "", 1)
    assert REFUSAL in run.status().error
    told = json.loads(succeed("status", url, "--json"))
    assert (told["state"], told["step"]) == ("failed", 1)
    assert told["error"].startswith(f"ConfigError: run 'asked' {REFUSAL}")
    (listed,) = json.loads(succeed("runs", tmp_path, "--json"))
    assert (listed["state"], listed["error"]) == ("failed", told["error"])
    shown = succeed("status", url)
    assert "failed to start: its newest start failed before a driver led it. Before that: it was stopped at" in shown
    assert REFUSAL in shown
    assert "failed to start" in succeed("runs", tmp_path)
    with pytest.raises(RunFailed, match=f"'asked' failed to start at step 1: ConfigError: .*{REFUSAL}"):
        attach(url).wait(WAIT_S)
    storage = open_storage(url)
    StartMark(storage).put(driver_is_here=True)
    assert [(found.state, found.error) for found in look([storage])] == [("new", "")]
    StartMark(storage).remove()
    assert [(found.state, found.error) for found in look([storage])] == [("stopped", "")]


def test_a_refused_start_is_forgotten_when_a_driver_has_written_more(tmp_path: Path) -> None:
    url, run = with_another_batch(tmp_path)
    with pytest.raises(ConfigError):
        run.wait(WAIT_S)
    write_run(Path(url), [stopped(1)])  # by a driver that was there all the time
    assert [(found.state, found.error) for found in look([open_storage(url)])] == [("stopped", "")]


def test_a_finished_run_stays_finished_and_tells_the_refusal(tmp_path: Path) -> None:
    url = write_run(tmp_path / "asked", run_with_a_loss())
    run = trainer(tmp_path).start_with(ProcessLauncher)
    with pytest.raises(ConfigError):
        run.wait(WAIT_S)
    told = json.loads(succeed("status", url, "--json"))
    assert (told["state"], REFUSAL in told["error"]) == ("finished", True)
    assert invoke("wait", url).exit_code == 0


def test_a_mark_that_no_start_wrote_is_none(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    StartMark(storage).put(driver_is_here=True)
    mark = tmp_path / "lease" / "start.json"
    mark.write_bytes(mark.read_bytes()[:-3])
    assert read_start(storage) is None


def test_a_run_that_has_begun_is_waited_for_no_longer(tmp_path: Path) -> None:
    url = write_run(tmp_path / "asked", run_with_a_loss())
    attach(url).wait_until_begun(0.0)  # it is finished
    StartMark(open_storage(str(tmp_path / "other"))).put(driver_is_here=True)
    with pytest.raises(TimeoutError, match=r"'other' has not begun after 0\.0 s"):
        attach(str(tmp_path / "other")).wait_until_begun(0.0)


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


def test_ctrl_c_in_a_listener_leaves_the_entry_that_it_received_in_the_journal(tmp_path: Path) -> None:
    storage, clock = open_storage(str(tmp_path / "x")), ManualClock()
    files = RunFiles(name="x", storage=storage, keep=Keep(last=1), metadata={}, global_batch_size=8, key=None)

    def listen(kind: str, _: Mapping[str, Any]) -> None:
        if kind == "started":
            raise KeyboardInterrupt

    driver = Driver(LIMITS, NeverReady(clock, "", failing=False), files, clock, listen)
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    assert [entry["kind"] for entry in read(storage)] == ["started", "stopped"]
