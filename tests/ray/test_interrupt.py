"""Ctrl-C at any time: one line, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.cases import tried_each_time
from tests.cli.test_commands import succeed
from tests.ray.leftovers import processes_marked, wait_until
from tests.ray.pacing import script_at_a_step

pytestmark = [pytest.mark.ray, pytest.mark.clusters]

SCRIPT = """
import sys, threading
import numpy as np, torch
from torch import nn
import raysharded as rs

class Task(rs.Task):
    def build_model(self):
        return nn.Linear(8, 8)
    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.01)
    def loss(self, model, batch):
        return model(batch).square().mean()

class Data:
    def __len__(self):
        return 100
    def __getitem__(self, index):
        return np.full(8, index / 100, np.float32)

trainer = rs.ElasticTrainer(
    task=Task(), data=Data(), batch=rs.BatchConfig(global_batch_size=4, microbatch_size=2),
    scaling=rs.ScalingConfig(num_workers=1, cpus_per_worker=0.25),
    run=rs.RunConfig(name="interrupted", storage_path=sys.argv[1], max_steps=1_000_000),
)
def say_when_it_has_begun():
    main = threading.main_thread().ident
    while True:
        frame = sys._current_frames()[main]
        while frame is not None:
            if frame.f_code.co_filename == sys.modules["raysharded.trainer"].__file__:
                print("begin", flush=True)
                return
            frame = frame.f_back

threading.Thread(target=say_when_it_has_begun, daemon=True).start()
trainer.fit(lambda kind, fields: print(kind, flush=True))
"""


@pytest.mark.long  # test_local_ray.py has another
def test_a_hangup_of_all_processes_ends_with_one_more_checkpoint(tmp_path: Path) -> None:
    """As at the end of a terminal: its processes are those of the script, and of the Ray that it started."""
    process = script_at_a_step(SCRIPT, tmp_path)
    for _ in range(2):  # the kernel's, and the shell's
        os.killpg(process.pid, signal.SIGHUP)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 1, errors
    assert "RunStopped: Stopped. Run 'interrupted' was at step " in errors
    assert "the next fit() resumes from its checkpoint of step " in errors


@pytest.mark.parametrize("moment", tried_each_time(["step"], ["begin", "started", "step"]))
def test_ctrl_c_ends_with_one_line_and_leaves_nothing(moment: str, tmp_path: Path) -> None:
    marker = f"RAYSHARDED_TEST={uuid.uuid4().hex}"
    name, _, value = marker.partition("=")
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a separate foreground process group, as a terminal gives it
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == moment:
            break
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    lines = [line for line in errors.splitlines() if line.strip()]
    assert process.returncode in (-signal.SIGINT, 130, 1), errors
    assert len(lines) == 1, errors
    assert lines[0].startswith("Interrupted. Run 'interrupted'")
    if moment == "step":
        assert "stopped: interrupted at step " in succeed("status", tmp_path / "interrupted")
    wait_until(lambda: not processes_marked(marker), f"all processes gone: {processes_marked(marker)}")
