"""The plan against real workers: memory by kind and at most, and every byte that they send."""

from __future__ import annotations

from functools import lru_cache

import pytest
from torch import nn

import raysharded as rs
from raysharded.layout import Mesh
from raysharded.layout.mesh import mesh_of
from raysharded.planning.memory.footprint import Setting, local_setting, optimizer_bytes, snapshot_bytes, worker_memory
from raysharded.planning.memory.partial_sums import rounds_of
from raysharded.planning.memory.units import unit_bytes
from raysharded.planning.tracing.measurement import measure
from raysharded.planning.traffic.worker_traffic import worker_traffic
from raysharded.task import Strategy
from tests.cases import tried_each_time
from tests.planning.models import LlamaTask, OddTask
from tests.planning.observed import Seen, observe
from tests.training.harness import Gpt, GptTask, Tokens
from tests.training.llama import LlamaTask as ParallelLlama


def microbatches_of(layout: Mesh) -> int:
    """Groups get blocks of different lengths, and three of them several partial sums each."""
    return {2: 3, 3: 7}.get(layout.world_size, 5)


class Cut(GptTask):
    """One of three blocks is gathered once, one is whole on every worker, and one has the defaults."""

    def build_model(self) -> nn.Module:
        return Gpt(layers=3)

    def strategy(self, name: str, module: nn.Module) -> Strategy | None:
        return {"blocks.0": "gradients", "blocks.1": "replicate"}.get(name)  # type: ignore[return-value]


TASKS: dict[str, tuple[rs.Task, rs.EngineConfig, int]] = {
    "gpt": (GptTask(), rs.EngineConfig(), 2),
    "odd": (OddTask(), rs.EngineConfig(), 2),
    "llama": (LlamaTask(), rs.EngineConfig(activation_checkpointing=True), 0),
    "cut": (Cut(), rs.EngineConfig(), 2),
    "recomputed": (Cut(), rs.EngineConfig(activation_checkpointing=True), 2),
}
"""Task, engine, number of metrics."""
IN_ONE = "bfloat16 on the wire, local, kept, without mirrors"
OTHER_ENGINES = {
    "bfloat16 on the wire": rs.EngineConfig(param_dtype="bfloat16", reduce_dtype="bfloat16"),
    "local": rs.EngineConfig(accumulation="local"),
    "local, kept, without mirrors": rs.EngineConfig(accumulation="local", reshard_after_forward=False, mirrors=False),
    "kept, without mirrors": rs.EngineConfig(reshard_after_forward=False, mirrors=False),
    "fast": rs.EngineConfig(reduction="fast"),
    IN_ONE: rs.EngineConfig(
        param_dtype="bfloat16",
        reduce_dtype="bfloat16",
        accumulation="local",
        reshard_after_forward=False,
        mirrors=False,
    ),
}

pytestmark = [pytest.mark.procs, pytest.mark.slow]


def mesh(text: str) -> Mesh:
    replicas, data_shards, *degree = map(int, text.split("x"))
    tensor = degree[0] if degree else 1
    return mesh_of(replicas, data_shards * tensor, tensor)


@lru_cache
def planned(task: rs.Task, engine: rs.EngineConfig, microbatches: int, degree: int) -> Setting:
    data = Tokens()
    shapes, trace = measure(task, engine, [data[0], data[1]], degree=degree)
    return Setting(shapes=shapes, num_microbatches=microbatches, engine=engine, trace=trace, degree=degree)


def check(
    task: rs.Task, engine: rs.EngineConfig, layout: Mesh, num_metrics: int, microbatches: int | None = None
) -> None:
    microbatches = microbatches or microbatches_of(layout)
    setting = planned(task, engine, microbatches, layout.tensor)
    seen = observe(layout, task, engine=engine, microbatches=microbatches)
    check_kinds(setting, layout, seen)
    for rank, each in seen.items():
        expected = worker_traffic(setting, layout, rank=rank, num_metrics=num_metrics).sent
        assert {kind: sent for kind, sent in expected.items() if sent} == {k: v for k, v in each.sent.items() if v}
        assert worker_memory(setting, layout, rank=rank).total >= 0.99 * each.peak
    most = max(each.peak for each in seen.values())
    assert worker_memory(setting, layout).total == pytest.approx(most, rel=0.05)


