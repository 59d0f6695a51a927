"""The source and the sample at every position of a mixture: sets of weights one after the other, and limits. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from raysharded.data.mixtures.pattern import Int64s, Pattern, in_parts
from raysharded.data.order import Blocks, sample_ids
from raysharded.ids import derive_seed

ENDLESS = 1 << 60
"""Length of a mixture without an end."""
SOURCE_ORDER = 2
"""The rule `order` of the samples of a source."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A source as the order of samples sees it."""

    name: str
    num_samples: int
    samples_per_block: int = 1
    limit: int | None = None
    """Number of samples that may be taken, over all epochs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """A source that reaches its limit."""

    name: str
    position: int
    """Position of the mixture at which its next sample would have been."""


class Schedule:
    """Samples of a mixture by position. Time per position: logarithmic in the number of changes of weights."""

    def __init__(
        self, parts: Sequence[Part], weights: Sequence[tuple[int, Mapping[str, float]]], *, seed: int, reweight: bool
    ) -> None:
        """`weights`: (first position, weights), ascending, the first at 0.

        `reweight`: a source at its limit gets the weight 0, and the others keep their proportions. Otherwise the
        mixture ends there.
        """
        self.parts, self._seed = tuple(parts), seed
        self.ended: list[Ended] = []
        """Sources that reach their limits, in order."""
        self._starts: list[int] = []
        self._patterns: list[Pattern] = []
        self._before: list[list[int]] = []
        """Samples of each source before each pattern."""
        self.length = self._lay_out(weights, reweight)

    def _lay_out(self, weights: Sequence[tuple[int, Mapping[str, float]]], reweight: bool) -> int:
        left = set(range(len(self.parts)))
        taken = [0] * len(self.parts)
        stops = [*(start for start, _ in weights[1:]), ENDLESS]
        for (start, given), stop in zip(weights, stops, strict=True):
            position = start
            while position < stop:
                now = [given.get(part.name, 0.0) if number in left else 0.0 for number, part in enumerate(self.parts)]
                if not sum(now):
                    return position
                pattern = Pattern.of(in_parts(now))
                self._starts.append(position)
                self._patterns.append(pattern)
                self._before.append(list(taken))
                length, used_up = self._until_a_limit(pattern, taken, stop - position)
                taken = [before + more for before, more in zip(taken, pattern.counts(length), strict=True)]
                position += length
                if used_up is not None:
                    self.ended.append(Ended(name=self.parts[used_up].name, position=position))
                    left.remove(used_up)
                    if not reweight:
                        return position
        return ENDLESS

    def _until_a_limit(self, pattern: Pattern, taken: Sequence[int], length: int) -> tuple[int, int | None]:
        """(samples until a source is at its limit, that source), or (length, None)."""
        used_up = None
        for number, part in enumerate(self.parts):
            if part.limit is not None:
                found = pattern.first_beyond(number, part.limit - taken[number], length)
                if found is not None:
                    length, used_up = found, number
        return length, used_up

    def at(self, positions: Int64s) -> tuple[Int64s, Int64s]:
        """The number of the source at each position within the length, and the id of its sample; both [N]."""
        sources, ranks = np.empty_like(positions), np.empty_like(positions)
        which = np.searchsorted(np.asarray(self._starts), positions, side="right") - 1
        for number in np.unique(which):
            rows = np.flatnonzero(which == number)
            found, earlier = self._patterns[number].at(positions[rows] - self._starts[number])
            sources[rows] = found
            ranks[rows] = earlier + np.asarray(self._before[number], dtype=np.int64)[found]
        ids = np.empty_like(positions)
        for number in np.unique(sources):
            rows, part = np.flatnonzero(sources == number), self.parts[number]
            seed, blocks = derive_seed("source of a mixture", self._seed, part.name), Blocks(part.samples_per_block, 1)
            ids[rows] = sample_ids(seed, ranks[rows], part.num_samples, SOURCE_ORDER, blocks)
        return sources, ids

    def counts(self, position: int) -> dict[str, int]:
        """Samples of each source at the positions below this one."""
        number = max(0, bisect.bisect_left(self._starts, position) - 1)
        more = self._patterns[number].counts(position - self._starts[number])
        return {
            part.name: before + own for part, before, own in zip(self.parts, self._before[number], more, strict=True)
        }


class Counted(Protocol):
    """Samples of sources by position."""

    def counts(self, position: int) -> dict[str, int]:
        """Samples of each source at the positions below this one."""
        ...


def position_of(counted: Counted, name: str, rank: int, end: int) -> int:
    """The position of a source's sample, counted over all epochs. It must be below `end`."""
    low, high = 0, end
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if counted.counts(middle)[name] <= rank else (low, middle)
    return low
