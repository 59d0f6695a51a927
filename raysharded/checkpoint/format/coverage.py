"""Boxes of one tensor as plain tuples. Pure geometry over (offsets, sizes)."""

from __future__ import annotations

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""(offsets, sizes) of a box: one number per dimension; every size at least 1."""


def is_within(shape: tuple[int, ...], extent: Extent) -> bool:
    """Whether a box has the tensor's dimensions, is not empty, and lies inside the tensor."""
    offsets, sizes = extent
    if len(offsets) != len(shape) or len(sizes) != len(shape):
        return False
    return all(o >= 0 and s >= 1 and o + s <= n for o, s, n in zip(offsets, sizes, shape, strict=True))
