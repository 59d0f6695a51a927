"""Sums over a step's microbatches of their losses, weights and metrics, and the parameters that any of them used.

Each is computed from integers that are added over the workers. There are two layouts, by the number of the rule
`numbers`. `ByMicrobatch` has a slot for each float of each microbatch, and all workers add these along the one tree.
`OnGrid` has as many words at any number of microbatches and parameters, and adds more where numbers are not finite, or
where workers did not use the same parameters.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from raysharded.actors.numerics.exact_sums import NARROW, WIDE, Rows
from raysharded.actors.numerics.summation_tree import tree_sums

Words = NDArray[np.int64]
Sum = Callable[[torch.Tensor], torch.Tensor]
"""The sum over all workers of int64 words. All workers call it together."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnMicrobatches:
    """One worker's microbatches."""

    microbatches: Sequence[int]
    values: Rows
    """[its microbatches, columns]; column 0 is the loss."""
    uses: Sequence[bool]
    """For each parameter: True if one of these microbatches used it."""
    presumed: Sequence[bool]
    """The presumption about all workers, for one whose own microbatches used no parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """The result over all workers, the same on each."""

    sums: list[float]
    """By column."""
    bad_losses: tuple[int, ...]
    """The microbatches whose loss is NaN or infinite."""
    used: tuple[bool, ...]
    """For each parameter: True if any microbatch used it."""


class Layout(Protocol):
    """Words to be added over the workers, and their meaning."""

    def words(self) -> Words:
        """This worker's words."""

    def read(self, words: Words, sum_over_workers: Sum) -> Sums:
        """The result, from the words added over all workers."""


class ByMicrobatch:
    """Each float of each microbatch as its bits, in a slot that one worker fills; a count for each parameter."""

    def __init__(self, own: OwnMicrobatches, num_microbatches: int) -> None:
        self._own, self._num_microbatches = own, num_microbatches
        self._num_columns = own.values.shape[1]

    def words(self) -> Words:
        uses = self._own.uses
        words = np.zeros(len(uses) + self._num_microbatches * self._num_columns, dtype=np.int64)
        words[: len(uses)] = uses
        self.slots(words)[list(self._own.microbatches)] = self._own.values
        return words

    def read(self, words: Words, sum_over_workers: Sum) -> Sums:
        slots = self.slots(words)
        bad = np.flatnonzero(~np.isfinite(slots[:, 0])).tolist()
        used = words[: len(self._own.uses)] > 0
        return Sums(sums=tree_sums(slots), bad_losses=tuple(bad), used=tuple(used.tolist()))

    def slots(self, words: Words) -> Rows:
        """[microbatches, columns]: the floats in these words."""
        slots = words[len(self._own.uses) :].view(np.float64)
        return slots.reshape(self._num_microbatches, self._num_columns)


class OnGrid:
    """Each column's exact sum on the narrow grid, rounded once; a digest of the parameters used.

    If a number is not on that grid, or two workers used different parameters, all workers add a second list of words:
    the sums on the wide grid, the microbatches whose losses are not finite, and a count for each parameter.
    """

    def __init__(self, own: OwnMicrobatches, num_microbatches: int) -> None:
        self._own, self._num_microbatches = own, num_microbatches
        self._num_columns = own.values.shape[1]
        self._uses_any = any(own.uses)
        self._digest = _digest_of(own.uses if self._uses_any else own.presumed)

    def words(self) -> Words:
        sums = NARROW.integers(self._own.values)
        is_beyond = sums is None
        words = NARROW.words(sums or [0] * self._num_columns)
        return np.array([1, int(self._uses_any), int(is_beyond), *self._digest, *words], dtype=np.int64)

    def read(self, words: Words, sum_over_workers: Sum) -> Sums:
        workers, num_using, num_beyond, *rest = words.tolist()
        total, narrow = rest[: len(self._digest)], rest[len(self._digest) :]
        are_alike = all((each - workers * own) % 2**64 == 0 for each, own in zip(total, self._digest, strict=True))
        if num_beyond or not are_alike:
            return self._read_wide(sum_over_workers(torch.from_numpy(self._wide())).numpy())
        uses = self._own.uses if self._uses_any else self._own.presumed
        return Sums(
            sums=[NARROW.rounded(each) for each in NARROW.sums(narrow)],
            bad_losses=(),
            used=tuple(one and num_using > 0 for one in uses),
        )

    def _wide(self) -> Words:
        values = self._own.values
        is_finite = np.isfinite(values)
        sums = WIDE.integers(np.where(is_finite, values, 0.0))
        assert sums is not None, "the wide grid has all finite numbers"
        kinds = [(values == math.inf).sum(axis=0), (values == -math.inf).sum(axis=0), np.isnan(values).sum(axis=0)]
        bad = np.zeros(self._num_microbatches, dtype=np.int64)
        bad[np.array(self._own.microbatches, dtype=np.int64)[~is_finite[:, 0]]] = 1
        parts = [self._own.uses, *kinds, _packed(bad), WIDE.words(sums)]
        return np.concatenate([np.asarray(part, dtype=np.int64) for part in parts])

    def _read_wide(self, words: Words) -> Sums:
        columns = self._num_columns
        ends = np.cumsum([len(self._own.uses), columns, columns, columns, _num_packed(self._num_microbatches)])
        uses, above, below, nans, bad, wide = np.split(words, ends)
        sums = [WIDE.rounded(each) for each in WIDE.sums(wide.tolist())]
        for place, (up, down, nan) in enumerate(zip(above.tolist(), below.tolist(), nans.tolist(), strict=True)):
            if up or down or nan:
                sums[place] = math.nan if nan or (up and down) else math.inf if up else -math.inf
        return Sums(
            sums=sums,
            bad_losses=tuple(np.flatnonzero(_unpacked(bad)[: self._num_microbatches]).tolist()),
            used=tuple((uses > 0).tolist()),
        )


LAYOUTS: dict[int, Callable[[OwnMicrobatches, int], Layout]] = {1: ByMicrobatch, 2: ByMicrobatch, 3: OnGrid}
"""By the number of the rule `numbers`: the layout of one worker's microbatches, of so many in all."""


def _digest_of(uses: Sequence[bool]) -> list[int]:
    """Two words. The sum over the workers is a multiple of a worker's own only if all have the same ones.

    That is not certain, but workers that decide differently are less likely than 2**-90.
    """
    digest = hashlib.blake2b(bytes(uses), digest_size=16).digest()
    return np.frombuffer(digest, dtype="<i8").tolist()  # type: ignore[no-any-return]


_BITS = 32


def _num_packed(num_flags: int) -> int:
    return -(-num_flags // _BITS)


def _packed(flags: Words) -> Words:
    """Flags as bits. Each is raised by one worker at most, so bits may be added."""
    padded = np.zeros(_num_packed(len(flags)) * _BITS, dtype=np.uint8)
    padded[: len(flags)] = flags
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.int64)


def _unpacked(words: Words) -> NDArray[np.uint8]:
    return np.unpackbits(words.astype("<u4").view(np.uint8), bitorder="little")
