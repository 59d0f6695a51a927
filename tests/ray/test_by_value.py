"""Data whose classes come by value, as Ray sends those of the script, in the process that reads them."""

from __future__ import annotations

import time
from collections import namedtuple
from typing import Any

import pytest
import torch

import raysharded as rs
from raysharded.data.sources import Sources
from tests.data.samples import leave_torch_alone
from tests.forked import readers_as_in_a_worker as readers_as_in_a_worker

pytestmark = [pytest.mark.procs, pytest.mark.usefixtures("readers_as_in_a_worker")]


def data_of_the_script() -> Any:
    """A dataset with classes that no process can import."""
    pair = namedtuple("pair", "x y")  # noqa: PYI024 - as users make them

    class Pairs:
        def __len__(self) -> int:
            return 20

        def __getitem__(self, index: int) -> Any:
            torch.manual_seed(index)
            return pair(torch.rand(30_000), index)

    return Pairs()


def test_data_and_samples_whose_classes_came_by_value_are_read_in_a_process_as_in_a_thread() -> None:
    pytest.importorskip("ray.cloudpickle")
    batch, data = rs.BatchConfig(global_batch_size=4, microbatch_size=2, seed=1), data_of_the_script()
    beside = Sources(data, None, batch, rs.EngineConfig(), leave_torch_alone)
    here = Sources(data, None, batch, rs.EngineConfig(prefetch=False), leave_torch_alone)
    try:
        beside.check()
        for one, other in zip(beside.training.load(3, 1).samples, here.training.load(3, 1).samples, strict=True):
            assert (type(one).__name__, one._fields) == ("pair", ("x", "y"))
            assert (one.y, one.x.tolist()) == (other.y, other.x.tolist())
            assert not one.x.untyped_storage().resizable(), "it lies in shared memory"
        assert beside.process is not None
    finally:
        beside.close()
        here.close()


def test_samples_whose_classes_came_by_value_are_collated_in_a_process() -> None:
    pytest.importorskip("ray.cloudpickle")

    class Pair:
        def __init__(self, index: int) -> None:
            self.ids = torch.arange(index, index + 4)

    def collate(pairs: list[Any]) -> torch.Tensor:
        return torch.stack([pair.ids for pair in pairs])

    batch = rs.BatchConfig(global_batch_size=4, microbatch_size=2, seed=1)
    data, engine = [Pair(index) for index in range(20)], rs.EngineConfig(data_processes=1)
    sources = Sources(data, None, batch, engine, leave_torch_alone, collate=collate)
    try:
        sources.training.plan([(1, 0)])
        deadline = time.monotonic() + 60
        while not vars(sources.training)["_prefetcher"]._ready:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        taken = sources.training.load(1, 0)
        assert taken.batch is not None
        assert torch.equal(taken.batch.value, collate([data[index] for index in taken.ids]))
    finally:
        sources.close()
