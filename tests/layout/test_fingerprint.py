"""The fingerprint: the same for every layout, different after any change."""

from __future__ import annotations

import hashlib
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from raysharded.errors import ConfigError
from raysharded.layout import Share, StateSpec, TensorSpec, combine, digest, partial, shard_map, tensor_specs
from raysharded.layout.fingerprint import tensor_sum
from tests.cases import examples

Bytes = NDArray[np.uint8]


def spec_of(*tensors: tuple[str, str, tuple[int, ...]]) -> StateSpec:
    return StateSpec(tensors=tuple(TensorSpec(name=n, dtype=d, shape=s) for n, d, s in tensors))


def of_state(spec: StateSpec, line: Bytes, world_size: int = 1, degree: int = 1, replicas: int = 1) -> str:
    parts = []
    for rank, replica in product(range(world_size), range(replicas)):
        shard = shard_map(spec, world_size, rank, degree).part(Share(index=replica, of=replicas))
        buffer = np.full(shard.size_bytes, 0xEE, np.uint8)  # what is in the padding must not matter
        for start, stop, offset in zip(shard.line_start, shard.line_stop, shard.offset, strict=True):
            buffer[offset : offset + stop - start] = line[start:stop]
        parts.append(partial(spec, shard, buffer, count_replicated=rank == world_size - 1))
    return digest(spec, combine(parts))


def of_values(dtype: str, values: NDArray[np.generic], name: str = "t") -> str:
    return of_state(spec_of((name, dtype, values.shape)), values.ravel().view(np.uint8))


SMALL = spec_of(("w", "bfloat16", (5, 3)), ("n", "int64", ()), ("b", "float32", (2,)), ("f", "bool", (3, 1)))


@settings(max_examples=examples(20, of=60), deadline=None)
@given(st.data(), st.integers(1, 9))
def test_it_is_the_same_at_every_world_size(data: st.DataObject, world_size: int) -> None:
    shapes = data.draw(st.lists(st.lists(st.integers(0, 12), max_size=3).map(tuple), min_size=1, max_size=5))
    dtypes = st.sampled_from(["float64", "float32", "bfloat16", "float8_e4m3fn", "bool"])
    spec = spec_of(*((f"t{i}", data.draw(dtypes), shape) for i, shape in enumerate(shapes)))
    line = np.random.default_rng(0).integers(0, 256, spec.total_bytes, np.uint8)
    assert of_state(spec, line, world_size) == of_state(spec, line)


@settings(max_examples=examples(26, of=80), deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4]), st.integers(1, 3), st.integers(1, 3))
def test_it_is_the_same_at_every_tensor_parallel_degree_and_in_any_strips(
    data: st.DataObject, degree: int, shards: int, replicas: int
) -> None:
    """Equal tensors, cut in every way that is possible; the whole has them in one piece."""
    whole: list[tuple[tuple[str, str, tuple[int, ...]], Bytes]] = []
    cut: list[TensorSpec] = []
    line: list[Bytes] = []
    rng = np.random.default_rng(0)
    for i in range(data.draw(st.integers(1, 4))):
        dim = data.draw(st.sampled_from([None, 0, 1, 2]))
        shape = [data.draw(st.integers(0, 7)) for _ in range(3)]
        strips = 4 * data.draw(st.integers(1, 3)) if dim else 1
        if dim:
            shape[dim] = strips * data.draw(st.integers(1, 3))
        dtype = data.draw(st.sampled_from([("int16", np.uint16), ("float64", np.uint64)]))
        values = rng.integers(0, 60_000, shape).astype(dtype[1])
        whole.append(((f"t{i}", dtype[0], tuple(shape)), values.ravel().view(np.uint8)))
        entries = tensor_specs(f"t{i}", dtype[0], tuple(shape), tensor_dim=dim, strips=strips)
        cut += entries
        line += [part.ravel().view(np.uint8) for part in np.split(values, len(entries), axis=dim or 0)]
    spec = StateSpec(tensors=tuple(cut))
    wanted = of_state(spec_of(*(tensor for tensor, _ in whole)), np.concatenate([one for _, one in whole]))
    assert of_state(spec, np.concatenate(line), shards * degree, degree, replicas) == wanted


def test_strips_sum_in_blocks_and_in_long_rows_as_the_whole_does() -> None:
    for shape, dim, strips in (((70, 1024), 1, 4), ((3, 200_000), 1, 4), ((40, 8, 130), 1, 2), ((30, 2, 1200), 2, 2)):
        values = np.random.default_rng(3).integers(0, 2**32, shape, np.uint32)
        whole = tensor_sum(TensorSpec(name="w", dtype="float32", shape=shape), values.ravel(), 0)
        total = np.zeros(2, np.uint64)
        for part, strip in zip(
            np.split(values, strips, axis=dim),
            tensor_specs("w", "float32", shape, tensor_dim=dim, strips=strips),
            strict=True,
        ):
            flat = part.ravel()
            for first, behind in ((0, 1), (1, 7777), (7777, len(flat))):  # rows begun and left within
                total += tensor_sum(strip, flat[first:behind], first)
        assert total.tolist() == whole.tolist()


