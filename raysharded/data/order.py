"""Sample order: pure functions of (seed, position, number of samples).

Positions count every sample that a run consumes, from 0 on, across epochs. An epoch is one pass over the data, in a
different order each time. Nothing here depends on the number of workers, and no state is kept. A run is resumed, at any
size, from its step number alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from raysharded.errors import DataError
from raysharded.ids import derive_seed

Int64s: TypeAlias = npt.NDArray[np.int64]
Uint64s: TypeAlias = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# After 12 rounds all orders of 3, 4 or 5 samples are equally frequent over the epochs (chi-squared), but not after 8.
_ROUND_KEYS = np.arange(1, 13, dtype=np.uint64) * _GOLDEN


def mix64(x: Uint64s) -> Uint64s:
    """Each 64-bit word replaced by a well-mixed one; a bijection of the 64-bit words.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014,
    with Stafford's variant 13 of the constants).
    """
    x = x ^ (x >> np.uint64(30))
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def sample_ids(seed: int, positions: Int64s, num_samples: int, order: int = 1) -> Int64s:
    """The ids, in [0, num_samples), of the samples at `positions`; same shape as `positions`.

    Law: for every epoch e, `sample_ids(seed, e*n + arange(n), n)` is a permutation of `arange(n)`. The values define a
    run's data: those of one number of the rule `order` (`raysharded.numerics`) never change between versions. Raises
    DataError for num_samples < 1, ValueError for negative positions, KeyError for an unknown order.
    """
    return ORDERS[order](seed, positions, num_samples)


def _first_order(seed: int, positions: Int64s, num_samples: int) -> Int64s:
    """Order 1 of `sample_ids`.

    A random-access permutation: a generalized Feistel network over Z_a x Z_b with a*b just above n. Cycle walking
    treats the few cells beyond n (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). Time and
    memory are proportional to the number of positions, not of samples.
    """
    if num_samples < 1:
        raise DataError(f"The dataset has {num_samples} samples: nothing to train on. Give one with at least 1.")
    positions = np.asarray(positions, dtype=np.int64)
    if positions.size and int(positions.min()) < 0:
        raise ValueError(f"position {int(positions.min())} is negative: positions count from 0")
    flat = positions.reshape(-1)
    epochs, offsets = np.divmod(flat, np.int64(num_samples))
    if flat.size and epochs.min() == epochs.max():  # nearly always: each key's values are then computed once
        epochs = epochs[:1]
    keys = mix64(epochs.astype(np.uint64) * _GOLDEN + np.uint64(derive_seed("sample order", seed)))
    cells = _permute_cells(offsets.astype(np.uint64), keys, num_samples)
    outside = np.flatnonzero(cells >= np.uint64(num_samples))
    while outside.size:  # each walk ends: the permutation's cycle leads back to the cell that it started from
        cells[outside] = _permute_cells(cells[outside], keys if len(keys) == 1 else keys[outside], num_samples)
        outside = outside[cells[outside] >= np.uint64(num_samples)]
    return cells.astype(np.int64).reshape(positions.shape)


ORDERS: dict[int, Callable[[int, Int64s, int], Int64s]] = {1: _first_order}
"""Functions by the number of the rule `order`. Only tests change it."""


def _permute_cells(cells: Uint64s, keys: Uint64s, num_samples: int) -> Uint64s:
    """A permutation of the a*b cells, chosen by each cell's key (or one for all); a*b - n < 2*sqrt(n) + 1."""
    a = math.isqrt(num_samples - 1) + 1
    b = -(-num_samples // a)
    size_a, size_b = np.uint64(a), np.uint64(b)
    left = cells // size_b
    right = cells - left * size_b
    for number, constant in enumerate(_ROUND_KEYS):
        round_key = mix64(keys + constant)
        if number % 2 == 0:
            left = _sum_modulo(left, mix64(round_key ^ right), size_a)
        else:
            right = _sum_modulo(right, mix64(round_key ^ left), size_b)
    return left * size_b + right


def _sum_modulo(below: Uint64s, words: Uint64s, size: np.uint64) -> Uint64s:
    """(below + words) modulo `size`, where `below` is smaller, with a single division: divisions dominate the time.

    numpy divides by one number several times as fast as it computes a remainder.
    """
    total = words // size
    total *= size
    np.subtract(words, total, out=total)
    total += below
    total -= (total >= size) * size
    return total


def positions_of_step(step: int, global_batch_size: int, skipped: int = 0) -> Int64s:
    """The positions that optimizer step `step` (from 1 on) consumes: (step-1)*B .. step*B-1, shape [B].

    `skipped`: samples that the run skipped earlier (`raysharded.overrides`); it is added to all positions.
    """
    if step < 1:
        raise ValueError(f"step {step}: optimizer steps count from 1")
    first = (step - 1) * global_batch_size + skipped
    return np.arange(first, first + global_batch_size, dtype=np.int64)


def positions_of_microbatch(
    step: int, microbatch: int, global_batch_size: int, microbatch_size: int, skipped: int = 0
) -> Int64s:
    """The positions of logical microbatch `microbatch` (from 0 on) of `step`, shape [microbatch_size].

    Law: the microbatches 0 .. B/microbatch_size-1, one after the other, are `positions_of_step(step, B)`.
    """
    num_microbatches = global_batch_size // microbatch_size
    if not 0 <= microbatch < num_microbatches:
        raise ValueError(f"microbatch {microbatch} of step {step}: each step has {num_microbatches}, from 0 on")
    start = microbatch * microbatch_size
    return positions_of_step(step, global_batch_size, skipped)[start : start + microbatch_size]
