"""Sample order: pure functions of (seed, position, number of samples), and of the blocks that are read at once.

Positions count every sample that a run consumes, from 0 on, across epochs. An epoch is one pass over the data, in a
different order each time. Nothing here depends on the number of workers, and no state is kept. A run is resumed, at any
size, from its step number alone.

Order 1 is a permutation of all samples. Order 2 is the same for data without blocks. Blocks of samples
that are cheaper to read whole are read in a window of open blocks:

- The positions of a step are divided into columns, and each column has the same positions of every step. Workers have
  fixed positions in a step, so each reads the blocks of these columns alone, at any number of workers.
- A column has rows, each with one open block. One round of the column takes one sample of each row, rotated by a drawn
  number. When a block is used up, its row opens the next block of the permutation of blocks.
- The rows begin at different places of their blocks, so that blocks are opened evenly over time. Two rows share their
  first block and their last one, so that no block is read twice.
- What is left after the last full rounds, less than a few windows, is permuted as in order 1, at the end of the epoch.
  So are data that are too small for full rounds, the same way as in order 1.

Under order 2, data may have an order themselves, as a mixture of sources has: the sample at a position is their item of
that number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of consecutive samples that are read at once, and the batch whose positions are divided into columns.

    A run keeps those that it began with.
    """

    samples: int = 1
    """Samples per block, a power of two. 1: the data have no blocks, and the batch has no effect. Below 0: the
    sample at a position is the data's item of that number, and this is minus the digest of their order (`Mixture`)."""
    batch: int = 1
    """Samples per step when the run began."""


NO_BLOCKS = Blocks()
WINDOW_BLOCKS = 1024
"""Number of open blocks, if the columns are fewer."""
MAX_COLUMNS = 4096
"""Maximum number of columns: with more samples per step, a column has several positions of it."""


def sample_ids(seed: int, positions: Int64s, num_samples: int, order: int = 1, blocks: Blocks = NO_BLOCKS) -> Int64s:
    """The ids, in [0, num_samples), of the samples at `positions`; same shape as `positions`.

    Law: for every epoch e, `sample_ids(seed, e*n + arange(n), n)` is a permutation of `arange(n)`, unless the data have
    an order themselves. The values define a
    run's data: those of one number of the rule `order` (`raysharded.numerics`) never change between versions. `blocks`
    matter to order 2 alone. Time and memory are proportional to the number of positions, not of samples. Raises
    DataError for num_samples < 1 and for impossible blocks, ValueError for negative positions, KeyError for an unknown
    order.
    """
    if num_samples < 1:
        raise DataError(f"The dataset has {num_samples} samples: nothing to train on. Give one with at least 1.")
    positions = np.asarray(positions, dtype=np.int64)
    if positions.size and int(positions.min()) < 0:
        raise ValueError(f"position {int(positions.min())} is negative: positions count from 0")
    return ORDERS[order](seed, positions, num_samples, blocks)


def _first_order(seed: int, positions: Int64s, num_samples: int, blocks: Blocks) -> Int64s:  # noqa: ARG001 - it has none
    """Order 1 of `sample_ids`: a permutation of all samples."""
    keys, offsets = _epochs("sample order", seed, positions, num_samples)
    return _permuted(offsets, keys, num_samples).astype(np.int64).reshape(positions.shape)


def _second_order(seed: int, positions: Int64s, num_samples: int, blocks: Blocks) -> Int64s:
    """Order 2 of `sample_ids`: blocks, then a window (see the module), or the order that the data have."""
    if blocks.samples < 0:
        return positions.copy()
    window = _Window.of(num_samples, blocks)
    if blocks.samples == 1 or window.depth == 0:
        return _first_order(seed, positions, num_samples, blocks)
    keys, offsets = _epochs("block order", seed, positions, num_samples)
    ids = np.empty_like(offsets)
    is_main = offsets < np.uint64(window.length)
    for chosen, read in ((is_main, window.main), (~is_main, window.rest)):
        if chosen.any():
            ids[chosen] = read(offsets[chosen], keys if len(keys) == 1 else keys[chosen])
    return ids.astype(np.int64).reshape(positions.shape)


