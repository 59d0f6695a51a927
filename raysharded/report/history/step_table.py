"""The steps of a run as columns: a million steps are read in seconds, and take some hundred bytes each.

`StepLog` takes the journal's entries in order and checks each field. `Steps` are some of its steps, in any order: a
sequence of `StepRecord`s, which are created on access, and whole columns as arrays.
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import itemgetter, methodcaller
from typing import Any, Literal, TypeAlias, cast, overload

import numpy as np
import numpy.typing as npt

from raysharded.journal.records import StepRecord

Entry: TypeAlias = Mapping[str, Any]
Floats: TypeAlias = npt.NDArray[np.float64]
Int64s: TypeAlias = npt.NDArray[np.int64]
UInt64s: TypeAlias = npt.NDArray[np.uint64]
Whole = Literal["step", "generation", "workers", "reads"]
Real = Literal["loss", "weight", "gradient_norm", "lr", "at"]
Group = Literal["seconds", "metrics", "evaluation"]
_WHOLE: tuple[Whole, ...] = ("step", "generation", "workers", "reads")
_REAL: tuple[Real, ...] = ("loss", "weight", "gradient_norm", "lr", "at")
_NOTHING: Mapping[str, Any] = {}
_WORD_DIGITS = 16
_EACH = 32
_SOME = 1 << 16
"""Number of steps in an intermediate array; divisible by `_EACH`."""
_MOST_SHAPES = 1 << 16
_GROUPS: tuple[Group, ...] = ("seconds", "metrics", "evaluation")
_fields: Callable[[Entry], tuple[Any, ...]] = itemgetter(*[*_WHOLE, *_REAL, "digest"])
_values: Callable[[Mapping[str, Any]], Iterable[Any]] = methodcaller("values")


def step_record(entry: Entry, at: float) -> StepRecord:
    """The record of one entry, made at `at`. Raises as `StepLog.extend` does."""
    log = StepLog()
    log.extend([{**entry, "at": at}])
    return log.record(0)


@dataclass(frozen=True, slots=True)
class Columns:
    """Some steps, checked, in the format of `StepLog`. Can be sent to other processes."""

    whole: tuple[array[int], ...]
    real: tuple[array[float], ...]
    words: tuple[array[int], ...]
    """Both words of the digests."""
    groups: tuple[tuple[list[tuple[str, ...]], array[int], array[float]], ...]
    """For each group: its shapes, the shape of each step, and all values."""

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Columns:
        """The columns of one or more journal entries of kind `step`.

        Raises KeyError, TypeError or ValueError if an entry lacks a required field.
        """
        try:
            *columns, digests = zip(*map(_fields, entries), strict=True)
            whole = tuple(_whole_numbers(column) for column in columns[: len(_WHOLE)])
            real = tuple(_real_numbers(column) for column in columns[len(_WHOLE) :])
            lows, highs = zip(*digests, strict=True)
            if not all(map(math.isfinite, real[-1])):
                raise ValueError("a step was recorded at no time")
            groups = tuple(_group([entry.get(name) for entry in entries]) for name in _GROUPS)
            return cls(whole, real, (_words(lows), _words(highs)), groups)
        except (OverflowError, AttributeError) as error:
            raise ValueError(f"not a step: {error}") from error


def _group(rows: Sequence[Mapping[str, Any] | None]) -> tuple[list[tuple[str, ...]], array[int], array[float]]:
    if not any(rows):
        return [()], array("q", [0]) * len(rows), array("d")
    there = cast("Sequence[Mapping[str, Any]]", rows if all(rows) else [row or _NOTHING for row in rows])
    names = [*map(tuple, there)]
    shapes = {shape: number for number, shape in enumerate(dict.fromkeys(names))}
    values = _real_numbers(list(chain.from_iterable(map(_values, there))))
    return list(shapes), array("q", map(shapes.__getitem__, names)), values


class StepLog:
    """Every recorded step, in that order; a step computed again occurs again."""

    def __init__(self) -> None:
        self._whole: dict[Whole, array[int]] = {name: array("i") for name in _WHOLE}
        self._real: dict[Real, array[float]] = {name: array("d") for name in _REAL}
        self._words = (array("Q"), array("Q"))
        self._groups: dict[Group, _Named] = {name: _Named() for name in _GROUPS}

    def __len__(self) -> int:
        return len(self._real["at"])

    def extend(self, entries: Sequence[Entry]) -> range:
        """Add journal entries of kind `step`; returns their indices.

        Raises KeyError, TypeError or ValueError, and adds nothing, if an entry lacks a required field.
        """
        return self.add(Columns.of(entries)) if entries else range(len(self), len(self))

    def add(self, columns: Columns) -> range:
        """Add some steps; returns their indices."""
        begin = len(self)
        for name, new in zip(_WHOLE, columns.whole, strict=True):
            self._whole[name] = _longer(self._whole[name], new)
        for word_column, new_words in zip(self._words, columns.words, strict=True):
            word_column.extend(new_words)
        for real_column, new_real in zip(self._real.values(), columns.real, strict=True):
            real_column.extend(new_real)
        for group, parts in zip(self._groups.values(), columns.groups, strict=True):
            group.extend(*parts)
        return range(begin, len(self))

    def number(self, index: int) -> int:
        """The number of the step."""
        return self._whole["step"][index]

    def generation(self, index: int) -> int:
        return self._whole["generation"][index]

    def generations(self, indices: range) -> set[int]:
        """The generations of these steps."""
        return set(self._whole["generation"][indices.start : indices.stop])

    def at(self, index: int) -> float:
        return self._real["at"][index]

    def total_s(self, index: int) -> float:
        return sum(self._groups["seconds"].values_of(index))

    def record(self, index: int) -> StepRecord:
        """The record of a step. Raises IndexError for an invalid index."""
        fields: dict[str, Any] = {name: column[index] for name, column in self._whole.items()}
        fields |= {name: column[index] for name, column in self._real.items()}
        fields |= {name: group.row(index) for name, group in self._groups.items()}
        return StepRecord(digest=(self._words[0][index], self._words[1][index]), **fields)

    def numbers(self, indices: range) -> Int64s:
        """The steps' numbers."""
        return np.array(self._whole["step"][indices.start : indices.stop], dtype=np.int64)

    def moments(self, indices: range) -> Floats:
        """The times when these steps were recorded: wall clock, in seconds."""
        return np.array(self._real["at"][indices.start : indices.stop], dtype=np.float64)

    def all(self) -> Steps:
        """All steps so far."""
        return Steps(self, np.arange(len(self)))

    def chosen(self, indices: Int64s) -> Steps:
        return Steps(self, indices)

    # -- columns, of some steps --

    def whole(self, name: Whole, indices: Int64s) -> Int64s:
        return np.asarray(self._whole[name])[indices].astype(np.int64)

    def real(self, name: Real, indices: Int64s) -> Floats:
        return np.asarray(self._real[name], dtype=np.float64)[indices]

    def words(self, indices: Int64s) -> tuple[UInt64s, UInt64s]:
        low, high = (np.asarray(column, dtype=np.uint64)[indices] for column in self._words)
        return low, high

    def group(self, name: Group) -> _Named:
        return self._groups[name]


