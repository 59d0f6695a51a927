"""The steps of a run that count, by their numbers. Pure.

A million of them take 8 MB: the numbers of a run's steps are dense, so that a number is a place in an array. A number
far beyond all others is in a dictionary: a damaged journal has any.
"""

from __future__ import annotations

from array import array

import numpy as np

from raysharded.report.history.step_table import Int64s

_NONE = -1
_GAP = 1 << 16
"""Number of missing steps for which places are kept."""


class CountedSteps:
    """Number of a step -> index of the entry that counts."""

    def __init__(self) -> None:
        self._near = array("q")
        """Number -> index, or -1."""
        self._far: dict[int, int] = {}
        self._many = 0

    def __len__(self) -> int:
        return self._many

    def __contains__(self, number: int) -> bool:
        return self.get(number) is not None

    def get(self, number: int) -> int | None:
        """The index; None if the step does not count."""
        if 0 <= number < len(self._near) and self._near[number] != _NONE:
            return self._near[number]
        return self._far.get(number)

    def put(self, number: int, index: int) -> None:
        """Let this entry of the step count, and no other."""
        self._many += number not in self
        if self._is_near(number):
            self._reserve(number)
            self._near[number] = index
            self._far.pop(number, None)
        else:
            self._far[number] = index

    def put_row(self, number: int, indices: range) -> None:
        """As `put`, for consecutive steps from `number` on, none of which counts so far."""
        end = number + len(indices)
        if not self._is_near(number):
            self._far.update(zip(range(number, end), indices, strict=True))
        else:
            self._reserve(end - 1)
            self._near[number:end] = array("q", indices)
        self._many += len(indices)

    def _is_near(self, number: int) -> bool:
        """True for a number with a place in the array, or that gets one: the places stay within the steps' number."""
        return 0 <= number <= max(len(self._near), 2 * self._many + _GAP)

    def take(self, number: int) -> int:
        """Remove the step; returns the index. Raises KeyError if it does not count."""
        index = self.get(number)
        if index is None:
            raise KeyError(number)
        if number in self._far:
            del self._far[number]
        else:
            self._near[number] = _NONE
        self._many -= 1
        return index

    def after(self, number: int) -> list[int]:
        """The numbers of the steps after this one, in order."""
        first = max(0, min(number + 1, len(self._near)))
        near = np.flatnonzero(np.asarray(self._near[first:]) != _NONE) + first
        return sorted([*near.tolist(), *(far for far in self._far if far > number)])

    def columns(self) -> tuple[Int64s, Int64s]:
        """The numbers in order, and their indices."""
        near = np.array(self._near, dtype=np.int64)
        numbers = np.flatnonzero(near != _NONE)
        indices = near[numbers]
        if self._far:
            numbers, indices = np.append(numbers, [*self._far]), np.append(indices, [*self._far.values()])
            order = np.argsort(numbers)
            numbers, indices = numbers[order], indices[order]
        return numbers, indices

    def _reserve(self, number: int) -> None:
        missing = number + 1 - len(self._near)
        if missing > 0:
            self._near.extend(array("q", [_NONE]) * missing)
