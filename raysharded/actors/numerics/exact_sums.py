"""Exact sums of float64 numbers, as a fixed number of integers that may be added over workers in any order.

A number is a multiple of a power of two, so a sum is an integer on one grid: exact in any order, and for any number of
workers. The integers are superaccumulators (Neal, Fast exact summation using small and large superaccumulators, 2015,
arXiv:1505.05571). The sum is rounded once, at the end: the bits are those of `math.fsum`.

The narrow grid has all finite numbers of float32, and all of float64 with a magnitude from 2**-108 to 2**128. The wide
grid has all finite numbers of float64, in seven times as many words.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = NDArray[np.float64]
"""[numbers, columns]; each column has a sum."""
_WORD_BITS = 32
_DIGIT_BITS = 48
"""Bits taken from each number at a time."""
_LEAST_EXPONENT = -1000
"""A grid with lower ones scales in two steps."""
_MOST_ROWS = 1 << 12
"""Rows of which the digits are added in int64: 2**12 of 48 bits, and a sign, are less than 2**63."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Multiples of 2**lowest, of less than 2**above."""

    lowest: int
    above: int

    @property
    def num_words(self) -> int:
        """Number of words of a sum. The last one also has the carries and the sign."""
        return -(-(self.above - self.lowest) // _WORD_BITS)

    def integers(self, rows: Rows) -> list[int] | None:
        """Each column's sum in units of the grid; None if a number is not on the grid."""
        sums = [0] * rows.shape[1]
        with np.errstate(all="ignore"):  # also under a user's np.seterr
            for start in range(0, len(rows), _MOST_ROWS):
                if not self._add(sums, rows[start : start + _MOST_ROWS].T.copy()):
                    return None
        return sums

    def _add(self, sums: list[int], columns: Rows) -> bool:
        """Add [columns, numbers], which are overwritten; False if a number is not on the grid."""
        largest = np.maximum(columns.max(axis=1), -columns.min(axis=1))
        top = float(largest.max())
        if not math.isfinite(top) or math.frexp(top)[1] > self.above:
            return False
        _, exponents = np.frexp(largest)  # each of a power of two above the numbers
        units = np.maximum(exponents.astype(np.int64) - _DIGIT_BITS, self.lowest)
        while True:
            digits = self._scaled(columns, -units).astype(np.int64)  # rounded towards zero
            for place, total in enumerate(digits.sum(axis=1).tolist()):
                sums[place] += total << (int(units[place]) - self.lowest)
            columns -= self._scaled(digits, units)
            if not columns.any():
                return True
            if (units == self.lowest).all():
                return False
            units = np.maximum(units - _DIGIT_BITS, self.lowest)

    def _scaled(self, values: NDArray[Any], exponents: NDArray[np.int64]) -> Rows:
        """values * 2**exponents, an exponent for each column. It is exact but for results below 1, which give no digit.

        In two steps for a grid with powers of two that float64 does not have.
        """
        if self.lowest < _LEAST_EXPONENT:
            half = exponents // 2
            values, exponents = values * np.ldexp(1.0, half)[:, None], exponents - half
        scaled: Rows = values * np.ldexp(1.0, exponents)[:, None]
        return scaled

    def words(self, sums: Sequence[int]) -> list[int]:
        """The words of sums in units of the grid, column after column; each is a signed integer of 64 bits."""
        mask, last = (1 << _WORD_BITS) - 1, self.num_words - 1
        return [
            (total >> (_WORD_BITS * place)) & mask if place < last else total >> (_WORD_BITS * last)
            for total in sums
            for place in range(self.num_words)
        ]

    def sums(self, words: Sequence[int]) -> list[int]:
        """The sums in units of the grid, from words added over workers."""
        return [
            sum(word << (_WORD_BITS * place) for place, word in enumerate(words[start : start + self.num_words]))
            for start in range(0, len(words), self.num_words)
        ]

    def rounded(self, total: int) -> float:
        """A sum in units of the grid as the nearest float64; infinite if it is too large for one."""
        try:
            return total / (1 << -self.lowest)
        except OverflowError:
            return math.inf if total > 0 else -math.inf


NARROW = Grid(lowest=-160, above=128)
WIDE = Grid(lowest=-1074, above=1024)
