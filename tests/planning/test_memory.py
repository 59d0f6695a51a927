"""The pure model: laws, speed, and its results for layouts."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

import raysharded as rs
from raysharded import numerics
from raysharded.actors.numerics.grad_norm import NORM_WORDS
from raysharded.actors.numerics.step_consensus import Contribution, Flags, agree
from raysharded.actors.numerics.summation_tree import TreeSum
from raysharded.errors import ConfigError
from raysharded.layout import Mesh
from raysharded.layout.mesh import layouts_of
from raysharded.planning.memory.footprint import KINDS, Setting, worker_memory
from raysharded.planning.memory.nccl_buffers import CHANNEL_BYTES, RING_BYTES, nccl_bytes
from raysharded.planning.memory.partial_sums import own_sums, rounds_of, rounds_per_step, schedule_of
from raysharded.planning.models.hf_config import parse_config
from raysharded.planning.models.shapes import ADAMW, ModelShapes, ParameterShape, UnitShape
from raysharded.planning.search import Cluster, option
from raysharded.planning.trace import OUTSIDE, Phase, Trace, repeat_unit
from raysharded.planning.traffic.worker_traffic import AGREEMENT_WORDS, SUM_WORDS, worker_traffic
from tests.planning.configs import LLAMA_8B

SEVEN_ROWS = ModelShapes(
    units=(
        UnitShape(name="block", parameters=(ParameterShape(name="block.w", shape=(7, 10), slots=ADAMW),)),
        UnitShape(name="", parameters=(ParameterShape(name="w", shape=(5,), slots=ADAMW),)),
    )
)


def test_a_worker_by_hand() -> None:
    memory = worker_memory(Setting(shapes=SEVEN_ROWS, num_microbatches=8), Mesh(replicas=1, shards=2), rank=0)
    assert memory.kinds["parameters"] == 4 * (4 * 10 + 3)  # 4 of 7 rows, 3 of 5
    assert memory.kinds["snapshots"] == 2 * (3 * (192 + 64) + 2 * 64)  # pieces of 160 and 12 bytes, two step counts
    assert memory.kinds["mirrors"] == 2 * (3 * (128 + 64) + 2 * 64)  # 3 rows and 2


def test_the_replicas_exchange_by_hand() -> None:
    setting, layout = Setting(shapes=SEVEN_ROWS, num_microbatches=12), Mesh(replicas=3, shards=2)
    chunk = 4 * (4 * 10 + 3)  # one sum of shard size, in float32
    assert [own_sums(layout, 12, "sharded", rank) for rank in range(6)] == [1] * 6  # four microbatches each: one node
    traffic = worker_traffic(setting, layout)
    part = 4 * (14 + 1)  # of the 40 and the 3 numbers of a shard a third each, filled up
    assert traffic.sent["replicas"] == (1 + 1) * part * 2
    assert traffic.sent["reduction"] == 2 * chunk  # two rounds, to one other worker
    assert traffic.sent["all_gather"] == 2 * (2 * 160 + 12)  # the block twice a round, the root once
    assert traffic.sent["mirror"] == 0


@pytest.mark.parametrize("layout", [Mesh(replicas=1, shards=20), Mesh(replicas=20, shards=1)])
def test_more_workers_than_microbatches_can_be_planned(layout: Mesh) -> None:
    setting = Setting(shapes=SEVEN_ROWS, num_microbatches=3)
    assert rounds_per_step(layout, 3) == 1
    assert worker_memory(setting, layout).total > 0
    assert worker_traffic(setting, layout).sent["agreement"] > 0


@pytest.mark.parametrize("workers", [8, 12])
def test_replicas_need_no_mirrors_and_more_memory(workers: int) -> None:
    setting = Setting(shapes=parse_config(LLAMA_8B, "it").model(), num_microbatches=64)
    found = [worker_memory(setting, layout) for layout in layouts_of(workers)]
    assert all(set(memory.kinds) == set(KINDS) for memory in found)
    assert [memory.kinds["mirrors"] > 0 for memory in found] == [True] + [False] * (len(found) - 1)
    assert [memory.device for memory in found] == sorted(memory.device for memory in found)


def test_more_workers_need_no_more_memory_each() -> None:
    setting = Setting(shapes=parse_config(LLAMA_8B, "it").model(), num_microbatches=512)
    kinds = ("parameters", "optimizer", "snapshots")
    found = [worker_memory(setting, Mesh(replicas=1, shards=2**n)) for n in range(1, 11)]
    for kind in kinds:
        sizes = [memory.kinds[kind] for memory in found]
        assert sizes == sorted(sizes, reverse=True)


def test_a_thousand_layouts_take_seconds() -> None:
    """A fifth of them, in a fifth of ten seconds."""
    setting = Setting(
        shapes=parse_config(LLAMA_8B, "it").model(),
        num_microbatches=512,
        engine=rs.EngineConfig(param_dtype="bfloat16"),
    )
    start = time.process_time()
    for workers in range(1, 1001, 5):
        worker_memory(setting, Mesh(replicas=1, shards=workers), rank=0)
    assert time.process_time() - start < 10 / 5


@given(leaves=st.integers(1, 70), replicas=st.integers(1, 5), shards=st.integers(1, 5))
@settings(max_examples=200)
def test_sums_that_are_carried_are_those_of_the_tree(leaves: int, replicas: int, shards: int) -> None:
    layout = Mesh(replicas=replicas, shards=shards)
    schedule = schedule_of(layout, leaves, "sharded")
    for replica in range(replicas):
        tree: TreeSum[int] = TreeSum(leaves, lambda a, b: a + b)
        carried = [0]
        for index in range(schedule.num_rounds(replica)):
            for rank in layout.group(replica):
                leaf = schedule.microbatch_of(rank, index)
                if leaf is not None:
                    tree.add((0, leaf), 1)
            carried.append(count(tree))
        rank = layout.group(replica)[0]
        found = rounds_of(layout, leaves, "sharded", False, rank)
        assert [each.before for each in found] == carried[:-1]
        assert [each.after for each in found] == [*carried[1:-1], 0]
        assert carried[-1] == own_sums(layout, leaves, "sharded", rank)


def count(tree: TreeSum[int]) -> int:
    found: list[int] = []
    tree.map_waiting(lambda value: found.append(value) or value)  # type: ignore[func-returns-value]
    return len(found)


def test_rounds_are_those_of_the_busiest_group() -> None:
    for layout in layouts_of(12):
        schedule = schedule_of(layout, 50, "sharded")
        assert rounds_per_step(layout, 50) == max(map(schedule.num_rounds, range(layout.replicas)))


def test_a_repeated_unit_leaves_as_much_for_backward_each_time() -> None:
    phases = (
        Phase(unit=1, backward=False, start=0, peak=3, end=2),
        Phase(unit=0, backward=False, start=2, peak=12, end=7),
        Phase(unit=OUTSIDE, backward=False, start=7, peak=9, end=8),
        Phase(unit=0, backward=True, start=8, peak=20, end=6, ends_unit=True),
        Phase(unit=1, backward=True, start=3, peak=5, end=1),
    )
    trace = repeat_unit(Trace(phases=phases, flops=10.0), 0, 3, 4.0)
    assert trace.flops == 18.0
    assert [(p.unit, p.start, p.peak) for p in trace.phases] == [
        (3, 0, 3),
        (0, 2, 12),
        (1, 7, 17),
        (2, 12, 22),
        (OUTSIDE, 17, 19),
        (2, 18, 30),
        (1, 13, 25),
        (0, 8, 20),
        (3, 3, 5),
    ]


def test_a_replica_on_one_node_sends_only_sums_to_others() -> None:
    setting = Setting(shapes=parse_config(LLAMA_8B, "it").model(), num_microbatches=64)
    flat = worker_traffic(setting, Mesh(replicas=1, shards=16), workers_per_node=8)
    inside = worker_traffic(setting, Mesh(replicas=2, shards=8), workers_per_node=8)
    assert inside.between["all_gather"] == inside.between["reduction"] == inside.sent["mirror"] == 0
    assert inside.between["replicas"] == inside.sent["replicas"] > 0
    assert 0 < inside.total_between < flat.total_between
    rounds, gradient = 4, 4 * setting.shapes.num_parameters
    assert flat.between["reduction"] == rounds * gradient // 16  # of the one sum of 8 workers, half for other nodes


@pytest.mark.parametrize("num_metrics", [0, 3])
def test_the_agreement_is_as_long_as_the_real_one(num_metrics: int) -> None:
    sent: list[int] = []

    def sum_over_workers(words: torch.Tensor) -> torch.Tensor:
        sent.append(len(words))
        return words

    own = Contribution(
        microbatches=(0,),
        values=np.ones((1, 2 + 2 * num_metrics)),
        metric_names=tuple(map(str, range(num_metrics))),
        norm_words=torch.zeros(NORM_WORDS, dtype=torch.int64),
        read_digest=(0, 0),
        num_reads=0,
        flags=Flags(),
    )
    agree(own, 100, sum_over_workers, numbers=numerics.RULES["numbers"].listed[-1])
    assert sent == [AGREEMENT_WORDS + SUM_WORDS * 2 * (1 + num_metrics)]


def test_layouts_refuse_what_is_none() -> None:
    with pytest.raises(ConfigError, match="workers=0: give 1 or more"):
        layouts_of(0)
    with pytest.raises(ConfigError, match="all must be 1 or more"):
        Mesh(replicas=0, shards=3)


@pytest.mark.parametrize(
    ("layout", "per_node", "channels"),
    [
        (Mesh(shards=8), 8, 7 * 32),
        (Mesh(shards=64), 8, 7 * 32 + (7 + 8) * 2),
        (Mesh(shards=63), 8, 7 * 32 + (7 + 8) * 2),
        (Mesh(shards=8), 1, 7 * 2),
        (Mesh(replicas=4, shards=8), 8, 7 * 32 + 3 * 2),
        (Mesh(shards=16, tensor=2), 8, 3 * 32 + 4 * 2),
    ],
)
def test_the_buffers_of_nccl_are_counted_by_peer_and_channel(layout: Mesh, per_node: int, channels: int) -> None:
    setting = Setting(shapes=SEVEN_ROWS, num_microbatches=8, on_gpu=True)
    assert nccl_bytes(setting, layout, per_node) == RING_BYTES + channels * CHANNEL_BYTES
    fast = replace(setting, engine=rs.EngineConfig(reduction="fast"))
    assert nccl_bytes(fast, layout, per_node) == RING_BYTES
    assert nccl_bytes(replace(setting, on_gpu=False), layout, per_node) == 0


def test_a_report_of_eight_gpus_is_met_and_a_plan_has_it_on_the_device() -> None:
    setting = Setting(shapes=SEVEN_ROWS, num_microbatches=8, on_gpu=True)
    found = option(setting, Cluster(workers=8, workers_per_node=8), Mesh(shards=8))
    assert found.memory.kinds["communicators"] == pytest.approx(4.34e9, rel=1e-6)
    without = worker_memory(setting, Mesh(shards=8))
    assert found.memory.device == without.device + found.memory.kinds["communicators"]
    assert found.memory.host == without.host
    alone = option(setting, Cluster(workers=1, workers_per_node=8), Mesh(shards=1))
    assert alone.memory.kinds["communicators"] == 0
