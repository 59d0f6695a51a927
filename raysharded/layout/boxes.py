"""Boxes: hyper-rectangles of cells in a tensor's index space, and their algebra."""

from __future__ import annotations

import math
from dataclasses import dataclass

from raysharded.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Box:
    """The cells `offsets[d] <= index[d] < offsets[d] + sizes[d]` in every dimension `d`.

    A box of no dimensions has one cell (a scalar). A box with a size of 0 has none.
    Raises ConfigError when the lengths differ or a number is negative.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.sizes) or any(n < 0 for n in (*self.offsets, *self.sizes)):
            raise ConfigError(
                f"Box(offsets={self.offsets}, sizes={self.sizes}): give as many sizes as offsets, all of 0 or more."
            )

    @property
    def cells(self) -> int:
        """Number of cells in the box."""
        return math.prod(self.sizes)

    @property
    def stops(self) -> tuple[int, ...]:
        """The first index behind the box, in every dimension."""
        return tuple(o + s for o, s in zip(self.offsets, self.sizes, strict=True))


def intersect(a: Box, b: Box) -> Box | None:
    """The box of the cells in both, or None when there are none.

    Laws: intersect(a, b) == intersect(b, a); intersect(a, a) == a when a has cells.
    Raises ConfigError when the boxes have different numbers of dimensions.
    """
    _require_same_rank(a, b)
    starts = tuple(map(max, a.offsets, b.offsets))
    sizes = tuple(stop - start for start, stop in zip(starts, map(min, a.stops, b.stops), strict=True))
    return Box(offsets=starts, sizes=sizes) if all(s > 0 for s in sizes) else None


def subtract(a: Box, b: Box) -> list[Box]:
    """Disjoint boxes that cover exactly the cells of `a` not in `b`, in row-major order of their first cells.

    At most two boxes per dimension: first the cells before `b` in dimension 0. Then, in the rows that both share, the
    same in dimension 1 and so on. Last the cells behind `b`.

    Law: cells(a) == cells(intersect(a, b)) + sum(cells(p) for p in subtract(a, b)).
    """
    if a.cells == 0:
        return []
    both = intersect(a, b)
    if both is None:
        return [a]
    before: list[Box] = []
    behind: list[Box] = []
    core = a
    for d in range(len(a.sizes)):
        if core.offsets[d] < both.offsets[d]:
            before.append(_between(core, d, core.offsets[d], both.offsets[d]))
        if both.stops[d] < core.stops[d]:
            behind.append(_between(core, d, both.stops[d], core.stops[d]))
        core = _between(core, d, both.offsets[d], both.stops[d])
    return before + behind[::-1]


def _between(box: Box, dim: int, start: int, stop: int) -> Box:
    offsets = (*box.offsets[:dim], start, *box.offsets[dim + 1 :])
    sizes = (*box.sizes[:dim], stop - start, *box.sizes[dim + 1 :])
    return Box(offsets=offsets, sizes=sizes)


def _require_same_rank(a: Box, b: Box) -> None:
    if len(a.sizes) != len(b.sizes):
        raise ConfigError(f"{a} and {b} have different numbers of dimensions; compare boxes of one tensor.")