ORDERS: dict[int, Callable[[int, Int64s, int, Blocks], Int64s]] = {1: _first_order, 2: _second_order}
"""Functions by the number of the rule `order`. Only tests change it."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Order 2 of one epoch. Offsets count its samples from 0 on; those below `length` are in full rounds."""

    num_samples: int
    samples: int
    """Samples per block."""
    columns: int
    width: int
    """Consecutive positions of a step that are in one column."""
    rows: int
    depth: int
    """Blocks that each row reads, counting shared ones once; 0: there are not enough blocks for a window."""

    @classmethod
    def of(cls, num_samples: int, blocks: Blocks) -> _Window:
        samples, batch = blocks.samples, blocks.batch
        if samples < 1 or samples & (samples - 1) or batch < 1:
            raise DataError(
                f"blocks of {samples} samples in batches of {batch}: samples_per_block must be a power of two."
            )
        columns = next(number for number in range(min(batch, MAX_COLUMNS), 0, -1) if batch % number == 0)
        width, rows = batch // columns, max(1, WINDOW_BLOCKS // columns)
        depth = num_samples // samples // (rows * columns)
        depth -= depth % (width // math.gcd(width, rows * samples))  # only whole batches are in full rounds
        return cls(num_samples, samples, columns, width, rows, depth)

    @property
    def lanes(self) -> int:
        return self.rows * self.columns

    @property
    def length(self) -> int:
        return self.lanes * self.depth * self.samples

    def main(self, offsets: Uint64s, keys: Uint64s) -> Uint64s:
        """The samples at offsets in full rounds."""
        step, place = _divided(offsets, self.columns * self.width)
        column, within = _divided(place, self.width)
        round_number, turn = _divided(step * np.uint64(self.width) + within, self.rows)
        drawn = mix64(mix64(keys + round_number * _GOLDEN) + column)
        row = _sum_modulo(turn, drawn, np.uint64(self.rows))
        slot, offset = self._slot(row * np.uint64(self.columns) + column, round_number)
        return self._in_block(slot, offset, keys)

    def rest(self, offsets: Uint64s, keys: Uint64s) -> Uint64s:
        """The samples at the other offsets, at the end of the epoch."""
        size = self.num_samples - self.length
        drawn = _permuted(offsets - np.uint64(self.length), mix64(keys + _ROUND_KEYS[0]), size)
        slot, offset = _divided(drawn + np.uint64(self.length), self.samples)
        last = np.uint64(self.num_samples // self.samples - 1)
        whole = self._in_block(np.minimum(slot, last), offset, keys)
        of_no_block = slot * np.uint64(self.samples) + offset  # the samples after the last whole block
        return np.where(slot <= last, whole, of_no_block)

    def _slot(self, lane: Uint64s, index: Uint64s) -> tuple[Uint64s, Uint64s]:
        """The slot, among all blocks of the rounds, and the place in that block, of sample `index` of a lane.

        Lane i begins in the middle of a block, `begun` samples before its end, and lane `lanes - i` has the others.
        """
        samples, depth, lanes = np.uint64(self.samples), np.uint64(self.depth), np.uint64(self.lanes)
        is_second = lane > lanes - lane
        first = np.where(is_second, lanes - lane, lane)
        begun = first * _GOLDEN >> np.uint64(64 - self.samples.bit_length() + 1)  # evenly spread in any part
        begun[first + first == lanes] = 0
        other = begun > 0
        begun = np.where(is_second & other, samples - begun, begun)
        number, offset = _divided(index + np.where(other, samples - begun, np.uint64(0)), self.samples)
        slot = lane * depth + number
        partner = np.where(other, lanes - lane, lane)
        slot = np.where(other & (number == 0), np.minimum(lane, partner) * depth, slot)
        slot = np.where(other & (number == depth), np.maximum(lane, partner) * depth, slot)
        return slot, np.where(is_second & other, samples - np.uint64(1) - offset, offset)

    def _in_block(self, slot: Uint64s, offset: Uint64s, keys: Uint64s) -> Uint64s:
        """The sample at a drawn place in the block that the permutation of blocks has at `slot`."""
        block = _permuted(slot, keys, self.num_samples // self.samples)
        drawn = mix64(keys + _ROUND_KEYS[1] + block * _GOLDEN)
        return block * np.uint64(self.samples) + _scrambled(offset, drawn, self.samples)


def _scrambled(offset: Uint64s, words: Uint64s, size: int) -> Uint64s:
    """A permutation of [0, size), chosen by each word; `size` is a power of two of at least 2."""
    mask, half = np.uint64(size - 1), np.uint64(size.bit_length() // 2)
    for constant in _ROUND_KEYS[:4]:
        word = mix64(words + constant)
        offset = (offset * (word | np.uint64(1)) + (word >> np.uint64(32))) & mask  # odd factors have an inverse
        offset ^= offset >> half
    return offset


def _divided(numbers: Uint64s, by: int) -> tuple[Uint64s, Uint64s]:
    """Quotients and remainders; numpy divides by one number several times as fast as it computes a remainder."""
    quotients = numbers // np.uint64(by)
    return quotients, numbers - quotients * np.uint64(by)


def _epochs(what: str, seed: int, positions: Int64s, num_samples: int) -> tuple[Uint64s, Uint64s]:
    """The key of each position's epoch, or one for all, and the offset in the epoch; one-dimensional."""
    flat = positions.reshape(-1)
    epochs, offsets = np.divmod(flat, np.int64(num_samples))
    if flat.size and epochs.min() == epochs.max():  # nearly always: each key's values are then computed once
        epochs = epochs[:1]
    keys = mix64(epochs.astype(np.uint64) * _GOLDEN + np.uint64(derive_seed(what, seed)))
    return keys, offsets.astype(np.uint64)


def _permuted(numbers: Uint64s, keys: Uint64s, size: int) -> Uint64s:
    """A permutation of [0, size), chosen by each number's key (or one for all).

    A generalized Feistel network over Z_a x Z_b with a*b just above `size`. Cycle walking treats the few cells beyond
    it (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002).
    """
    cells = _permute_cells(numbers, keys, size)
    outside = np.flatnonzero(cells >= np.uint64(size))
    while outside.size:  # each walk ends: the permutation's cycle leads back to the cell that it started from
        cells[outside] = _permute_cells(cells[outside], keys if len(keys) == 1 else keys[outside], size)
        outside = outside[cells[outside] >= np.uint64(size)]
    return cells


def _permute_cells(cells: Uint64s, keys: Uint64s, size: int) -> Uint64s:
    """A permutation of the a*b cells, chosen by each cell's key (or one for all); a*b - n < 2*sqrt(n) + 1."""
    a = math.isqrt(size - 1) + 1
    b = -(-size // a)
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
