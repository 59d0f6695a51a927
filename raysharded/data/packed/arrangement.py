"""Arrangement of documents in samples of a fixed length. Pure; its number, `VERSION`, is part of every plan.

A document of n tokens, with the token that ends it, takes n - 1 places: each token but the last is an input, and its
target is the next one. Documents that need more than `seq_len` places are cut into pieces of `seq_len`, and a rest.

The pieces of a stream are packed in groups of `samples` samples:

- The first pieces in the order of the stream, as many as fit, are placed by best fit decreasing: the longest first,
  each into the fullest sample in which it fits.
- Then come the next pieces in their order, each into the fullest sample in which it fits. It ends when all is full, or
  the next piece begins `look_ahead` tokens or more after the first that did not fit.
- A piece that did not fit begins the next group. So a group reads one range of the stream, in which few pieces
  belong to others.

Best fit decreasing of whole documents: Ding et al., "Fewer Truncations Improve Language Modeling" (ICML 2024).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Int64s: TypeAlias = npt.NDArray[np.int64]

VERSION = 1
_LOOK_AHEAD_SHARE = 32  # a group reads about a 64th more than it uses


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of documents in the order of the stream."""

    starts: Int64s
    """Position of the first input of each."""
    sizes: Int64s
    """Places of each; at least 1."""

    @classmethod
    def of(cls, ends: Int64s, start: int, stop: int, seq_len: int) -> Pieces:
        """The pieces between two positions of the stream; a document begins, or continues, at `start`.

        `ends`: positions of the tokens that end documents, ascending, within. The last token of all ends one, too.
        """
        if not ends.size or int(ends[-1]) != stop - 1:
            ends = np.append(ends, stop - 1)
        begins = np.concatenate([[start], ends[:-1] + 1]).astype(np.int64)
        lengths = ends - begins
        numbers = -(-lengths // seq_len)
        which = np.repeat(np.arange(len(begins)), numbers)
        within = (np.arange(len(which)) - np.repeat(np.cumsum(numbers) - numbers, numbers)) * seq_len
        return cls(begins[which] + within, np.minimum(lengths[which] - within, seq_len))


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Consecutive samples, and the range of the stream that they are made of."""

    start: int
    length: int
    """Tokens of the range, with the last target."""
    num_sorted: int
    """Number of pieces that were placed by size; the others were placed in their order."""
    others: tuple[int, ...]
    """Numbers of the pieces in the range that belong to other groups."""


class FreePlaces:
    """Free places of the samples of a group."""

    def __init__(self, seq_len: int, samples: int) -> None:
        self._free = [(seq_len, sample) for sample in range(samples)]
        self.places = seq_len * samples
        """Free places of all samples together."""

    def place(self, size: int) -> int | None:
        """The fullest sample in which a piece fits, the first of these; None if there is none."""
        number = bisect.bisect_left(self._free, (size, -1))
        if number == len(self._free):
            return None
        free, sample = self._free.pop(number)
        bisect.insort(self._free, (free - size, sample))
        self.places -= size
        return sample


def placed(sizes: Sequence[int], num_sorted: int, seq_len: int, samples: int) -> list[int] | None:
    """The sample of each piece of a group, in the order of the stream; None if they do not fit."""
    free, found = FreePlaces(seq_len, samples), [0] * len(sizes)
    by_size = sorted(range(num_sorted), key=lambda number: (-sizes[number], number))
    for number in (*by_size, *range(num_sorted, len(sizes))):
        sample = free.place(sizes[number])
        if sample is None:
            return None
        found[number] = sample
    return found


def look_ahead(seq_len: int, samples: int) -> int:
    """Tokens in which a group looks for pieces that fill its samples."""
    return seq_len * samples // _LOOK_AHEAD_SHARE


def groups(pieces: Iterable[tuple[int, int]], *, seq_len: int, samples: int) -> Iterator[tuple[Group, list[int]]]:
    """The groups of a stream of (start, size), and the sample of each piece of a group.

    Law: every piece is in one group. Memory: the pieces of about one group.
    """
    source = _Source(iter(pieces), seq_len * samples, look_ahead(seq_len, samples))
    while source.fill():
        yield _next_group(source, seq_len, samples)


class _Source:
    """The next pieces of a stream, as many as a group may use, without those that earlier groups took."""

    def __init__(self, pieces: Iterator[tuple[int, int]], places: int, ahead: int) -> None:
        self._pieces, self._places, self.ahead = pieces, places, ahead
        self.starts: list[int] = []
        self.sizes: list[int] = []
        self.taken: list[bool] = []
        self._total = 0
        self._ended = False

    def fill(self) -> bool:
        """Read on; False if nothing is left."""
        first = next((number for number, taken in enumerate(self.taken) if not taken), len(self.taken))
        self._total -= sum(self.sizes[:first])
        for values in (self.starts, self.sizes, self.taken):
            del values[:first]
        while not self._ended and self._total < 2 * (self._places + self.ahead):
            piece = next(self._pieces, None)
            if piece is None:
                self._ended = True
                break
            self.starts.append(piece[0])
            self.sizes.append(piece[1])
            self.taken.append(False)
            self._total += piece[1]
        return bool(self.starts)


def _next_group(source: _Source, seq_len: int, samples: int) -> tuple[Group, list[int]]:
    starts, sizes, taken = source.starts, source.sizes, source.taken
    first = _that_fit(source, seq_len, samples)
    free, chosen = FreePlaces(seq_len, samples), list(first)
    for number in sorted(first, key=lambda number: (-sizes[number], number)):
        free.place(sizes[number])
    refused: int | None = None
    for number in range(first[-1] + 1, len(starts)):
        if not free.places or (refused is not None and starts[number] - starts[refused] >= source.ahead):
            break
        if taken[number]:
            continue
        if free.place(sizes[number]) is not None:
            chosen.append(number)
        elif refused is None:
            refused = number
    members = set(chosen)
    for number in chosen:
        taken[number] = True
    group = Group(
        start=starts[0],
        length=starts[chosen[-1]] + sizes[chosen[-1]] + 1 - starts[0],
        num_sorted=len(first),
        others=tuple(number for number in range(chosen[-1]) if number not in members),
    )
    where = placed([sizes[number] for number in chosen], len(first), seq_len, samples)
    assert where is not None
    return group, where


def _that_fit(source: _Source, seq_len: int, samples: int) -> list[int]:
    """The first pieces that best fit decreasing places; at least one."""
    candidates, total = [], 0
    for number, size in enumerate(source.sizes):
        if not source.taken[number]:
            total += size
            if total > seq_len * samples:
                break
            candidates.append(number)
    sizes = [source.sizes[number] for number in candidates]
    low, high = 0, len(sizes) + 1
    while high - low > 1:
        middle = len(sizes) if not low and high == len(sizes) + 1 else (low + high) // 2
        fits = placed(sizes[:middle], middle, seq_len, samples) is not None
        low, high = (middle, high) if fits else (low, middle)
    return candidates[:low]
