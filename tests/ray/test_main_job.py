"""The main job through Ray: real actors, killed while they train."""

from __future__ import annotations

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.errors import ConfigError, RunFailed
from raysharded.testing.processes import fit
from tests.ray.leftovers import assert_no_slot_is_leaked, wait_until
from tests.ray.pacing import PATIENT_S, SlowTokens, waiting
from tests.training.harness import GptTask, Outcome, train

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("cluster")]

STEPS = 10
MICROBATCHES = 4


def trainer(folder: Path, workers: int | tuple[int, int], *, steps: int = STEPS, **run: Any) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=GptTask(),
        data=SlowTokens(),
        batch=rs.BatchConfig(global_batch_size=2 * MICROBATCHES, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=workers),
        run=rs.RunConfig(name="job", storage_path=str(folder), max_steps=steps, **run),
        engine=rs.EngineConfig(prefetch=False),
    )


@cache
def undisturbed(steps: int = STEPS) -> Outcome:
    """One plain process with this job."""
    return train(1, steps=steps, microbatches=MICROBATCHES)


def kill(run: rs.Run, ranks: tuple[int, ...]) -> None:
    status = run.status()
    for rank in ranks:
        os.kill(status.pids[status.workers[rank]], signal.SIGKILL)


def test_killed_workers_are_replaced_and_the_weights_are_those_of_an_undisturbed_run(tmp_path: Path) -> None:
    chaotic = trainer(tmp_path, (2, 4), failure=rs.FailureConfig(hang_timeout_s=PATIENT_S))
    chaotic.faults = waiting(tmp_path, (2, 3), (STEPS // 2, 4))
    run = chaotic.start()
    wait_until(lambda: run.status().step >= 3 and len(run.status().workers) == 4, "step 3")
    members = run.status().workers
    kill(run, (1,))
    wait_until(lambda: len(run.status().workers) == 3, "going on with 3")
    wait_until(lambda: len(run.status().workers) == 4 and run.status().phase == "training", "the replacement", 120)
    assert set(run.status().workers) - set(members)
    kill(run, (0, 2))
    result = run.wait(240)
    report = result.report()
    assert len(report.summary.recoveries) == 2
    assert result.fingerprint == undisturbed().fingerprint
    assert report.ledger is not None
    assert report.ledger.ok
    assert (report.ledger.samples_lost, report.ledger.samples_repeated) == (0, 0)
    assert not report.summary.differences
    assert_no_slot_is_leaked()


@pytest.mark.long  # test_checkpoints.py has this for a run that is stopped with a checkpoint
def test_a_stopped_run_is_resumed_at_another_size_with_the_same_bits(tmp_path: Path) -> None:
    saves = rs.CheckpointConfig(every_steps=3, keep_last=2)
    run = trainer(tmp_path, 4, checkpoint=saves).start()
    wait_until(lambda: run.status().step >= 5, "step 5")
    run.stop()
    with pytest.raises(RunFailed, match=r"goes on from its checkpoint of step \d+"):
        run.wait(240)
    result = trainer(tmp_path, 3, checkpoint=saves).fit(progress=False)
    assert result.fingerprint == undisturbed().fingerprint
    ledger = result.report().ledger
    assert ledger is not None
    assert ledger.ok
    again = trainer(tmp_path, 2, checkpoint=saves).fit(progress=False)
    assert again == result  # finished already: nothing is started
    assert_no_slot_is_leaked()


def test_a_run_is_not_resumed_with_another_batch(tmp_path: Path) -> None:
    first = trainer(tmp_path, 1, steps=2)
    fit(first)
    first.batch = rs.BatchConfig(global_batch_size=4, microbatch_size=2, seed=5)
    first.run = rs.RunConfig(name="job", storage_path=str(tmp_path), max_steps=4)
    with pytest.raises(ConfigError, match="was started with batch="):
        fit(first)
