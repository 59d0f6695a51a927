"""The plan against real workers: memory by kind and at most, and every byte that they send."""

from __future__ import annotations

from functools import lru_cache

import pytest

import raysharded as rs
from raysharded.layout import Mesh
from raysharded.planning.measuring import measure
from raysharded.planning.memory import Setting, optimizer_bytes, snapshot_bytes, worker_memory
from raysharded.planning.sums import rounds_of
from raysharded.planning.traffic import worker_traffic
from raysharded.planning.units import unit_bytes
from tests.engine.harness import GptTask, Tokens
from tests.planning.models import LlamaTask, OddTask
from tests.planning.observed import Seen, observe

MICROBATCHES = 8
TASKS: dict[str, tuple[rs.Task, rs.EngineConfig, int]] = {
    "gpt": (GptTask(), rs.EngineConfig(), 2),
    "odd": (OddTask(), rs.EngineConfig(), 2),
    "llama": (LlamaTask(), rs.EngineConfig(activation_checkpointing=True), 0),
}
"""Task, engine, number of metrics."""
OTHER_ENGINES = {
    "bfloat16": rs.EngineConfig(param_dtype="bfloat16"),
    "bfloat16 on the wire": rs.EngineConfig(param_dtype="bfloat16", reduce_dtype="bfloat16"),
    "local": rs.EngineConfig(accumulation="local"),
    "kept": rs.EngineConfig(reshard_after_forward=False),
    "without mirrors": rs.EngineConfig(mirrors=False),
    "fast": rs.EngineConfig(reduction="fast"),
}

pytestmark = [pytest.mark.procs, pytest.mark.slow]


@lru_cache
def planned(task: rs.Task, engine: rs.EngineConfig) -> Setting:
    data = Tokens()
    shapes, trace = measure(task, engine, [data[0], data[1]])
    return Setting(shapes=shapes, num_microbatches=MICROBATCHES, engine=engine, trace=trace)


def check(task: rs.Task, engine: rs.EngineConfig, workers: int, num_metrics: int) -> None:
    setting, layout = planned(task, engine), Mesh(replicas=1, shards=workers)
    seen = observe(workers, task, engine=engine, microbatches=MICROBATCHES)
    check_kinds(setting, workers, seen)
    most = max(each.peak for each in seen.values())
    assert worker_memory(setting, layout).total == pytest.approx(most, rel=0.05)
    for rank, each in seen.items():
        assert worker_memory(setting, layout, rank=rank).total >= 0.99 * each.peak
        expected = worker_traffic(setting, layout, rank=rank, num_metrics=num_metrics).sent
        assert {kind: sent for kind, sent in expected.items() if sent} == {k: v for k, v in each.sent.items() if v}


def check_kinds(setting: Setting, workers: int, seen: dict[int, Seen]) -> None:
    """The bytes of what has a name are equal, on every rank."""
    shapes, engine = setting.shapes, setting.engine
    units = unit_bytes(shapes, workers, engine)
    sums = rounds_of(Mesh(replicas=1, shards=workers), MICROBATCHES, engine.accumulation, units.sums_are_copies)
    frozen = [p for p in shapes.parameters if not p.trainable]
    for rank, each in seen.items():
        mirror = snapshot_bytes(shapes, workers, (rank - 1) % workers) if engine.mirrors and workers > 1 else 0
        frozen_bytes = sum(-(-p.shape[0] // workers) * p.size_bytes // p.shape[0] for p in frozen)
        assert each.kinds["parameters"] == units.shard.sum() - frozen_bytes
        assert each.kinds["gradients"] == units.gradient.sum()
        assert each.kinds["optimizer"] == optimizer_bytes(shapes, workers, rank)
        assert each.kinds["snapshots"] == 2 * snapshot_bytes(shapes, workers, rank)
        assert each.kinds["mirrors"] == 2 * mirror
        if engine.accumulation == "sharded" and engine.reduction == "exact":
            assert each.kinds["accumulators"] == max(r.after for r in sums) * units.sum_chunk.sum()


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("name", TASKS)
def test_memory_is_within_5_percent_and_traffic_is_what_was_counted(name: str, workers: int) -> None:
    task, engine, num_metrics = TASKS[name]
    check(task, engine, workers, num_metrics)


@pytest.mark.parametrize("name", OTHER_ENGINES)
def test_so_they_are_with_other_settings(name: str) -> None:
    check(GptTask(), OTHER_ENGINES[name], 3, num_metrics=2)
