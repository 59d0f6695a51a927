"""The source at each position under one set of weights. Pure.

Weights are whole millionths. A period has 1,000 positions, its slots. A source with the weight of W millionths has
W // 1,000 slots of every period for itself, the same ones each time, evenly spread. The other slots, R of them, are
free. They are shared by the remainders W % 1,000, which add up to 1,000 R, by systematic sampling:

- Remainders are neighbouring intervals of a circle of 1,000 R points. Free slot r of period k has the point
  (1000 r + k) modulo 1000 R, and belongs to the source whose interval has it.
- The points of any R free slots in a row are at least 999 apart, and no interval is longer than 999. So any 1,000
  positions in a row have each source W // 1,000 times, or once more.
- In 1,000 periods a slot of each remainder visits each point modulo 1,000 once. So a million positions from the
  beginning, or any multiple, have exactly the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]

PERIOD = 1_000
PARTS = 1_000_000
"""Sum of a pattern's weights."""
_FREE = -1


def in_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """The weights in millionths, which add up to `PARTS`, by the largest remainder. Needs a positive sum."""
    total = sum(weights)
    exact = [weight / total * PARTS for weight in weights]
    parts = [int(one) for one in exact]
    by_remainder = sorted(range(len(parts)), key=lambda number: (parts[number] - exact[number], number))
    for number in by_remainder[: PARTS - sum(parts)]:
        parts[number] += 1
    return tuple(parts)


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """Sources by number, at offsets from 0 on."""

    own: Int64s
    """Slots of a period that each source has for itself."""
    begins: Int64s
    """Beginning of each source's interval on the circle, and the circle's size at the end; [S + 1]."""
    slots: Int64s
    """Source of each slot, or `_FREE`; [PERIOD]."""
    own_before: Int64s
    """Own slots of each source before each slot; [PERIOD, S]."""
    free_before: Int64s
    """Free slots before each slot; [PERIOD]."""

    @classmethod
    def of(cls, parts: Sequence[int]) -> Pattern:
        """The pattern of weights in millionths."""
        own, remainders = np.divmod(np.asarray(parts, dtype=np.int64), PERIOD)
        begins = np.concatenate([[0], np.cumsum(remainders)]).astype(np.int64)
        counts = (*own.tolist(), int(begins[-1]) // PERIOD)
        slots = np.asarray(_spread(counts), dtype=np.int64)
        slots[slots == len(own)] = _FREE
        mine = slots[:, None] == np.arange(len(own))[None, :]
        free = slots == _FREE
        return cls(
            own=own,
            begins=begins,
            slots=slots,
            own_before=np.cumsum(mine, axis=0) - mine,
            free_before=np.cumsum(free) - free,
        )

    def at(self, offsets: Int64s) -> tuple[Int64s, Int64s]:
        """The source at each offset, and the number of earlier offsets with the same one; both [N]."""
        periods, slots = np.divmod(offsets, PERIOD)
        sources = self.slots[slots]
        free = np.flatnonzero(sources == _FREE)
        if free.size:
            points = (self.free_before[slots[free]] * PERIOD + periods[free]) % self.begins[-1]
            sources[free] = np.searchsorted(self.begins, points, side="right") - 1
        return sources, self.before(offsets, sources)

    def before(self, offsets: Int64s, sources: Int64s) -> Int64s:
        """The number of offsets below each of these with this source; [N]."""
        periods, slots = np.divmod(offsets, PERIOD)
        own = periods * self.own[sources] + self.own_before[slots, sources]
        begin, end = self.begins[sources], self.begins[sources + 1]
        rounds, turn = np.divmod(periods, PERIOD)
        whole = rounds * (end - begin) + _below(end, turn) - _below(begin, turn)
        point = begin + (periods - begin) % PERIOD  # the only one of this period that the interval may have
        size = np.maximum(self.begins[-1], 1)
        slot = (point - periods) % size // PERIOD
        found: Int64s = own + whole + ((point < end) & (slot < self.free_before[slots]))
        return found

    def counts(self, length: int) -> list[int]:
        """The number of offsets below `length` with each source."""
        sources = np.arange(len(self.own))
        return [int(one) for one in self.before(np.full(len(sources), length, dtype=np.int64), sources)]

    def first_beyond(self, source: int, number: int, length: int) -> int | None:
        """The offset below `length` with sample `number` (from 0 on) of a source; None if there is none."""
        low, high = 0, length
        if self.counts(length)[source] <= number:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.counts(middle)[source] <= number else (low, middle)
        return low


def _below(points: Int64s, turn: Int64s) -> Int64s:
    """The number of points below these whose remainder by 1,000 is less than `turn`."""
    whole, rest = np.divmod(points, PERIOD)
    found: Int64s = whole * turn + np.minimum(rest, turn)
    return found


@lru_cache(maxsize=256)
def _spread(counts: tuple[int, ...]) -> tuple[int, ...]:
    """Numbers of items, each as often as counted, 1,000 together, as evenly as possible: the one that is most due."""
    taken, order = [0] * len(counts), []
    for place in range(1, PERIOD + 1):
        due = [place * count - PERIOD * done for count, done in zip(counts, taken, strict=True)]
        chosen = max(range(len(counts)), key=lambda number: (due[number], -number))
        taken[chosen] += 1
        order.append(chosen)
    return tuple(order)
