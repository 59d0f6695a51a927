"""Positions of tensors' boxes in their files, in columns: hundreds of thousands without an object each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileBox:
    """A hyper-rectangle of one tensor, in C order from byte `start` of its file on."""

    name: str
    """Name of the tensor."""
    offsets: tuple[int, ...]
    """First index of the box in every dimension of the tensor."""
    sizes: tuple[int, ...]
    """Length of the box in every dimension."""
    start: int
    """First byte of the box in the file."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BoxTable:
    """n boxes; entry i of every array describes box i. d is the largest number of dimensions of any box."""

    names: tuple[str, ...]
    """Distinct names of tensors; not all of them need to occur."""
    tensor: Int32
    """[n]: index into `names`."""
    ndim: Int32
    """[n]: number of the box's dimensions; in all others its offset is 0 and its size 1."""
    offsets: Int64
    """[n, d]"""
    sizes: Int64
    """[n, d]"""
    start: Int64
    """[n]: the first byte in the file."""

    @staticmethod
    def of(boxes: Iterable[FileBox]) -> BoxTable:
        """The table of the given boxes, in their order. Raises OverflowError for numbers beyond 64 bits."""
        rows = list(boxes)
        if not rows:
            return _NONE
        names = tuple(sorted({box.name for box in rows}))
        place = {name: at for at, name in enumerate(names)}
        width = max(len(box.sizes) for box in rows)
        return BoxTable(
            names=names,
            tensor=np.array([place[box.name] for box in rows], np.int32),
            ndim=np.array([len(box.sizes) for box in rows], np.int32),
            offsets=padded([box.offsets for box in rows], width, 0),
            sizes=padded([box.sizes for box in rows], width, 1),
            start=np.array([box.start for box in rows], np.int64),
        )

    def __len__(self) -> int:
        return len(self.start)

    @property
    def width(self) -> int:
        """Number of columns (d) of `offsets` and `sizes`."""
        return int(self.sizes.shape[1])

    def __getitem__(self, row: int) -> FileBox:
        width = self.ndim[row]
        return FileBox(
            name=self.names[self.tensor[row]],
            offsets=tuple(self.offsets[row, :width].tolist()),
            sizes=tuple(self.sizes[row, :width].tolist()),
            start=int(self.start[row]),
        )

    def __iter__(self) -> Iterator[FileBox]:
        columns = (self.tensor, self.ndim, self.offsets, self.sizes, self.start)
        for tensor, width, offsets, sizes, start in zip(*(column.tolist() for column in columns), strict=True):
            yield FileBox(
                name=self.names[tensor], offsets=tuple(offsets[:width]), sizes=tuple(sizes[:width]), start=start
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoxTable) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    def rows(self, chosen: slice | NDArray[np.bool_] | NDArray[np.int64]) -> BoxTable:
        """The chosen boxes, in the order chosen."""
        return BoxTable(
            names=self.names,
            tensor=self.tensor[chosen],
            ndim=self.ndim[chosen],
            offsets=self.offsets[chosen],
            sizes=self.sizes[chosen],
            start=self.start[chosen],
        )

    def in_terms_of(self, names: Sequence[str], place: dict[str, int], width: int) -> BoxTable:
        """The table with tensors numbered by `place` in `names`, in arrays for `width` dimensions.

        Raises KeyError for a tensor that has no place.
        """
        used = np.unique(self.tensor)
        numbers = np.zeros(len(self.names), np.int32)
        numbers[used] = [place[self.names[at]] for at in used.tolist()]
        return BoxTable(
            names=tuple(names),
            tensor=numbers[self.tensor],
            ndim=self.ndim,
            offsets=_widened(self.offsets, width, 0),
            sizes=_widened(self.sizes, width, 1),
            start=self.start,
        )


def joined(tables: Sequence[BoxTable], names: tuple[str, ...], width: int) -> tuple[Int32, BoxTable]:
    """(for each box, the number of its original table; all boxes in one table over `names`).

    Raises KeyError for a tensor that is not among `names`.
    """
    place = {name: at for at, name in enumerate(names)}
    width = max([width, *(table.width for table in tables)])
    counts = [len(table) for table in tables]
    same = [
        table if table.names is names and table.width == width else table.in_terms_of(names, place, width)
        for table in tables
        if len(table)
    ]
    if not same:
        return np.zeros(0, np.int32), _NONE.in_terms_of(names, place, width)
    return np.repeat(np.arange(len(tables), dtype=np.int32), counts), BoxTable(
        names=names,
        tensor=np.concatenate([table.tensor for table in same]),
        ndim=np.concatenate([table.ndim for table in same]),
        offsets=np.concatenate([table.offsets for table in same]),
        sizes=np.concatenate([table.sizes for table in same]),
        start=np.concatenate([table.start for table in same]),
    )


def padded(rows: Sequence[tuple[int, ...]], width: int, filler: int) -> Int64:
    """[rows, width]: each row's numbers, then `filler`. No row may be longer. Raises OverflowError."""
    lengths = np.fromiter(map(len, rows), np.int64, len(rows))
    grid = np.full((len(rows), width), filler, np.int64)
    numbers = np.fromiter(chain.from_iterable(rows), np.int64, int(lengths.sum()))
    grid[np.arange(width)[None, :] < lengths[:, None]] = numbers
    return grid


def _widened(column: Int64, width: int, filler: int) -> Int64:
    missing = width - column.shape[1]
    return np.pad(column, ((0, 0), (0, missing)), constant_values=filler) if missing > 0 else column


_NONE = BoxTable(
    names=(),
    tensor=np.zeros(0, np.int32),
    ndim=np.zeros(0, np.int32),
    offsets=np.zeros((0, 0), np.int64),
    sizes=np.zeros((0, 0), np.int64),
    start=np.zeros(0, np.int64),
)