def check_kinds(setting: Setting, layout: Mesh, seen: dict[int, Seen]) -> None:
    """Check that the bytes of all named kinds are equal, on every rank."""
    shapes, engine, data = setting.shapes, setting.engine, layout.data
    has_mirrors = engine.mirrors and layout.replicas == 1 and layout.shards > 1
    for rank, each in seen.items():
        local = local_setting(setting, layout.tensor_of(rank))
        units = unit_bytes(local.shapes, data.shards, engine)
        shard, data_rank = layout.shard_of(rank), layout.data_rank_of(rank)
        frozen = [p for p in local.shapes.parameters if not p.trainable]
        frozen_bytes = sum(-(-p.shape[0] // data.shards) * p.size_bytes // p.shape[0] for p in frozen)
        mirrored = (shard - layout.apart) % layout.shards
        snapshot, mirror = (snapshot_bytes(shapes, layout.shards, of, layout.tensor) for of in (shard, mirrored))
        assert each.kinds["parameters"] == units.shard.sum() - frozen_bytes
        assert each.kinds["gradients"] == units.gradient.sum()
        assert each.kinds["optimizer"] == optimizer_bytes(local.shapes, data.shards, data.shard_of(data_rank))
        assert each.kinds["snapshots"] == 2 * snapshot
        assert each.kinds["mirrors"] == 2 * mirror * has_mirrors
        if engine.reduction == "exact":
            assert each.kinds["accumulators"] == accumulated(local, data, data_rank)


def accumulated(setting: Setting, layout: Mesh, rank: int) -> int:
    """The most bytes that are carried from round to round, of all units."""
    units, mode = unit_bytes(setting.shapes, layout.shards, setting.engine), setting.engine.accumulation
    whole = units.is_replicated
    parts = layout.shards if mode == "local" else 1
    carried = zip(
        *(
            rounds_of(layout, setting.num_microbatches, mode, units.sums_are_copies, rank, replicated)
            for replicated in (False, True)
        ),
        strict=True,
    )
    cut_bytes, whole_bytes = units.sum_chunk[~whole].sum() * parts, units.sum_chunk[whole].sum()
    return max(int(cut.after * cut_bytes + own.after * whole_bytes) for cut, own in carried)


LAYOUTS = {
    "gpt": ("2x2", "3x1", "1x3"),
    "odd": ("1x1", "1x3", "2x2"),
    "llama": ("1x1", "3x1", "2x2", "1x2"),
    "cut": ("2x2", "1x2"),
    "recomputed": ("1x2",),
}
EACH_TIME = [("odd", "2x2"), ("recomputed", "1x2")]


@pytest.mark.parametrize(
    ("name", "layout"), tried_each_time(EACH_TIME, of=[(name, layout) for name in TASKS for layout in LAYOUTS[name]])
)
def test_memory_is_within_5_percent_and_traffic_is_what_was_counted(name: str, layout: str) -> None:
    task, engine, num_metrics = TASKS[name]
    check(task, engine, mesh(layout), num_metrics)


OTHER_LAYOUTS = [
    ("bfloat16 on the wire", "2x1"),
    ("local, kept, without mirrors", "1x2"),
    ("fast", "2x2"),
    ("local", "2x2"),
    ("kept, without mirrors", "1x2"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "layout"), OTHER_LAYOUTS)
def test_so_they_are_with_other_settings(name: str, layout: str) -> None:
    check(GptTask(), OTHER_ENGINES[name], mesh(layout), num_metrics=2)


@pytest.mark.parametrize(
    ("name", "layout"),
    tried_each_time(
        [(IN_ONE, "2x2"), ("fast", "1x2")],
        of=[(IN_ONE, "2x2"), ("fast", "1x2"), *OTHER_LAYOUTS[:2]],
    ),
)
def test_so_they_are_with_other_settings_of_a_small_model(name: str, layout: str) -> None:
    check(OddTask(), OTHER_ENGINES[name], mesh(layout), num_metrics=2)


@pytest.mark.parametrize("layout", tried_each_time(["1x1x2"], of=["1x1x2", "1x2x2", "2x1x2"]))
def test_so_they_are_with_tensor_parallelism(layout: str) -> None:
    layers = 1 if layout == "1x1x2" else 2
    check(ParallelLlama(layers=layers), rs.EngineConfig(), mesh(layout), num_metrics=0, microbatches=3)
