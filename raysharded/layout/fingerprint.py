"""A fingerprint of the whole state that does not depend on its layout.

Each element of a tensor becomes two 64-bit words: functions of its bits, its flat index and a seed made of the tensor's
name, dtype and shape. The tensor's sum is the sum of these words modulo 2^64. Addition commutes, so parts may be summed
anywhere and in any order. This is a multiset hash (Bellare and Micciancio, "A New Paradigm for Collision-free Hashing:
Incrementality at Reduced Cost", 1997), with a fast mixer against accidents, not against an adversary. The elements of a
strip have the flat index that they have in the whole tensor.

The first word is a bijection of the bits for every index (Stafford's variant 13 of the 64-bit finalizer of
MurmurHash3). So a change of a single element always changes the sum; any other change escapes with a chance of about
2^-64 at most. The sum shows flipped bits, the sign of zero, NaN payloads, swapped and moved elements.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from raysharded.errors import ConfigError
from raysharded.layout.sharding import ShardMap
from raysharded.layout.state import StateSpec, TensorSpec

_BLOCK = 16384
"""Elements mixed at a time: three arrays of 128 KiB stay in the second-level cache."""
_WORD = (1 << 64) - 1
_STEP = np.uint64(0x9E3779B97F4A7C15)
_MUL_1 = np.uint64(0xBF58476D1CE4E5B9)
_MUL_2 = np.uint64(0x94D049BB133111EB)
_MUL_3 = np.uint64(0xD6E8FEB86659FD93)
_MUL_4 = np.uint64(0xFF51AFD7ED558CCD)
_RAMP = np.arange(_BLOCK, dtype=np.uint64) * _STEP


def partial(
    spec: StateSpec, shard: ShardMap, buffer: NDArray[np.uint8], *, count_replicated: bool
) -> NDArray[np.uint64]:
    """(tensors, 2): the sums over the pieces in one rank's flat buffer, laid out as `shard`.

    Each piece must count once. So `count_replicated`, which includes replicated tensors, is True on exactly one rank.
    Where several ranks have a piece, as replicas do and tensor ranks with a common one, each passes its
    `ShardMap.part`. Reads the buffer only. Raises ConfigError if the buffer is smaller than its map.
    """
    if buffer.dtype != np.uint8 or buffer.ndim != 1 or len(buffer) < shard.size_bytes:
        raise ConfigError(
            f"fingerprint: the buffer is {buffer.dtype}{buffer.shape}; rank {shard.rank} of {shard.world_size} "
            f"needs uint8 of {shard.size_bytes} bytes or more."
        )
    sums = np.zeros((len(spec.tensors), 2), np.uint64)
    for i in range(len(shard)):
        t, first_row, _ = shard.rows(i)
        tensor = spec.tensors[t]
        if tensor.replicated and not count_replicated:
            continue
        start, nbytes = int(shard.offset[i]), int(shard.line_stop[i] - shard.line_start[i])
        bits = buffer[start : start + nbytes].view(f"<u{tensor.itemsize}")
        sums[t] += tensor_sum(tensor, bits, first_row * tensor.row_bytes // tensor.itemsize)
    return sums


def tensor_sum(tensor: TensorSpec, bits: NDArray[np.unsignedinteger], first: int) -> NDArray[np.uint64]:
    """(2,): the sum over the elements `first, first + 1, ...` of a tensor, as unsigned integers of its item size.

    Elements of a strip are counted within it.

    Laws: tensor_sum(t, x, k) == tensor_sum(t, x[:n], k) + tensor_sum(t, x[n:], k + n). The sums over all strips of a
    tensor add up to the sum over the whole. Both hold modulo 2^64.
    """
    seed = _seed(tensor)
    low, high = 0, 0
    key, tmp = np.empty(_BLOCK, np.uint64), np.empty(_BLOCK, np.uint64)
    wide = np.empty(_BLOCK, np.uint64)
    for at, index, ramp in _blocks(tensor, first, len(bits)):
        n = len(ramp)
        x, z, s = wide[:n], key[:n], tmp[:n]
        x[...] = bits[at : at + n]
        np.add(ramp, np.uint64((seed + index * int(_STEP)) & _WORD), out=z)
        z ^= x
        _stir(z, s, 30, _MUL_1)
        _stir(z, s, 27, _MUL_2)
        np.right_shift(z, np.uint64(31), out=s)
        z ^= s
        low += int(z.sum())
        x *= _MUL_3
        z += x
        _stir(z, s, 32, _MUL_4)
        np.right_shift(z, np.uint64(29), out=s)
        z ^= s
        high += int(z.sum())
    return np.array([low & _WORD, high & _WORD], np.uint64)


def combine(partials: Iterable[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """(tensors, 2): the sums of several ranks' parts, in any order. Raises ConfigError when there are none."""
    parts = list(partials)
    if not parts:
        raise ConfigError("combine: no partial sums were given; pass one of every rank.")
    return np.asarray(np.stack(parts).sum(axis=0, dtype=np.uint64))


