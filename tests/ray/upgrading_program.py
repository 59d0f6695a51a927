"""A run that any version of raysharded can drive: `python upgrading_program.py FOLDER fit|start|attach [later]`.

It imports nothing of the tests: the version that it finds is the one in PYTHONPATH. It writes its events as JSON. With
`later` it connects to Ray, writes `ready`, and waits for the file `go` in the folder before it imports raysharded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import ray
import torch


def tell(kind: str, fields: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"kind": kind, **fields}, default=str) + "\n")
    sys.stdout.flush()


def connect() -> None:
    """Connect to Ray. With `later`, return once the file `go` is there."""
    environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
    ray.init(os.environ["RAY_ADDRESS"], runtime_env={"env_vars": environment}, log_to_driver=False)
    if sys.argv[3:] == ["later"]:
        tell("ready", {})
        while not Path(sys.argv[1], "go").exists():
            time.sleep(0.05)


if __name__ == "__main__":
    connect()

import raysharded as rs  # noqa: E402 - its version may be decided only now
from raysharded.errors import RayshardedError  # noqa: E402

STEPS = 60


class Task(rs.Task):
    """A small regression."""

    def build_model(self) -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))

    def build_optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(self, model: torch.nn.Module, batch: torch.Tensor) -> rs.Loss:
        return rs.Loss((model(batch) - batch.sum(1, keepdim=True)).square().sum(), weight=len(batch))


class Samples:
    """Takes its time until the test is ready for the end."""

    def __init__(self, folder: Path) -> None:
        self._hurry = folder / "hurry"

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self._hurry.exists():
            time.sleep(0.4)
        return torch.randn(8, generator=torch.Generator().manual_seed(index))


def trainer(folder: Path) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=Task(),
        data=Samples(folder),
        batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2, seed=3),
        scaling=rs.ScalingConfig(num_workers=2, cpus_per_worker=0.5),
        run=rs.RunConfig(
            name="upgraded",
            storage_path=str(folder),
            max_steps=STEPS,
            lease_s=2.0,
            failure=rs.FailureConfig(orphan_wait_s=10.0),
        ),
        engine=rs.EngineConfig(prefetch=False),
    )


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    try:
        match how:
            case "fit":
                result = trainer(folder).fit(tell)
                tell("result", {"fingerprint": result.fingerprint, "steps": result.steps})
            case "job":
                os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"] = json.dumps(
                    {"metadata": {"job_submission_id": "raysubmit_1"}}
                )
                trainer(folder).fit(tell)
            case "take_over":
                trainer(folder).fit(tell, take_over=True)
            case "start":
                run = trainer(folder).start()
                tell("began", {"name": run.name})
            case "attach":
                run = rs.attach("upgraded")
                tell("status", {"step": run.status().step, "phase": run.status().phase})
                run.pause()
            case "wait":
                result = rs.attach("upgraded").wait()
                tell("result", {"fingerprint": result.fingerprint, "steps": result.steps})
            case "stop":
                rs.attach("upgraded").stop(checkpoint=True)
    except RayshardedError as error:
        tell("raised", {"error": type(error).__name__, "text": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
