"""A tiny model, trained on one worker and on two of which one is killed: every number is compared.

No dimension of the model is divisible by two, so that shards are padded: there a torch may hold other memory than it
shows. Workers are plain processes on CPUs. The test takes seconds and needs no Ray and no GPU.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysharded.config import BatchConfig, FailureConfig, RunConfig, ScalingConfig
from raysharded.demo.model import VOCABULARY, ByteGPT
from raysharded.errors import RayshardedError
from raysharded.ids import WorkerId
from raysharded.preflight.trial_runs import Training, difference, train
from raysharded.task import Task
from raysharded.testing.faults import Fault, FaultPlan
from raysharded.trainer import ElasticTrainer

_STEPS = 6
_KILL = Fault(worker=WorkerId(1), step=4, phase="backward")
_SEQ_LEN, _WIDTH = 7, 15
TIMEOUT_S = 120.0
"""Time limit of each of the two runs, which take a few seconds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of the comparison."""

    found: str
    problem: str = ""
    """The difference, or the failure; empty if there was none."""
    undecided: bool = False
    """True after a timeout, for example on a busy machine: the numbers were not compared."""


class Samples:
    """A map-style dataset of random tokens."""

    def __len__(self) -> int:
        return 101

    def __getitem__(self, index: int) -> Any:
        return np.random.default_rng(index).integers(0, VOCABULARY, _SEQ_LEN + 1)


def run_self_test(task: Task | None = None) -> Verdict:
    """Train twice and compare. `task`: a replacement for the tiny GPT, with the same data."""
    task = task or ByteGPT(
        layers=2, width=_WIDTH, heads=3, seq_len=_SEQ_LEN, lr=1e-2, warmup_steps=2, total_steps=_STEPS
    )
    began = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(prefix="raysharded-self-test-") as folder:
            alone = _train(task, folder, 1)
            together = _train(task, folder, 2)
            fired = _plan(folder).fired(_KILL)
    except TimeoutError:
        return Verdict(
            found=f"not done within {TIMEOUT_S:.0f} s", problem="Retry when this machine is less busy.", undecided=True
        )
    except (RayshardedError, OSError) as error:
        return Verdict(found="it could not be trained", problem=str(error))
    problem = difference(alone, together) or ("" if fired else "no worker was killed")
    if problem:
        return Verdict(found="other numbers at 2 workers than at 1", problem=problem)
    return Verdict(
        found=f"{_STEPS} steps at 1 worker, and at 2 of which one was killed: the same losses, gradient norms and "
        f"weights ({alone.fingerprint[:8]}), in {time.monotonic() - began:.1f} s"
    )


def _plan(folder: str) -> FaultPlan:
    return FaultPlan(faults=(_KILL,), folder=folder)


def _train(task: Task, folder: str, workers: int) -> Training:
    """Train on this many workers; one of two is killed, and another one replaces it."""
    trainer = ElasticTrainer(
        task=task,
        data=Samples(),
        batch=BatchConfig(global_batch_size=8, microbatch_size=2, seed=0),
        scaling=ScalingConfig(num_workers=workers),
        run=RunConfig(
            name=f"workers-{workers}",
            storage_path=f"{folder}/runs",
            max_steps=_STEPS,
            failure=FailureConfig(progress_timeout_s=TIMEOUT_S / 2),
        ),
    )
    if workers > 1:
        trainer.faults = _plan(folder)
    return train(trainer.spec(), TIMEOUT_S)
