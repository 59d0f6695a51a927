"""Workers as plain processes end silently, with everything that the task has made in them."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.errors import ConfigError, TaskError
from raysharded.ids import WorkerId
from raysharded.protocol.worker_launcher import Reply
from raysharded.testing.processes import _send, fit
from tests.paths import ROOT

LOCKED = """
import multiprocessing
import raysharded as rs
from raysharded.testing.processes import fit
from tests.training.harness import SmallTask, Tokens

class Locked(SmallTask):
    def build_model(self):
        self.lock = multiprocessing.RLock()  # as the bars of tqdm have
        print("method", multiprocessing.get_start_method())
        return super().build_model()

class LockedTokens(Tokens):
    lock = None
    def __getitem__(self, index):
        self.lock = self.lock or multiprocessing.RLock()
        return super().__getitem__(index)

if __name__ == "__main__":
    trainer = rs.ElasticTrainer(
        task=Locked(), data=LockedTokens(),
        batch=rs.BatchConfig(global_batch_size=4, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=1),
        run=rs.RunConfig(name="locked", storage_path="runs", max_steps=1),
    )
    print("steps", fit(trainer).steps)
"""


@pytest.mark.procs
def test_locks_of_a_task_are_no_leaked_semaphores_at_the_end_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "locked.py").write_text(LOCKED, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "locked.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-4000:]
    assert "steps 1" in ran.stdout
    assert f"method {multiprocessing.get_context().get_start_method()}" in ran.stdout, "the task made its lock"
    assert "leaked" not in ran.stderr


FUNCTION = """
import raysharded as rs
from raysharded.testing.processes import fit

def train(session):
    raise ValueError(f"reached at {session.max_steps} steps")

if __name__ == "__main__":
    fit(rs.ElasticTrainer(
        train_fn=train, batch=rs.BatchConfig(global_batch_size=4, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=1), run=rs.RunConfig(name="function", storage_path="runs", max_steps=7),
    ))
"""


@pytest.mark.procs
@pytest.mark.parametrize(
    ("program", "told"),
    [
        (["-c", FUNCTION], "ValueError: reached at 7 steps"),
        (["-"], "ConfigError: this program comes from <stdin>, and each worker's process imports it again: put it "),
    ],
)
def test_a_program_that_no_process_can_import_gives_its_function_by_value(
    tmp_path: Path, program: list[str], told: str
) -> None:
    ran = subprocess.run(
        [sys.executable, *program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        input=FUNCTION,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ran.returncode, told in ran.stderr) == (1, True), ran.stderr[-4000:]


@pytest.mark.procs
def test_a_lambda_comes_by_value_and_what_it_holds_is_named(tmp_path: Path) -> None:
    guard: Any = threading.Lock()
    raises: Callable[[Any], Any] = lambda session: [][session.max_steps]  # noqa: E731 - it is about lambdas
    holds: Callable[[Any], Any] = lambda session: (guard.release(), session)  # noqa: E731 - as above
    for function, kind, told in (
        (partial(raises), TaskError, r"^\S+/test_process_workers\.py:\d+: <lambda> raised IndexError"),
        (holds, ConfigError, "^guard in train_fn "),
    ):
        with pytest.raises(kind, match=told):
            fit(
                rs.ElasticTrainer(
                    train_fn=function,
                    batch=rs.BatchConfig(global_batch_size=4, microbatch_size=2),
                    scaling=rs.ScalingConfig(num_workers=1),
                    run=rs.RunConfig(name="lambda", storage_path=str(tmp_path), max_steps=7),
                ),
            )


STOPPED = """
import time
import raysharded as rs
from raysharded.testing.processes import fit
from tests.training.harness import SmallTask, Tokens

class Slow(Tokens):
    def __getitem__(self, index):
        time.sleep(0.02)
        return super().__getitem__(index)

if __name__ == "__main__":
    trainer = rs.ElasticTrainer(
        task=SmallTask(), data=Slow(),
        batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2),
        scaling=rs.ScalingConfig(num_workers=2),
        run=rs.RunConfig(name="stopped", storage_path="runs", max_steps=100_000),
    )
    fit(trainer, lambda kind, fields: print(kind, flush=True))
"""


@pytest.mark.procs
def test_sigterm_to_a_scripts_whole_group_ends_it_after_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "stopped.py").write_text(STOPPED, encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with (tmp_path / "stderr").open("w") as stderr:
        script = subprocess.Popen(
            [sys.executable, "stopped.py"],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        assert script.stdout is not None
        try:
            assert "step\n" in script.stdout  # reads up to the first step
            os.killpg(script.pid, signal.SIGTERM)
            rest = script.stdout.read()
            assert script.wait(60) == 1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(script.pid, signal.SIGKILL)
    told = (tmp_path / "stderr").read_text()
    assert "RunStopped: Stopped. Run 'stopped' was at step" in told, told
    assert "Traceback" not in told
    assert rest.splitlines()[-1] == "stopped"
    assert "checkpoint\n" in rest


def test_a_reply_to_a_launcher_that_has_closed_is_dropped() -> None:
    ours, theirs = multiprocessing.Pipe()
    with theirs:
        ours.close()
        _send(theirs, Reply(worker=WorkerId(0), method="ready"))
