"""Parity in real processes, on nodes of several workers each: ranks of a node follow each other, and it may die."""

from __future__ import annotations

import pytest

import raysharded as rs
from tests.training.harness import train

pytestmark = pytest.mark.procs


def test_a_node_of_two_workers_that_dies_is_computed_from_the_others_memory() -> None:
    engine = rs.EngineConfig(redundancy=rs.Redundancy(parity=(2, 1)))
    kills = [(0, 3, "backward"), (1, 3, "backward")]
    outcome = train(6, nodes="aabbcc", engine=engine, kills=kills, steps=4, microbatches=6)
    assert outcome.bits == train(1, steps=4, microbatches=6).bits
    assert len(outcome.of("worker_lost")) == 2
    assert outcome.of("generation")[-1]["source"] == "memory"
