"""Checkpoints on demand and on notice of leaving, through Ray."""

from __future__ import annotations

import os
import signal
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import raysharded as rs
from raysharded.checkpoint import open_checkpoint, open_storage
from raysharded.errors import ConfigError, RunFailed
from raysharded.testing.processes import ProcessLauncher
from tests.ray.leftovers import assert_no_slot_is_leaked, processes_marked, wait_until
from tests.ray.pacing import script_at_a_step
from tests.ray.test_interrupt import SCRIPT
from tests.ray.test_main_job import trainer, undisturbed

pytestmark = pytest.mark.ray
STEPS = 24


@pytest.mark.usefixtures("cluster")
def test_a_checkpoint_on_demand_is_committed_when_it_returns_from_any_thread(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1, steps=STEPS).start()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: run.checkpoint(timeout_s=60), range(2))
    assert first.step >= 1
    for written in (first, second):
        folder, _, name = written.url.rpartition("/")
        assert open_checkpoint(open_storage(folder), name).step == written.step
    result = run.wait(240)
    assert result.fingerprint == undisturbed(STEPS).fingerprint
    with pytest.raises(RunFailed):
        run.checkpoint()
    assert_no_slot_is_leaked()


@pytest.mark.usefixtures("cluster")
def test_a_run_stopped_with_a_checkpoint_resumes_from_it(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1, steps=STEPS).start()
    wait_until(lambda: run.status().step >= 2, "step 2")
    run.stop(checkpoint=True)
    with pytest.raises(RunFailed, match=r"resumes from its checkpoint of step \d+"):
        run.wait(240)
    entries: list[tuple[str, dict[str, object]]] = []
    result = trainer(tmp_path, 2, steps=STEPS).fit(lambda kind, fields: entries.append((kind, fields)))
    assert result.fingerprint == undisturbed(STEPS).fingerprint
    started = next(fields for kind, fields in entries if kind == "started")
    assert started["resumed_after_step"] != 0
    assert trainer(tmp_path, 1, steps=STEPS).fit(progress=False) == result  # finished already: nothing is started
    assert_no_slot_is_leaked()


@pytest.mark.usefixtures("cluster")
def test_a_worker_that_gets_sigterm_leaves_at_the_next_step_and_is_replaced(tmp_path: Path) -> None:
    run = trainer(tmp_path, (1, 2), steps=STEPS, checkpoint=rs.CheckpointConfig(keep_last=9)).start()
    wait_until(lambda: run.status().step >= 2 and len(run.status().workers) == 2, "step 2")
    status = run.status()
    leaver = status.workers[1]
    os.kill(status.pids[leaver], signal.SIGTERM)
    wait_until(lambda: leaver not in run.status().workers, "going on without it")
    result = run.wait(240)
    summary = result.report().summary
    assert result.fingerprint == undisturbed(STEPS).fingerprint
    assert [event.worker for event in summary.worker_events if event.what == "left"] == [leaver]
    assert [event.worker for event in summary.worker_events if event.what == "lost"] == []
    assert summary.recoveries == ()
    assert_no_slot_is_leaked()


def test_the_listener_cannot_wait_for_a_checkpoint(tmp_path: Path) -> None:
    refused: list[str] = []
    runs: list[rs.Run] = []

    def listen(kind: str, fields: dict[str, object]) -> None:
        if kind == "finished":
            try:
                runs[0].checkpoint()
            except ConfigError as error:
                refused.append(str(error))

    runs.append(trainer(tmp_path, 1, steps=2).start_with(ProcessLauncher, listen))
    runs[0].wait(240)
    assert len(refused) == 1


@pytest.mark.long  # test_local_ray.py has SIGTERM to a driver on a Ray that it started
@pytest.mark.clusters
def test_sigterm_to_the_driver_ends_the_run_after_a_checkpoint_and_leaves_nothing(tmp_path: Path) -> None:
    marker = f"RAYSHARDED_TEST={uuid.uuid4().hex}"
    name, _, value = marker.partition("=")
    process = script_at_a_step(SCRIPT, tmp_path, **{name: value})
    process.send_signal(signal.SIGTERM)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 1, errors
    assert "checkpoint" in out.splitlines()
    assert "resumes from its checkpoint of step" in errors
    wait_until(lambda: not processes_marked(marker), f"all processes gone: {processes_marked(marker)}")


@pytest.mark.long
@pytest.mark.clusters
def test_a_second_sigterm_ends_the_run_at_once(tmp_path: Path) -> None:
    process = script_at_a_step(SCRIPT, tmp_path)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "Run 'interrupted'" in errors
