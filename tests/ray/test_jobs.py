"""A script as a Ray job, submitted to a real job server: stopped, lost, submitted again, failing."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.job_submission import JobStatus

from raysharded.checkpoint import newest_complete, open_storage
from raysharded.journal.log import read
from tests.ray.driving import MICROBATCHES
from tests.ray.job_server import JobServer
from tests.ray.leftovers import wait_until
from tests.training.harness import train

pytestmark = [pytest.mark.ray, pytest.mark.clusters]

STEPS = 20
SCRIPT = f"""
import sys
from dataclasses import replace
from pathlib import Path
import helper
from tests.ray.driving import trainer

job = trainer(Path(sys.argv[1]), 1)
job.run = replace(job.run, max_steps={STEPS}, lease_s=15.0)
job.data = helper.Slow(sys.argv[1] + "-hurry")
if len(sys.argv) > 2:
    job.task = helper.Failing()
print("fingerprint", job.fit().fingerprint)
"""
HELPER = """
import os, time
from tests.training.harness import GptTask, Tokens

class Slow(Tokens):  # until there is a file
    def __init__(self, hurry):
        super().__init__()
        self.hurry = hurry
    def __getitem__(self, index):
        if not os.path.exists(self.hurry):
            time.sleep(0.25)
        return super().__getitem__(index)

class Failing(GptTask):
    def loss(self, model, batch):
        raise KeyError("no such column")
"""


@pytest.fixture(scope="module")
def server() -> Iterator[JobServer]:
    with JobServer(num_cpus=4) as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The jobs' working directory."""
    folder = tmp_path / "working"
    folder.mkdir()
    (folder / "train_it.py").write_text(SCRIPT)
    (folder / "helper.py").write_text(HELPER)
    return folder


def of(runs: Path, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read(open_storage(str(runs / "driven"))) if entry["kind"] == kind]


def wait_for_steps(runs: Path, more: int) -> None:
    """Return when the run has done so many steps more."""
    before = len(of(runs, "step"))
    wait_until(lambda: len(of(runs, "step")) >= before + more, lambda: f"{more} steps more than {before}", 120)


def test_a_job_that_is_lost_or_stopped_and_submitted_again_ends_with_the_right_weights(
    server: JobServer, folder: Path, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    lost = server.submit(folder, sys.executable, "train_it.py", runs)
    wait_for_steps(runs, 3)
    os.kill(server.pid("train_it.py"), signal.SIGKILL)  # a separate driver continues
    assert server.wait(lost)[0] is JobStatus.FAILED
    stopped = server.submit(folder, sys.executable, "train_it.py", runs)
    wait_until(lambda: "its driver is still running; following it" in server.client.get_job_logs(stopped), "following")
    server.client.stop_job(stopped)
    assert server.wait(stopped)[0] is JobStatus.STOPPED
    (tmp_path / "runs-hurry").touch()
    done = server.submit(folder, sys.executable, "train_it.py", runs)
    status, logs = server.wait(done)
    assert status is JobStatus.SUCCEEDED, logs
    assert f"fingerprint {train(1, steps=STEPS, microbatches=MICROBATCHES).fingerprint}" in logs
    first, second = of(runs, "started")
    assert (first["resumed_after_step"], of(runs, "stopped")[0]["step"]) == (0, second["resumed_after_step"])
    assert 3 <= second["resumed_after_step"] < STEPS
    assert [entry["step"] for entry in of(runs, "step")] == list(range(1, STEPS + 1))
    for line in (f"step {second['resumed_after_step']}: resuming from its checkpoint", f"step {STEPS}/{STEPS}  loss"):
        assert line in logs
    assert "\x1b[" not in "".join(line for line in logs.splitlines() if "step" in line)  # no live bar
    assert (
        server.wait(server.submit(folder, sys.executable, "train_it.py", runs))[0] is JobStatus.SUCCEEDED
    )  # it is finished


def test_a_job_whose_task_raises_fails_and_its_log_ends_with_the_task_s_own_lines(
    server: JobServer, folder: Path, tmp_path: Path
) -> None:
    job = server.submit(folder, sys.executable, "train_it.py", tmp_path / "runs", "fail")
    status, logs = server.wait(job)
    assert status is JobStatus.FAILED
    assert 'raise KeyError("no such column")' in logs
    error, place = logs.splitlines()[-2:]
    assert "TaskError: Failing.loss in step 1" in error
    assert place.startswith("(Raised in worker 0 on ")
    assert newest_complete(open_storage(str(tmp_path / "runs" / "driven"))).checkpoint is None
