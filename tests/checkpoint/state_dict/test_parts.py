"""The boxes of a rank are those that torch itself cuts, for every mesh and placement."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from raysharded.checkpoint.state_dict.shard_boxes import held_of, parts_of
from raysharded.checkpoint.state_dict.staging import Piece, batches_of_bytes
from raysharded.errors import CheckpointError

shapes = st.lists(st.integers(0, 12), min_size=1, max_size=3).map(tuple)
meshes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


def placements_for(shape: tuple[int, ...]) -> st.SearchStrategy[Placement]:
    dims = st.integers(0, len(shape) - 1)
    return (
        st.builds(Replicate)
        | st.builds(Shard, dims)
        | st.builds(lambda dim, factor: _StridedShard(dim, split_factor=factor), dims, st.integers(2, 4))
    )


@given(st.data())
def test_the_parts_are_what_torch_computes_and_tile_the_tensor(data: st.DataObject) -> None:
    shape, mesh = data.draw(shapes), data.draw(meshes)
    placements = tuple(data.draw(placements_for(shape)) for _ in mesh)
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape)
    count = torch.zeros(shape, dtype=torch.int64)
    for coordinate in product(*map(range, mesh)):
        parts = parts_of(shape, mesh, coordinate, placements)
        local_shape, offset = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
        assert sum(torch.Size(part.sizes).numel() for part in parts) == torch.Size(local_shape).numel()
        local = torch.full(local_shape, -1)
        for part in parts:
            cells = tuple(slice(o, o + n) for o, n in zip(part.offsets, part.sizes, strict=True))
            part.of(local).copy_(whole[cells])
            count[cells] += 1
        assert (local >= 0).all()
        if parts:
            assert parts[0].offsets == offset
    copies = count.flatten()[0] if count.numel() else 0
    assert (count == copies).all()


def test_strided_shards_are_those_of_chunks_of_chunks() -> None:
    placements = (_StridedShard(0, split_factor=2), Shard(0))
    for rows in (1, 2, 3, 5, 7, 8, 9, 16):
        whole = torch.arange(rows)
        for data, tensor in product(range(2), range(2)):
            outer = [*whole.chunk(2), whole[:0]][tensor]
            expected = [*outer.chunk(2), outer[:0]][data]
            found = [
                whole[part.offsets[0] : part.offsets[0] + part.sizes[0]]
                for part in parts_of((rows,), (2, 2), (data, tensor), placements)
            ]
            assert torch.equal(torch.cat(found) if found else whole[:0], expected)


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(2, dtype=torch.complex128), "w: dtype torch.complex128 cannot be stored"),
        (torch.zeros(2, device="meta"), "w: it is on the meta device"),
        (torch.zeros(2, 2).to_sparse(), "w: a tensor of layout torch.sparse_coo"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(tensor: torch.Tensor, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        held_of("w", tensor)


def test_lazily_conjugated_values_are_stored_as_they_read() -> None:
    held = held_of("w", torch.tensor([1 + 2j, 3 - 1j]).conj())
    [[stored]] = batches_of_bytes([Piece(held, held.parts[0])])
    assert np.frombuffer(stored.data, np.complex64).tolist() == [1 - 2j, 3 + 1j]
