"""Check that the boxes of every tensor tile it, in columns: a million boxes in a second or two.

Boxes tile a tensor if no two of them share a cell and they have as many cells as the tensor. For boxes on a grid,
overlaps are found directly, for any number of boxes. On a grid, the intervals in every dimension are equal or disjoint,
as any mesh of workers makes them. Other boxes are compared in pairs, and are allowed in small numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from raysharded.checkpoint.format.boxes import BoxTable, Int64, padded

MAX_IRREGULAR_BOXES = 512
"""Maximum boxes of one tensor that lie on no grid."""
MAX_IRREGULAR_PAIRS = 1 << 23
"""Maximum sum, over all tensors, of the squared numbers of boxes that lie on no grid."""

Fault = tuple[Literal["missing", "twice"], tuple[int, ...]]
"""Kind of fault, and a cell that has it; of missing cells the first in row-major order."""


class TooIrregular(Exception):
    """More than MAX_IRREGULAR_BOXES boxes of a tensor, or MAX_IRREGULAR_PAIRS in all, that lie on no grid."""


def first_fault(boxes: BoxTable, shapes: Sequence[tuple[int, ...]]) -> tuple[int, Fault] | None:
    """(number of the first tensor with a cell that is not in exactly one box, its fault); None if there is none.

    `shapes[i]`, of at most 2^62 cells, belongs to `boxes.names[i]`. Every box must be within its tensor. Takes
    O(n log n) per dimension. Raises TooIrregular.
    """
    whole = padded(shapes, max([boxes.width, *map(len, shapes)]), 1)
    boxes = boxes.rows(np.lexsort((*boxes.offsets.T[::-1], boxes.tensor)))
    doubtful = _not_cut_in_rows(boxes, whole)
    boxes = boxes.rows(doubtful[boxes.tensor])
    twice = _cells_in_two(boxes)
    volume = np.zeros(len(shapes), np.int64)
    np.add.at(volume, boxes.tensor, boxes.sizes.prod(axis=1))
    short = doubtful & (volume != whole.prod(axis=1))
    short[list(twice)] = True
    if not short.any():
        return None
    number = int(np.argmax(short))
    if number in twice:
        return number, ("twice", twice[number][: len(shapes[number])])
    return number, ("missing", _first_missing(boxes.rows(boxes.tensor == number), shapes[number]))


def _not_cut_in_rows(boxes: BoxTable, whole: Int64) -> NDArray[np.bool_]:
    """[tensors]: True where the sorted boxes are not consecutive runs of whole rows from the first to the last."""
    counts = np.bincount(boxes.tensor, minlength=len(whole))
    empty = (whole == 0).any(axis=1)
    if boxes.width == 0:  # tensors without dimensions: one box each
        lone: NDArray[np.bool_] = ~empty & (counts != 1)
        return lone
    doubtful: NDArray[np.bool_] = ~empty & (counts == 0)
    of_tensor = whole[boxes.tensor, : boxes.width]
    begin, end = boxes.offsets[:, 0], boxes.offsets[:, 0] + boxes.sizes[:, 0]
    first = np.ones(len(boxes), np.bool_)
    first[1:] = boxes.tensor[1:] != boxes.tensor[:-1]
    last = np.ones(len(boxes), np.bool_)
    last[:-1] = first[1:]
    expected = np.zeros(len(boxes), np.int64)
    expected[1:] = np.where(first[1:], 0, end[:-1])
    good = (begin == expected) & (~last | (end == of_tensor[:, 0]))
    good &= (boxes.sizes[:, 1:] == of_tensor[:, 1:]).all(axis=1)
    doubtful[boxes.tensor[~good]] = True
    return doubtful


def _cells_in_two(boxes: BoxTable) -> dict[int, tuple[int, ...]]:
    """For each tensor with two boxes that share a cell, such a cell. The boxes are sorted by tensor and offsets."""
    ends = np.searchsorted(boxes.tensor, boxes.tensor, side="right")
    here: Int64 = np.arange(len(boxes))
    # Boxes on a grid that share a cell are equal, and equal boxes are neighbours now. Some overlapping boxes of a
    # tensor with one dimension are neighbours too.
    shared = _meeting(boxes, here, ends, 1)
    loose = _off_grid(boxes)
    loose[boxes.tensor[shared[0]]] = False
    here = here[loose[boxes.tensor]]
    counts = np.unique(boxes.tensor[here], return_counts=True)[1]
    if counts.max(initial=0) > MAX_IRREGULAR_BOXES or (counts**2).sum() > MAX_IRREGULAR_PAIRS:
        raise TooIrregular(f"{counts.sum()} boxes of {len(counts)} tensors lie on no grid")
    found = [shared, *(_meeting(boxes, here, ends, step) for step in range(2, counts.max(initial=0)))]
    return {
        int(boxes.tensor[one]): tuple(np.maximum(boxes.offsets[one], boxes.offsets[other]).tolist())
        for pairs in reversed(found)
        for one, other in zip(*(side.tolist() for side in pairs), strict=True)
    }


def _meeting(boxes: BoxTable, here: Int64, ends: Int64, step: int) -> tuple[Int64, Int64]:
    """The pairs (a box of `here`, the one `step` further in the same tensor) that share a cell."""
    one = here[here + step < ends[here]]
    for dim in range(boxes.width):
        other = one + step
        begin, size = boxes.offsets[:, dim], boxes.sizes[:, dim]
        one = one[(begin[one] < begin[other] + size[other]) & (begin[other] < begin[one] + size[one])]
    return one, one + step


def _off_grid(boxes: BoxTable) -> NDArray[np.bool_]:
    """[tensors]: True where two boxes have intervals that are neither equal nor disjoint in some dimension."""
    loose = np.zeros(len(boxes.names), np.bool_)
    for dim in range(boxes.width):
        begin, end = boxes.offsets[:, dim], boxes.offsets[:, dim] + boxes.sizes[:, dim]
        order = np.lexsort((end, begin, boxes.tensor))
        tensor, begin, end = boxes.tensor[order], begin[order], end[order]
        equal = (begin[1:] == begin[:-1]) & (end[1:] == end[:-1])
        apart = (begin[1:] >= end[:-1]) | (tensor[1:] != tensor[:-1])
        loose[tensor[1:][~(equal | apart)]] = True
    return loose


def _first_missing(boxes: BoxTable, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The first cell, in row-major order, that disjoint boxes of a tensor do not cover, found by halving."""
    if not len(boxes):
        return (0,) * len(shape)
    cell: list[int] = []
    offsets, sizes = boxes.offsets, boxes.sizes
    for dim in range(len(shape)):
        rest, first, length = math.prod(shape[dim + 1 :]), 0, shape[dim]
        volumes = sizes[:, dim + 1 : len(shape)].prod(axis=1)
        begin, end = offsets[:, dim], offsets[:, dim] + sizes[:, dim]
        while length > 1:
            half = length // 2
            inside = np.minimum(end, first + half) - np.maximum(begin, first)
            if int((np.maximum(inside, 0) * volumes).sum()) < half * rest:
                length = half
            else:
                first, length = first + half, length - half
        cell.append(first)
        around = (begin <= first) & (first < end)
        offsets, sizes = offsets[around], sizes[around]
    return tuple(cell)


Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a box: one number per dimension; every size at least 1."""


def is_within(shape: tuple[int, ...], extent: Extent) -> bool:
    """Whether a box has the tensor's dimensions, is not empty, and lies inside the tensor."""
    offsets, sizes = extent
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        return False
    return all(o >= 0 and s >= 1 and o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
