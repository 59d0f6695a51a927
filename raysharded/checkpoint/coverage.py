"""Do boxes tile a tensor: every cell once? Pure geometry over (offsets, sizes)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a box: one number per dimension; every size at least 1."""

Fault = tuple[Literal["missing", "twice"], tuple[int, ...]]
"""What is wrong, and the first cell (in row-major order of the slabs looked at) where it is."""


def is_within(shape: tuple[int, ...], extent: Extent) -> bool:
    """Whether a box has the tensor's dimensions, is not empty, and lies inside the tensor."""
    offsets, sizes = extent
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        return False
    return all(o >= 0 and s >= 1 and o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))


def find_fault(shape: tuple[int, ...], extents: Sequence[Extent]) -> Fault | None:
    """The first cell that no box or more than one box covers; None if the boxes tile the tensor.

    Every box must be within the shape. Law: None if and only if each cell of the tensor is in exactly one box.
    n boxes that cut dimension 0 alone, or form a grid, take O(n log n); any others at most O(n^2) per dimension.
    """
    if 0 in shape:
        return None  # no cells; a box within it cannot exist either
    return _fault(shape, extents, 0)


def _fault(shape: tuple[int, ...], extents: Sequence[Extent], dim: int) -> Fault | None:
    if dim == len(shape):
        return None if len(extents) == 1 else (("twice" if extents else "missing"), ())
    if len(extents) == 1 and extents[0][1][dim:] == shape[dim:]:
        return None
    for start, inside in _slabs(shape[dim], extents, dim):
        if len(inside) == 1 and inside[0][1][dim + 1 :] == shape[dim + 1 :]:
            continue
        fault = _fault(shape, inside, dim + 1) if inside else ("missing", (0,) * (len(shape) - dim - 1))
        if fault is not None:
            return fault[0], (start, *fault[1])
    return None


def _slabs(length: int, extents: Sequence[Extent], dim: int) -> list[tuple[int, list[Extent]]]:
    """Dimension `dim` cut wherever a box begins or ends: (where the slab starts, the boxes that span it)."""
    groups: dict[tuple[int, int], list[Extent]] = {}
    for extent in extents:
        start = extent[0][dim]
        groups.setdefault((start, start + extent[1][dim]), []).append(extent)
    ordered = sorted(groups)
    if all(a[1] <= b[0] for a, b in pairwise(ordered)):  # the usual case: nothing overlaps
        at = 0
        slabs: list[tuple[int, list[Extent]]] = []
        for start, stop in ordered:
            if start > at:
                slabs.append((at, []))
            slabs.append((start, groups[start, stop]))
            at = stop
        return slabs if at == length else [*slabs, (at, [])]
    cuts = sorted({0, length, *(edge for group in ordered for edge in group)})
    return [
        (lo, [e for group in ordered if group[0] <= lo and hi <= group[1] for e in groups[group]])
        for lo, hi in pairwise(cuts)
    ]
