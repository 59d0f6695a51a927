"""Shard maps of tensor parallel workers: their laws, and torch's own DTensor and FSDP2 as the oracle."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.errors import ConfigError
from raysharded.layout import StateSpec, TensorSpec, possible_degree, shard_map, strips_of, tensor_specs
from raysharded.layout.sharding import ALIGNMENT, Share, buffer_origins
from tests.cases import examples
from tests.forked import in_a_fork
from tests.layout import oracles

MESHES = [(2, 2), (3, 2), (2, 4), (4, 1)]
"""(data shards, tensor parallel degree)"""


def test_the_cut_is_that_of_parallel_styles_below_fsdp2() -> None:
    """Column-wise and row-wise linears and embeddings, norms and modules without a style, in numbers of rows that
    nothing divides: each worker has the elements that torch's own shards have."""
    found = in_a_fork(oracles.cells, MESHES)
    assert len(found) == sum(shards * tensor for shards, tensor in MESHES)
    assert {dim for *_, tensors in found for _, _, dim, _, _ in tensors} == {None, 0, 1, 2}
    for shards, degree, rank, tensors in found:
        for name, whole, dim, shape, values in tensors:
            strips = strips_of(whole[dim], degree) if dim else 1
            spec = StateSpec(tensors=tensor_specs(name, "float32", tuple(whole), tensor_dim=dim, strips=strips))
            pieces = list(shard_map(spec, shards * degree, rank, degree).pieces(spec))
            cells = np.arange(np.prod(whole)).reshape(whole)
            boxes = [cells[tuple(slice(o, o + s) for o, s in zip(p.offsets, p.sizes, strict=True))] for p in pieces]
            mine = np.concatenate(boxes, axis=dim or 0) if boxes else np.zeros(0)
            assert mine.ravel().tolist() == values, (shards, degree, rank, name)
            assert not boxes or list(mine.shape) == shape


@st.composite
def entries(draw: st.DrawFn, name: str) -> tuple[TensorSpec, ...]:
    dtype = draw(st.sampled_from(["int8", "float32"]))
    if draw(st.booleans()):
        dim, width = draw(st.integers(1, 2)), draw(st.sampled_from([4, 8, 12]))
        shape = draw(st.lists(st.integers(0, 9), min_size=3, max_size=3))
        shape[dim] = width
        return tensor_specs(name, dtype, tuple(shape), tensor_dim=dim, strips=4)
    shape = draw(st.lists(st.integers(0, 12), max_size=3))
    replicated = draw(st.sampled_from([False, False, True]))
    tensor_dim = draw(st.sampled_from([None, 0])) if shape and not replicated else None
    return tensor_specs(name, dtype, tuple(shape), replicated=replicated, tensor_dim=tensor_dim)


@st.composite
def specs(draw: st.DrawFn) -> StateSpec:
    """Tensors of all kinds, for degrees of 1, 2 and 4."""
    parts = [draw(entries(f"t{i}")) for i in range(draw(st.integers(0, 5)))]
    return StateSpec(tensors=sum(parts, ()))


@settings(max_examples=examples(50, of=150), deadline=None)
@given(specs(), st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_the_pieces_of_all_ranks_cover_the_state(spec: StateSpec, shards: int, degree: int) -> None:
    world_size = shards * degree
    times = np.zeros(spec.total_bytes, np.int64)
    table = buffer_origins(spec, world_size, np.arange(world_size), degree)
    for rank in range(world_size):
        shard = shard_map(spec, world_size, rank, degree)
        end = 0
        for i, piece in enumerate(shard.pieces(spec)):
            size = int(shard.line_stop[i] - shard.line_start[i])
            assert size == int(np.prod(piece.sizes, dtype=np.int64)) * piece.tensor.itemsize > 0
            row, row_bytes = shard.row_start[i], spec.row_bytes[shard.tensor[i]]
            assert shard.offset[i] == table[rank, shard.tensor[i]] + row * row_bytes
            assert end <= shard.offset[i] < end + ALIGNMENT
            end = int(shard.offset[i]) + size
            times[shard.line_start[i] : shard.line_stop[i]] += 1
        assert shard.tensor.tolist() == sorted(set(shard.tensor.tolist()))
        assert end <= shard.size_bytes < end + ALIGNMENT
    common = ~spec.replicated & (spec.tensor_dim < 0)
    wanted = np.repeat(np.where(spec.replicated, world_size, np.where(common, degree, 1)), spec.nbytes)
    assert times.tolist() == wanted.tolist()


@settings(max_examples=examples(33, of=100), deadline=None)
@given(specs(), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 3))
def test_the_parts_of_all_tensor_ranks_and_replicas_have_every_piece_once(
    spec: StateSpec, shards: int, degree: int, replicas: int
) -> None:
    times = np.zeros(spec.total_bytes, np.int64)
    for rank in range(shards * degree):
        for replica in range(replicas):
            part = shard_map(spec, shards * degree, rank, degree).part(Share(index=replica, of=replicas))
            for tensor, start, stop in zip(part.tensor, part.line_start, part.line_stop, strict=True):
                times[start:stop] += not spec.replicated[tensor]
    assert times.tolist() == np.repeat((~spec.replicated).astype(int), spec.nbytes).tolist()


