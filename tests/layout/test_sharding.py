"""The cut of the state over ranks: its laws, and FSDP2 itself as the oracle."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, strategies as st

from raysharded.errors import ConfigError
from raysharded.layout import ALIGNMENT, Mesh, StateSpec, TensorSpec, row_range, shard_map
from raysharded.layout.sharding import buffer_origins

SHAPES = [(1,), (2, 3), (5,), (7, 2), (8, 4), (16,), (0, 3)]
WORLDS = [1, 2, 3, 4, 5, 7, 8, 9]

MESHES = [(1, world) for world in WORLDS] + [(2, 1), (2, 2), (2, 3), (3, 2), (2, 5)]
"""(replicas, shards)"""

ORACLE = """
import json, sys, torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.testing._internal.distributed.fake_pg import FakeStore

shapes, meshes = json.loads(sys.argv[1])
found = []
for replicas, shards in meshes:
    for rank in range(replicas * shards):
        dist.init_process_group("fake", rank=rank, world_size=replicas * shards, store=FakeStore())
        model = torch.nn.Module()
        for i, shape in enumerate(shapes):
            model.register_parameter(f"p{i}", torch.nn.Parameter(torch.empty(shape, device="meta")))
        if replicas == 1:
            mesh = init_device_mesh("cpu", (shards,))
        else:
            mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
        fully_shard(model, mesh=mesh)
        boxes = []
        for parameter in model.parameters():
            size, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
            boxes.append([list(parameter._local_tensor.shape), list(size), list(offset)])
        found.append([replicas, shards, rank, boxes])
        dist.destroy_process_group()
print(json.dumps(found))
"""


def test_the_cut_is_fsdp2s_and_dtensors_own() -> None:
    """65 pairs of a mesh and a rank, of tensors with empty tails and without rows: FSDP2 says how much a rank has,
    DTensor from where on. With replicas it is FSDP2's hybrid sharding."""
    argument = json.dumps([SHAPES, MESHES])
    command = [sys.executable, "-c", ORACLE, argument]
    result = subprocess.run(command, check=False, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    found = json.loads(result.stdout.splitlines()[-1])
    assert len(found) == sum(replicas * shards for replicas, shards in MESHES)
    for replicas, shards, rank, boxes in found:
        shard = Mesh(replicas=replicas, shards=shards).shard_of(rank)
        for shape, (local, size, offset) in zip(SHAPES, boxes, strict=True):
            start, stop = row_range(shape[0], shards, shard)
            assert [stop - start, *shape[1:]] == local == size, (replicas, shards, rank, shape)
            assert offset[0] == start or start == stop, (replicas, shards, rank, shape)
            assert offset[1:] == [0] * (len(shape) - 1)


@given(st.integers(0, 60), st.integers(1, 70))
def test_the_ranges_of_all_ranks_tile_the_rows(rows: int, world_size: int) -> None:
    ranges = [row_range(rows, world_size, rank) for rank in range(world_size)]
    assert [row for start, stop in ranges for row in range(start, stop)] == list(range(rows))
    lengths = [stop - start for start, stop in ranges if stop > start]
    assert len(set(lengths[:-1])) <= 1
    assert lengths == sorted(lengths, reverse=True)


@given(st.data(), st.integers(1, 9))
def test_the_pieces_of_all_ranks_cover_the_state(data: st.DataObject, world_size: int) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), max_size=5))
    spec = StateSpec(
        tensors=tuple(
            TensorSpec(name=f"t{i}", dtype=data.draw(st.sampled_from(["int8", "float32"])), shape=shape)
            for i, shape in enumerate(shapes)
        )
    )
    times = np.zeros(spec.total_bytes, np.int64)
    table = buffer_origins(spec, world_size, np.arange(world_size))
    for rank in range(world_size):
        shard = shard_map(spec, world_size, rank)
        end = 0
        for i in range(len(shard)):
            tensor, row_start, row_stop = shard.rows(i)
            assert shard.line_start[i] == spec.base[tensor] + row_start * spec.row_bytes[tensor]
            assert shard.line_stop[i] == spec.base[tensor] + row_stop * spec.row_bytes[tensor]
            assert shard.line_stop[i] > shard.line_start[i]
            assert end <= shard.offset[i] < end + ALIGNMENT
            assert shard.offset[i] % ALIGNMENT == 0
            assert shard.offset[i] == table[rank, tensor] + row_start * spec.row_bytes[tensor]
            end = int(shard.offset[i] + shard.line_stop[i] - shard.line_start[i])
            times[shard.line_start[i] : shard.line_stop[i]] += 1
        assert shard.tensor.tolist() == sorted(set(shard.tensor.tolist()))
        assert end <= shard.size_bytes < end + ALIGNMENT
    wanted = np.repeat(np.where(spec.replicated, world_size, 1), spec.nbytes)
    assert times.tolist() == wanted.tolist()


def test_a_rank_that_is_not_there_is_refused() -> None:
    for world_size, rank in ((2, 2), (2, -1), (0, 0)):
        with pytest.raises(ConfigError, match="0 <= rank < world_size"):
            row_range(4, world_size, rank)
