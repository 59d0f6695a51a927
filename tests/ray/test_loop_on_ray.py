"""A custom loop on Ray: the bits of `fit()` with a task on one plain process."""

from __future__ import annotations

from pathlib import Path

import pytest

import raysharded as rs
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan
from tests.ray.driving import MICROBATCHES, STEPS, undisturbed
from tests.ray.leftovers import assert_no_slot_is_leaked
from tests.session.loops import Loop
from tests.training.harness import Collector, samples

pytestmark = [pytest.mark.ray, pytest.mark.slow]


@pytest.mark.usefixtures("cluster")
def test_workers_that_are_lost_in_a_custom_loop_change_no_bit(tmp_path: Path) -> None:
    """One is killed in the backward of a step, another as it applies a later one; replacements join."""
    kills = tuple(
        Fault(worker=WorkerId(worker), step=step, phase=phase)
        for worker, step, phase in [(1, 4, "backward"), (2, 8, "apply")]
    )
    trainer = rs.ElasticTrainer(
        train_fn=Loop(),
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=2 * MICROBATCHES, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=(1, 3), cpus_per_worker=0.5),
        run=rs.RunConfig(name="looped", storage_path=str(tmp_path), max_steps=STEPS),
    )
    trainer.faults = FaultPlan(faults=kills, folder=str(tmp_path))
    seen = Collector()
    result = trainer.fit(seen)
    assert all(trainer.faults.fired(kill) for kill in kills)
    numbers = tuple(seen.numbers[step] for step in range(1, STEPS + 1))
    assert (repr(numbers), result.fingerprint) == undisturbed().bits
    assert_no_slot_is_leaked()