def test_common_pieces_are_dealt_out_evenly() -> None:
    spec = StateSpec(tensors=tuple(TensorSpec(name=f"t{i}", dtype="float32", shape=(64, 8)) for i in range(16)))
    parts = [shard_map(spec, 8, rank, 4).part(Share()) for rank in range(8)]
    assert [len(part) for part in parts] == [4] * 8


def test_pieces_are_boxes_of_the_whole_tensor() -> None:
    spec = StateSpec(tensors=tensor_specs("w", "float32", (6, 8), tensor_dim=1, strips=4))
    boxes = [(p.offsets, p.sizes) for p in shard_map(spec, 4, 3, 2).pieces(spec)]
    assert boxes == [((3, 4), (3, 2)), ((3, 6), (3, 2))]


def test_the_number_of_strips_is_a_multiple_of_the_degree_with_many_divisors() -> None:
    assert [strips_of(4096, degree) for degree in (1, 2, 4, 8, 16)] == [16] * 5
    assert [strips_of(768, degree) for degree in (1, 3, 6, 32)] == [16, 12, 12, 32]
    assert strips_of(34, 2) == 2
    assert strips_of(17, 1) == 1
    with pytest.raises(ConfigError, match="7"):
        strips_of(16, 7)


@given(st.integers(1, 300), st.integers(1, 40))
def test_strips_are_of_equal_width(width: int, degree: int) -> None:
    if width % degree:
        with pytest.raises(ConfigError):
            strips_of(width, degree)
        return
    strips = strips_of(width, degree)
    assert width % strips == strips % degree == 0
    assert strips == max([n for n in range(1, 17) if width % n == n % degree == 0], default=degree)


def test_a_degree_that_does_not_divide_the_strips_is_refused_and_those_that_do_are_named() -> None:
    spec = StateSpec(
        tensors=(
            *tensor_specs("wo", "float32", (4, 48), tensor_dim=1, strips=16),
            *tensor_specs("w2", "float32", (4, 48), tensor_dim=1, strips=12),
            *tensor_specs("wq", "float32", (4, 48), tensor_dim=0),
        )
    )
    assert possible_degree(spec, 1) is possible_degree(spec, 2) is possible_degree(spec, 4) is None
    reason = possible_degree(spec, 8)
    assert reason is not None
    assert "'w2'" in reason
    assert "1, 2, 4." in reason
    with pytest.raises(ConfigError, match="'w2'"):
        shard_map(spec, 8, 0, 8)
    with pytest.raises(ConfigError, match="multiple of the tensor parallel degree"):
        shard_map(spec, 6, 0, 4)
    assert possible_degree(StateSpec(tensors=spec.tensors[-1:]), 7) is None
    assert "0" in (possible_degree(spec, 0) or "")


@given(specs(), st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_no_buffer_is_larger_than_the_first_ranks(spec: StateSpec, shards: int, degree: int) -> None:
    """As parity's blocks take for granted."""
    sizes = [shard_map(spec, shards * degree, rank, degree).size_bytes for rank in range(shards * degree)]
    assert max(sizes) == sizes[0]
