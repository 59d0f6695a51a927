"""Runs with the accelerator's code in real processes: bits, losses, and errors of the device at any call."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

import raysharded as rs
from raysharded.actors.device import accelerator
from tests.actors.device.communicator_double import DoubleAccelerator
from tests.training.harness import Outcome, train

pytestmark = pytest.mark.procs
SETTINGS: dict[str, Any] = {"steps": 4, "microbatches": 4}


def on_double() -> None:
    """In a worker's process: compute on the double of an accelerator."""
    accelerator.use(DoubleAccelerator())


@cache
def on_cpu() -> Outcome:
    return train(1, **SETTINGS)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"shards": 2},
        {"engine": rs.EngineConfig(accumulation="local")},
        {"engine": rs.EngineConfig(audit_every_steps=2)},
    ],
    ids=["shards", "replicas", "local", "audited"],
)
def test_a_worker_that_dies_changes_no_bit(how: dict[str, Any]) -> None:
    workers = 4 if "shards" in how else 3
    disturbed = train(workers, use_gpu=True, prepare=on_double, kills=[(1, 3, "backward")], **how, **SETTINGS)
    assert disturbed.bits == on_cpu().bits
    assert len(disturbed.of("worker_lost")) == 1