class Steps(Sequence[StepRecord]):
    """Some steps of a log, in any order. Columns have one value for each."""

    def __init__(self, log: StepLog, indices: Int64s) -> None:
        self._log, self.indices = log, indices

    @classmethod
    def of(cls, entries: Sequence[Entry]) -> Steps:
        """The steps of journal entries. Raises as `StepLog.extend` does."""
        log = StepLog()
        log.extend(entries)
        return log.all()

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, index: int) -> StepRecord: ...
    @overload
    def __getitem__(self, index: slice) -> Steps: ...
    def __getitem__(self, index: int | slice) -> StepRecord | Steps:
        if isinstance(index, slice):
            return Steps(self._log, self.indices[index])
        return self._log.record(int(self.indices[index]))

    def __iter__(self) -> Iterator[StepRecord]:
        return map(self._log.record, self.indices.tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Steps):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]  # as lists have none

    def __repr__(self) -> str:
        return f"Steps of {len(self)}"

    def whole(self, name: Whole) -> Int64s:
        return self._log.whole(name, self.indices)

    def real(self, name: Real) -> Floats:
        return self._log.real(name, self.indices)

    def words(self) -> tuple[UInt64s, UInt64s]:
        """The digests, low and high words."""
        return self._log.words(self.indices)

    def names(self, group: Group) -> list[str]:
        """The names that occur in any of the steps, in order of first appearance."""
        return self._log.group(group).names(self.indices)

    def named(self, group: Group, name: str) -> Floats:
        """The values of a name; NaN if a step has no such number."""
        return self._log.group(group).column(name)[self.indices]

    def has(self, group: Group, name: str) -> npt.NDArray[np.bool_]:
        return self._log.group(group).has(name)[self.indices]

    def with_any(self, group: Group) -> Steps:
        """The steps that have any number of the group."""
        return Steps(self._log, self.indices[self._log.group(group).counts()[self.indices] > 0])

    def total_s(self) -> Floats:
        """Seconds that each step took, all phases together, as measured by one worker."""
        return self._log.group("seconds").sums()[self.indices]


