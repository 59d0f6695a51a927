"""The cut of the state over ranks: its laws, and FSDP2 itself as the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from raysharded.errors import ConfigError
from raysharded.layout import ALIGNMENT, Mesh, StateSpec, TensorSpec, row_range, shard_map
from raysharded.layout.sharding import buffer_origins
from tests.forked import in_a_fork
from tests.layout import oracles

SHAPES = [(1,), (2, 3), (5,), (7, 2), (8, 4), (16,), (0, 3)]
WORLDS = [1, 2, 3, 4, 5, 7, 8, 9]

MESHES = [(1, world) for world in WORLDS] + [(2, 1), (2, 2), (2, 3), (3, 2), (2, 5)]
"""(replicas, shards)"""


def test_the_cut_is_fsdp2s_and_dtensors_own() -> None:
    """65 pairs of a mesh and a rank, of tensors with empty tails and without rows: FSDP2 gives the size of a rank's
    part, DTensor its beginning. With replicas it is FSDP2's hybrid sharding."""
    found = in_a_fork(oracles.extents, SHAPES, MESHES)
    assert len(found) == sum(replicas * shards for replicas, shards in MESHES)
    for replicas, shards, rank, own in found:
        shard = Mesh(replicas=replicas, shards=shards).shard_of(rank)
        for shape, (local, size, offset) in zip(SHAPES, own, strict=True):
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