def test_it_differs_after_every_single_bit_flip() -> None:
    line = np.arange(SMALL.total_bytes, dtype=np.uint8)
    seen = {of_state(SMALL, line)}
    for position in range(8 * len(line)):
        flipped = line.copy()
        flipped[position // 8] ^= 1 << position % 8
        seen.add(of_state(SMALL, flipped))
    assert len(seen) == 8 * len(line) + 1


def test_it_differs_after_a_bit_flip_anywhere_in_a_large_tensor() -> None:
    rng = np.random.default_rng(1)
    spec = spec_of(("w", "float32", (211, 333)))
    line = rng.integers(0, 256, spec.total_bytes, np.uint8)
    seen = {of_state(spec, line)}
    for position in rng.integers(0, 8 * len(line), 50):
        line[position // 8] ^= 1 << position % 8
        seen.add(of_state(spec, line))
        line[position // 8] ^= 1 << position % 8
    assert len(seen) == 51


def test_it_sees_swaps_moves_and_the_sign_of_zero() -> None:
    values = np.array([0.0, 1.0, 2.0, 0.0, 1.0, 7.0], np.float32)
    swapped, moved, negative = values[[0, 2, 1, 3, 4, 5]], np.roll(values, 1), values.copy()
    negative[0] = -0.0
    states = [values, swapped, moved, negative, values.reshape(2, 3), values.reshape(3, 2), np.zeros(6, np.float32)]
    assert len({of_values("float32", state) for state in states}) == len(states)


def test_it_sees_every_payload_of_a_nan() -> None:
    payloads = np.array([0x7FC00000, 0x7FC00001, 0xFFC00000], np.uint32)
    assert len({of_values("float32", payloads[i : i + 1]) for i in range(3)}) == 3


def test_it_sees_names_dtypes_and_contents_that_change_places() -> None:
    zeros = np.zeros(4, np.uint16)
    assert len({of_values("bfloat16", zeros), of_values("float16", zeros), of_values("float16", zeros, "u")}) == 3
    two = spec_of(("a", "uint8", (3,)), ("b", "uint8", (3,)))
    line = np.array([1, 2, 3, 4, 5, 6], np.uint8)
    assert of_state(two, line) != of_state(two, np.roll(line, 3))


def test_the_order_of_the_tensors_does_not_matter() -> None:
    forward = spec_of(("a", "uint8", (3,)), ("b", "uint8", (2,)))
    backward = StateSpec(tensors=forward.tensors[::-1])
    assert of_state(forward, np.array([1, 2, 3, 4, 5], np.uint8)) == of_state(
        backward, np.array([4, 5, 1, 2, 3], np.uint8)
    )


@settings(max_examples=examples(15, of=30), deadline=None)
@given(st.integers(0, 40_000), st.integers(0, 2**40))
def test_the_sum_of_the_parts_is_the_sum_of_the_whole(split: int, first: int) -> None:
    tensor = TensorSpec(name="t", dtype="int16", shape=(2**41,))
    bits = np.random.default_rng(2).integers(0, 2**16, 40_000, np.uint16)
    parts = tensor_sum(tensor, bits[:split], first) + tensor_sum(tensor, bits[split:], first + split)
    assert parts.tolist() == tensor_sum(tensor, bits, first).tolist()


def test_sums_agree_with_the_definition_in_plain_integers() -> None:
    """Written out once more without NumPy, so that blocks and dtypes cannot hide a mistake."""
    mask = 2**64 - 1
    values = [0, 1, 0xFFFF, 0x8000]
    tensor = TensorSpec(name="x", dtype="bfloat16", shape=(9,))
    seed = int.from_bytes(hashlib.blake2b(b'["x","bfloat16",[9]]', digest_size=8).digest(), "little")
    low = high = 0
    for i, x in enumerate(values, start=5):
        z = (seed + i * 0x9E3779B97F4A7C15 & mask) ^ x
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        z ^= z >> 31
        low += z
        z = z + x * 0xD6E8FEB86659FD93 & mask
        z = (z ^ z >> 32) * 0xFF51AFD7ED558CCD & mask
        high += z ^ z >> 29
    assert tensor_sum(tensor, np.array(values, np.uint16), 5).tolist() == [low & mask, high & mask]


def test_golden_values() -> None:
    """A recorded digest must stay comparable between versions: change these only with the format's version."""
    assert of_state(SMALL, np.arange(SMALL.total_bytes, dtype=np.uint8)) == "16dbd8f062a7191978153948bc3ca701"
    assert of_state(spec_of(("e", "float32", (0, 3))), np.zeros(0, np.uint8)) == "12ef0b7676e247f9831218cd4c3c87e7"
    large = spec_of(("w", "float32", (40_000,)))
    assert of_state(large, np.arange(40_000, dtype=np.float32).view(np.uint8)) == "7f712f85ae2ea73afd8b63b315af0be4"


def test_a_buffer_that_does_not_fit_its_map_is_refused() -> None:
    shard = shard_map(SMALL, 1, 0)
    with pytest.raises(ConfigError, match="needs uint8 of"):
        partial(SMALL, shard, np.zeros(shard.size_bytes - 1, np.uint8), count_replicated=True)
    with pytest.raises(ConfigError, match="no partial sums"):
        combine([])