class _Named:
    """Numbers by name for each step. Steps with the same names in the same order have one shape."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, ...], int] = {}
        self._shapes: list[tuple[str, ...]] = []
        self._of: array[int] = array("H")
        """Step -> its shape."""
        self._begins: array[int] = array("q")
        """The index of the first value of each `_EACH`-th step; for every step they would need much memory."""
        self._values: array[float] = array("d")

    def extend(self, shapes: Sequence[tuple[str, ...]], of: array[int], values: array[float]) -> None:
        """Add steps. `of`: each step's index in `shapes`."""
        for shape in shapes:
            if shape not in self._numbers:
                self._numbers[shape] = len(self._shapes)
                self._shapes.append(shape)
        if len(self._shapes) > _MOST_SHAPES and self._of.typecode == "H":
            self._of = array("q", self._of)
        known, lengths = [self._numbers[shape] for shape in shapes], [len(shape) for shape in shapes]
        begin, first = len(self._values), -len(self._of) % _EACH
        if len(shapes) == 1:
            self._begins.extend([begin + lengths[0] * place for place in range(first, len(of), _EACH)])
            self._of.extend(array(self._of.typecode, known) * len(of))
        else:
            many = list(map(lengths.__getitem__, of))
            begins = list(accumulate(many, initial=begin))[:-1]
            self._begins.extend(begins[first::_EACH])
            self._of.extend(array(self._of.typecode, map(known.__getitem__, of)))
        self._values.extend(values)

    def values_of(self, index: int) -> array[float]:
        before = self._of[index - index % _EACH : index]
        begin = self._begins[index // _EACH] + sum(len(self._shapes[shape]) for shape in before)
        return self._values[begin : begin + len(self._shapes[self._of[index]])]

    def row(self, index: int) -> Mapping[str, float]:
        return dict(zip(self._shapes[self._of[index]], self.values_of(index), strict=True))

    def names(self, indices: Int64s) -> list[str]:
        used = np.flatnonzero(np.bincount(np.asarray(self._of)[indices])).tolist()
        return list(dict.fromkeys(name for shape in used for name in self._shapes[shape]))

    def column(self, name: str) -> Floats:
        found = np.full(len(self._of), np.nan)
        values = np.asarray(self._values)  # not a copy, as they are many; it is released before more can be added
        for rows, places in self._places(name):
            found[rows] = values[places]
        return found

    def has(self, name: str) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(self._of), dtype=np.bool_)
        for rows, _ in self._places(name):
            found[rows] = True
        return found

    def counts(self) -> Int64s:
        """The number of values of each step."""
        many: Int64s = self._lengths()[np.asarray(self._of)]
        return many

    def sums(self) -> Floats:
        """The sum of each step's values, added from the first to the last, as `sum` does."""
        found, values = np.zeros(len(self._of)), np.asarray(self._values)
        for names, rows, begins in self._by_shape():
            for place in range(len(names)):
                found[rows] += values[begins + place]
        return found

    def _places(self, name: str) -> Iterator[tuple[Int64s, Int64s]]:
        """Steps that have the name, and the indices of the values."""
        for names, rows, begins in self._by_shape():
            if name in names:
                yield rows, begins + names.index(name)

    def _by_shape(self) -> Iterator[tuple[tuple[str, ...], Int64s, Int64s]]:
        """Names, steps with just these names, and the index of each step's first value: some steps after others."""
        of, lengths = np.asarray(self._of), self._lengths()
        for start in range(0, len(of), _SOME):
            shapes = of[start : start + _SOME]
            many = lengths[shapes]
            begins = self._begins[start // _EACH] + np.cumsum(many) - many
            by_shape = np.argsort(shapes, kind="stable")
            first = 0
            for number, count in enumerate(np.bincount(shapes).tolist()):
                rows = by_shape[first : first + count]
                if count:
                    yield self._shapes[number], rows + start, begins[rows]
                first += count

    def _lengths(self) -> Int64s:
        """The number of names of each shape."""
        return np.array([len(names) for names in self._shapes], dtype=np.int64)


def _longer(column: array[int], new: array[int]) -> array[int]:
    """The column with more numbers: of 32 bits, as nearly always, or of 64."""
    if column.typecode == "i":
        try:
            column.extend(array("i", new))
            return column
        except OverflowError:
            column = array("q", column)
    column.extend(new)
    return column


def _whole_numbers(values: Sequence[Any]) -> array[int]:
    return _converted("q", values, int)


def _words(texts: Sequence[str]) -> array[int]:
    """The 64-bit numbers of hexadecimal texts."""
    if set(map(len, texts)) == {_WORD_DIGITS}:
        with suppress(ValueError):
            found = array("Q", bytes.fromhex("".join(texts)))
            if sys.byteorder == "little":
                found.byteswap()
            if len(found) == len(texts):  # `fromhex` ignores spaces
                return found
    return array("Q", [int(text, 16) for text in texts])


def _real_numbers(values: Sequence[Any]) -> array[float]:
    """Floating-point values; "nan" and "inf" may be texts."""
    return _converted("d", values, float)


def _converted(code: str, values: Sequence[Any], convert: Callable[[Any], Any]) -> array[Any]:
    try:
        return array(code, values)
    except TypeError:
        return array(code, [convert(value) for value in values])