def digest(spec: StateSpec, totals: NDArray[np.uint64]) -> str:
    """32 hex digits over every tensor's name, dtype, shape and sum, by name.

    Law: the same for every world size, tensor parallel degree, number of strips and order of the spec's tensors;
    replication does not enter.
    """
    first = [t for t, tensor in enumerate(spec.tensors) if tensor.strip == 0]
    sums = np.add.reduceat(totals, first, axis=0) if first else totals  # strips follow each other
    rows = sorted(
        (tensor.name, tensor.dtype, list(tensor.shape), [f"{int(word):016x}" for word in words])
        for tensor, words in zip((spec.tensors[t] for t in first), sums, strict=True)
    )
    return hashlib.blake2b(json.dumps(rows, separators=(",", ":")).encode(), digest_size=16).hexdigest()


def _blocks(tensor: TensorSpec, first: int, count: int) -> Iterator[tuple[int, int, NDArray[np.uint64]]]:
    """Blocks of `count` elements from `first` on, at most `_BLOCK` each.

    Each is (its start among them, flat index of its first element in the whole tensor, `_STEP` times the others'
    distance from that). In the whole the elements of a strip's row are contiguous, and its rows are as far apart as the
    whole is wide.
    """
    if tensor.strips == 1:
        for at in range(0, count, _BLOCK):
            yield at, first + at, _RAMP[: min(_BLOCK, count - at)]
        return
    dim, begin, behind = tensor.strip_range
    inner = math.prod(tensor.shape[dim + 1 :])
    run, stride = (behind - begin) * inner, tensor.shape[dim] * inner
    at = 0
    while at < count:
        left = min(_BLOCK, count - at)
        row, within = divmod(first + at, run)
        if within or run > left:
            ramp = _RAMP[: min(left, run - within)]
        else:
            ramp = _ramp_of_rows(run, stride)[: left // run * run]
        yield at, row * stride + begin * inner + within, ramp
        at += len(ramp)


@lru_cache(maxsize=32)
def _ramp_of_rows(run: int, stride: int) -> NDArray[np.uint64]:
    """Like `_RAMP`, for as many rows of `run` elements as fit in, one every `stride` elements."""
    rows = np.arange(_BLOCK // run) * stride
    ramp = (rows[:, None] + np.arange(run)).ravel().astype(np.uint64)
    ramp *= _STEP
    ramp.flags.writeable = False
    return ramp


def _stir(z: NDArray[np.uint64], scratch: NDArray[np.uint64], shift: int, factor: np.uint64) -> None:
    """z = (z ^ z >> shift) * factor, in place; a bijection of 64-bit words for an odd factor."""
    np.right_shift(z, np.uint64(shift), out=scratch)
    z ^= scratch
    z *= factor


def _seed(tensor: TensorSpec) -> int:
    text = json.dumps([tensor.name, tensor.dtype, list(tensor.shape)], separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
