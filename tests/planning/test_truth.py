"""The plan against real workers: memory by kind and at most, and every byte that they send."""

from __future__ import annotations

from functools import lru_cache

import pytest
from torch import nn

import raysharded as rs
from raysharded.layout import Mesh
from raysharded.planning.measuring import measure
from raysharded.planning.memory import Setting, optimizer_bytes, snapshot_bytes, worker_memory
from raysharded.planning.sums import rounds_of
from raysharded.planning.traffic import worker_traffic
from raysharded.planning.units import unit_bytes
from raysharded.task import Strategy
from tests.engine.harness import Gpt, GptTask, Tokens
from tests.planning.models import LlamaTask, OddTask
from tests.planning.observed import Seen, observe

MICROBATCHES = 7
"""Groups get blocks of different lengths, with several partial sums each."""


class Cut(GptTask):
    """Of three blocks one is gathered once, one is whole on every worker, and one is as usual."""

    def build_model(self) -> nn.Module:
        return Gpt(layers=3)

    def strategy(self, name: str, module: nn.Module) -> Strategy | None:
        return {"blocks.0": "gradients", "blocks.1": "replicate"}.get(name)  # type: ignore[return-value]


TASKS: dict[str, tuple[rs.Task, rs.EngineConfig, int]] = {
    "gpt": (GptTask(), rs.EngineConfig(), 2),
    "odd": (OddTask(), rs.EngineConfig(), 2),
    "llama": (LlamaTask(), rs.EngineConfig(activation_checkpointing=True), 0),
    "cut": (Cut(), rs.EngineConfig(), 2),
}
"""Task, engine, number of metrics."""
OTHER_ENGINES = {
    "bfloat16 on the wire": rs.EngineConfig(param_dtype="bfloat16", reduce_dtype="bfloat16"),
    "local": rs.EngineConfig(accumulation="local"),
    "kept, without mirrors": rs.EngineConfig(reshard_after_forward=False, mirrors=False),
    "fast": rs.EngineConfig(reduction="fast"),
}

pytestmark = [pytest.mark.procs, pytest.mark.slow]


def mesh(text: str) -> Mesh:
    replicas, shards = map(int, text.split("x"))
    return Mesh(replicas=replicas, shards=shards)


@lru_cache
def planned(task: rs.Task, engine: rs.EngineConfig) -> Setting:
    data = Tokens()
    shapes, trace = measure(task, engine, [data[0], data[1]])
    return Setting(shapes=shapes, num_microbatches=MICROBATCHES, engine=engine, trace=trace)


def check(task: rs.Task, engine: rs.EngineConfig, layout: Mesh, num_metrics: int) -> None:
    setting = planned(task, engine)
    seen = observe(layout, task, engine=engine, microbatches=MICROBATCHES)
    check_kinds(setting, layout, seen)
    for rank, each in seen.items():
        expected = worker_traffic(setting, layout, rank=rank, num_metrics=num_metrics).sent
        assert {kind: sent for kind, sent in expected.items() if sent} == {k: v for k, v in each.sent.items() if v}
        assert worker_memory(setting, layout, rank=rank).total >= 0.99 * each.peak
    most = max(each.peak for each in seen.values())
    assert worker_memory(setting, layout).total == pytest.approx(most, rel=0.05)


def check_kinds(setting: Setting, layout: Mesh, seen: dict[int, Seen]) -> None:
    """The bytes of what has a name are equal, on every rank."""
    shapes, engine, shards = setting.shapes, setting.engine, layout.shards
    units = unit_bytes(shapes, shards, engine)
    has_mirrors = engine.mirrors and layout.replicas == 1 and shards > 1
    frozen = [p for p in shapes.parameters if not p.trainable]
    for rank, each in seen.items():
        shard = layout.shard_of(rank)
        mirror = snapshot_bytes(shapes, shards, (shard - 1) % shards) if has_mirrors else 0
        frozen_bytes = sum(-(-p.shape[0] // shards) * p.size_bytes // p.shape[0] for p in frozen)
        assert each.kinds["parameters"] == units.shard.sum() - frozen_bytes
        assert each.kinds["gradients"] == units.gradient.sum()
        assert each.kinds["optimizer"] == optimizer_bytes(shapes, shards, shard)
        assert each.kinds["snapshots"] == 2 * snapshot_bytes(shapes, shards, shard)
        assert each.kinds["mirrors"] == 2 * mirror
        if engine.reduction == "exact":
            assert each.kinds["accumulators"] == accumulated(setting, layout, rank)


def accumulated(setting: Setting, layout: Mesh, rank: int) -> int:
    """The most that is carried from round to round, of all units."""
    units, mode = unit_bytes(setting.shapes, layout.shards, setting.engine), setting.engine.accumulation
    whole = units.is_replicated
    parts = layout.shards if mode == "local" else 1
    carried = zip(
        *(
            rounds_of(layout, MICROBATCHES, mode, units.sums_are_copies, rank, replicated)
            for replicated in (False, True)
        ),
        strict=True,
    )
    cut_bytes, whole_bytes = units.sum_chunk[~whole].sum() * parts, units.sum_chunk[whole].sum()
    return max(int(cut.after * cut_bytes + own.after * whole_bytes) for cut, own in carried)


LAYOUTS = {
    "gpt": ("1x3", "2x2", "3x1"),
    "odd": ("1x1", "1x3", "2x2"),
    "llama": ("1x1", "2x2", "3x1"),
    "cut": ("2x2",),
}


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name in TASKS for layout in LAYOUTS[name]])
def test_memory_is_within_5_percent_and_traffic_is_what_was_counted(name: str, layout: str) -> None:
    task, engine, num_metrics = TASKS[name]
    check(task, engine, mesh(layout), num_metrics)


@pytest.mark.parametrize(
    ("name", "layout"),
    [("bfloat16 on the wire", "2x1"), ("local", "2x2"), ("kept, without mirrors", "1x2"), ("fast", "2x2")],
)
def test_so_they_are_with_other_settings(name: str, layout: str) -> None:
    check(GptTask(), OTHER_ENGINES[name], mesh(layout), num_metrics=2)
