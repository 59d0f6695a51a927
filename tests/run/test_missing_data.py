"""Data that is not there, when all workers would be on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.cases import tried_each_time

SCRIPT = """
import raysharded as rs

tokens = rs.TokenDataset("{data}", seq_len=8)


class Task(rs.Task):
    def build_model(self): ...
    def build_optimizer(self, model): ...
    def loss(self, model, batch): ...


trainer = rs.ElasticTrainer(
    task=Task(),
    data={training},
    batch=rs.BatchConfig(global_batch_size=1, microbatch_size=1),
    scaling=rs.ScalingConfig(num_workers=1),
    run=rs.RunConfig(name="a", storage_path="runs", max_steps=1),
    evaluation={evaluation},
)
trainer.{call}()
"""
PLACES = {
    "data": {"training": "tokens", "evaluation": "None"},
    "evaluation": {"training": "[1]", "evaluation": "rs.EvalConfig(data=tokens, every_steps=1, num_samples=1)"},
}


@pytest.mark.parametrize(
    ("call", "where"),
    tried_each_time([("start", "evaluation")], of=product(["fit", "start"], ["data", "evaluation"])),
)
def test_a_missing_file_is_named_before_a_ray_is_started(call: str, where: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(data="corpus/", call=call, **PLACES[where]), encoding="utf-8")
    environment = {**os.environ, "RAY_ADDRESS": "local"}
    command = [sys.executable, str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path, env=environment
    )
    assert done.returncode == 1
    own, message = done.stderr.splitlines()  # none reports that Ray is started
    assert own.startswith(f"{script}:")
    assert message.startswith(f"DataError: {tmp_path}/corpus: no such file, and no file matches it.")
