"""Boxes: intersection and difference against sets of cells."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, strategies as st

from raysharded.errors import ConfigError
from raysharded.layout import Box, intersect, subtract


def cells(box: Box | None) -> set[tuple[int, ...]]:
    if box is None:
        return set()
    return set(product(*(range(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[Box, Box]:
    dims = draw(st.integers(0, 4))
    number = st.lists(st.integers(0, 4), min_size=dims, max_size=dims).map(tuple)
    return Box(offsets=draw(number), sizes=draw(number)), Box(offsets=draw(number), sizes=draw(number))


@given(pairs())
def test_the_intersection_has_the_cells_in_both(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert cells(intersect(a, b)) == cells(a) & cells(b)
    assert intersect(a, b) == intersect(b, a)


@given(pairs())
def test_the_difference_has_each_cell_of_a_that_is_not_in_b_once(pair: tuple[Box, Box]) -> None:
    a, b = pair
    parts = subtract(a, b)
    assert sum(p.cells for p in parts) == len(cells(a) - cells(b))
    assert set().union(*map(cells, parts)) == cells(a) - cells(b)
    both = intersect(a, b)
    assert a.cells == (both.cells if both else 0) + sum(p.cells for p in parts)


@given(pairs())
def test_the_difference_comes_in_row_major_order_without_empty_boxes(pair: tuple[Box, Box]) -> None:
    parts = subtract(*pair)
    assert [p.offsets for p in parts] == sorted(p.offsets for p in parts)
    assert all(p.cells > 0 for p in parts)
    assert len(parts) <= max(1, 2 * len(pair[0].sizes))


def test_a_box_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="as many sizes as offsets"):
        Box(offsets=(0,), sizes=(1, 2))
    with pytest.raises(ConfigError, match="0 or more"):
        Box(offsets=(0,), sizes=(-1,))
    with pytest.raises(ConfigError, match="different numbers of dimensions"):
        intersect(Box(offsets=(0,), sizes=(1,)), Box(offsets=(), sizes=()))
