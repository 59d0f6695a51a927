"""Parity in real processes, on nodes of several workers each: ranks of a node follow each other, and it may die."""

from __future__ import annotations

from typing import Any

import pytest

import raysharded as rs
from tests.training.harness import SmallTask, train

pytestmark = pytest.mark.procs


def test_a_node_of_two_workers_that_dies_is_computed_from_the_others_memory() -> None:
    engine = rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 1)))
    kills = [(0, 3, "backward"), (1, 3, "backward")]
    settings: dict[str, Any] = {"task": SmallTask(), "steps": 3, "microbatches": 6}
    outcome = train(6, nodes="aabbcc", engine=engine, kills=kills, **settings)
    assert outcome.bits == train(1, **settings).bits
    assert len(outcome.of("worker_lost")) == 2
    assert outcome.of("generation")[-1]["source"] == "memory"
