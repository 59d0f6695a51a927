"""Gradient bytes that workers of several nodes send, counted where the real exchange hands them over."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

import raysharded as rs
from raysharded.actors.reduction.gradient_exchange import hosts_of
from raysharded.config import Accumulation, DtypeName
from raysharded.layout import Mesh
from raysharded.planning.memory.footprint import Setting
from raysharded.planning.memory.partial_sums import schedule_of
from raysharded.planning.models.shapes import ADAMW, ModelShapes, ParameterShape, UnitShape
from raysharded.planning.traffic.intra_host import is_adding, sent_in_group
from raysharded.planning.traffic.worker_traffic import worker_traffic
from tests.actors.reduction.test_gradient_exchange import CHUNK, gradients, together

_BYTES = {torch.float32: 4, torch.bfloat16: 2}


@given(
    on_each=st.lists(st.integers(1, 4), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) <= 8),
    num_microbatches=st.integers(1, 17),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    accumulation=st.sampled_from(["sharded", "local"]),
)
@settings(max_examples=60, deadline=None)
def test_the_exchange_sends_as_many_bytes_as_are_counted(
    on_each: list[int], num_microbatches: int, dtype: torch.dtype, accumulation: Accumulation
) -> None:
    nodes = tuple(node for node, count in enumerate(on_each) for _ in range(count))
    assert is_adding(nodes) == bool(hosts_of(nodes))
    if not is_adding(nodes):
        return
    leaves = gradients(num_microbatches, CHUNK * len(nodes), dtype)
    between = together(leaves, nodes, hosts_of(nodes), accumulation)[1].bytes_between
    to_others = together(leaves, range(len(nodes)), hosts_of(nodes), accumulation)[1].bytes_between
    sent = sent_in_group(schedule_of(Mesh(shards=len(nodes)), num_microbatches, accumulation), 0, nodes)
    leaf_bytes = 4 if accumulation == "local" else _BYTES[dtype]  # sums are float32
    assert CHUNK * sum(4 * each.sums_between for each in sent) == between
    assert CHUNK * sum(leaf_bytes * each.leaves + 4 * each.sums for each in sent) == to_others


def setting(num_microbatches: int, dtype: DtypeName | None, accumulation: Accumulation, rows: int) -> Setting:
    weight = ParameterShape(name="w", shape=(rows, CHUNK), slots=ADAMW)
    engine = rs.EngineConfig(param_dtype=dtype, reduce_dtype=dtype or "float32", accumulation=accumulation)
    shapes = ModelShapes(units=(UnitShape(name="", parameters=(weight,)),))
    return Setting(shapes=shapes, num_microbatches=num_microbatches, engine=engine)


@pytest.mark.parametrize("accumulation", ["sharded", "local"])
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("nodes", "per_node", "microbatches"), [(2, 2, 8), (2, 3, 12), (3, 2, 7), (4, 2, 5), (1, 4, 8), (4, 1, 9)]
)
def test_the_plan_has_what_leaves_a_node(
    nodes: int, per_node: int, microbatches: int, dtype: DtypeName | None, accumulation: Accumulation
) -> None:
    workers = nodes * per_node
    planned = setting(microbatches, dtype, accumulation, rows=workers)
    of_rank = [rank // per_node for rank in range(workers)]
    leaves = gradients(microbatches, CHUNK * workers, torch.bfloat16 if dtype else torch.float32)
    board = together(leaves, of_rank, hosts_of(of_rank), accumulation)[1]
    found = [
        worker_traffic(planned, Mesh(shards=workers), workers_per_node=per_node, rank=rank).between["reduction"]
        for rank in range(workers)
    ]
    assert sum(found) == pytest.approx(board.bytes_between, abs=workers / 2)  # averages are rounded


def test_with_workers_that_add_first_one_sum_leaves_a_node_for_all_their_gradients() -> None:
    mesh, planned = Mesh(shards=16), setting(16, None, "sharded", rows=16)
    found = worker_traffic(planned, mesh, workers_per_node=8)
    alone = worker_traffic(planned, mesh, workers_per_node=1)
    assert alone.between["reduction"] == alone.sent["reduction"] == 15 * 4 * CHUNK
    assert found.between["reduction"] == alone.sent["reduction"] * 8 // 15 // 8
