"""Pauses and other numbers of workers, with real worker processes: no step is computed twice, and no bit changes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from raysharded.driver.driver import Driver
from raysharded.driver.state.state import Phase
from tests.training.harness import make_limits
from tests.training.test_leaving import Seen, a_paced_job, drive, is_gone

pytestmark = pytest.mark.procs
_HANG_S = 2.0
_STANDS_STILL_S = 3.0


def pause(driver: Driver, seen: Seen) -> int:
    """The step after which the run stands still."""
    driver.pause()
    seen.wait(lambda s: s.of("paused"))
    assert driver.state.phase is Phase.PAUSED
    return int(seen.first("paused")["step"])


def test_a_paused_run_stands_still_and_then_continues_with_the_same_bits(tmp_path: Path) -> None:
    job = a_paced_job(tmp_path)

    def act(driver: Driver, seen: Seen) -> None:
        step = pause(driver, seen)
        written = driver.checkpoint().result(60)
        assert written[0] == step
        time.sleep(_STANDS_STILL_S)  # longer than a hang: nothing must happen, so there is nothing to wait for
        assert seen.step == step
        driver.resume()

    state, seen = drive(job, make_limits(job, 2, hang_timeout_s=_HANG_S, progress_timeout_s=10.0), act)
    seen.assert_no_step_is_computed_twice()
    assert state.losses == 0
    assert len(seen.memberships) == 2
    assert seen.first("resume")["seconds"] >= _STANDS_STILL_S


def test_a_worker_that_is_killed_in_a_pause_costs_no_step(tmp_path: Path) -> None:
    job = a_paced_job(tmp_path)

    def act(driver: Driver, seen: Seen) -> None:
        pause(driver, seen)
        os.kill(driver.state.facts[driver.state.members[1]].pid, signal.SIGKILL)
        seen.wait(lambda s: any(fields.get("paused") for fields in s.of("generation")))
        seen.wait(lambda s: len(s.of("formed")) == 2)
        seen.wait(lambda s: len(s.of("worker_ready")) == 4)  # its replacement is ready, and waits
        assert len(seen.memberships) == 2
        os.kill(driver.state.facts[driver.state.members[0]].pid, signal.SIGKILL)  # the loss before was made good
        seen.wait(lambda s: len(s.of("worker_lost")) == 2)
        driver.resume()

    state, seen = drive(job, make_limits(job, 3, min_workers=2, max_worker_losses=2, start_backoff_s=0.1), act)
    seen.assert_every_step_is_computed_once()
    assert {fields["source"] for fields in seen.of("generation")[1:]} == {"memory"}
    assert seen.first("recovery")["steps_redone"] == 0
    assert state.losses == 2


def test_a_run_is_resized_from_4_to_2_to_3_workers_from_memory(tmp_path: Path) -> None:
    job = a_paced_job(tmp_path)

    def act(driver: Driver, seen: Seen) -> None:
        pids = {worker: facts.pid for worker, facts in driver.state.facts.items()}
        driver.resize(2)
        seen.wait(lambda s: len(s.of("worker_left")) == 2)
        assert all(is_gone(pids[fields["worker"]]) for fields in seen.of("worker_left"))
        driver.resize(3)
        seen.wait(lambda s: len(s.memberships[-1]) == 3)

    state, seen = drive(job, make_limits(job, 4, min_workers=1), act)
    seen.assert_no_step_is_computed_twice()
    assert [len(members) for members in seen.memberships] == [4, 2, 3]
    assert (state.losses, state.preemptions) == (0, 0)
    assert len(seen.of("worker_ready")) == 5
