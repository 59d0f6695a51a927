"""Exact sums: the bits of `math.fsum`, from integers that are added in any order and grouping."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, strategies as st

from raysharded.actors.numerics.exact_sums import NARROW, WIDE, Grid

# Sums of these do not overflow, where fsum raises.
FLOATS = st.floats(allow_nan=False, allow_infinity=False, min_value=-1e300, max_value=1e300)
ROWS = st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=40)
FLOATS_32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def sums_of(grid: Grid, parts: list[np.ndarray[tuple[int, int], np.dtype[np.float64]]]) -> list[float]:
    """The sums of the parts' columns, from the words of each part."""
    words = []
    for part in parts:
        sums = grid.integers(part)
        assert sums is not None
        words.append(grid.words(sums))
    assert all(len(one) == grid.num_words * parts[0].shape[1] for one in words)
    added = [sum(of_parts) for of_parts in zip(*words, strict=True)]
    assert all(abs(word) < 2**63 for word in added)
    return [grid.rounded(total) for total in grid.sums(added)]


@given(rows=ROWS, seed=st.integers(0, 9), workers=st.integers(1, 5))
def test_the_wide_grid_has_the_bits_of_fsum_in_any_order_and_grouping(
    rows: list[tuple[float, float]], seed: int, workers: int
) -> None:
    values = np.array(rows)
    shuffled = np.random.default_rng(seed).permutation(values)
    found = sums_of(WIDE, [shuffled[rank::workers] for rank in range(workers)])
    assert found == [math.fsum(column) for column in values.T.tolist()]
    narrow = NARROW.integers(values)
    assert narrow is None or [NARROW.rounded(total) for total in narrow] == found


@given(values=st.lists(FLOATS_32, min_size=1, max_size=40))
@example(values=[2.0**-149])
@example(values=[-(2.0**128 - 2.0**104)] * 40)
def test_the_narrow_grid_has_all_numbers_of_float32(values: list[float]) -> None:
    assert sums_of(NARROW, [np.array(values)[:, None]]) == [math.fsum(values)]


@pytest.mark.parametrize(
    ("exponent", "is_on_it"), [(-161, False), (-109, False), (-108, True), (127, True), (128, False)]
)
def test_the_narrow_grid_has_float64_numbers_between_its_bounds(exponent: int, is_on_it: bool) -> None:
    largest = math.ldexp(2 - 2.0**-52, exponent)
    assert (NARROW.integers(np.array([[1.0], [largest]])) is not None) == is_on_it


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_on_no_grid(value: float) -> None:
    for grid in (NARROW, WIDE):
        assert grid.integers(np.array([[1.0], [value], [2.0]])) is None


def test_many_numbers_are_added_in_parts_and_stay_as_they_are() -> None:
    values = np.random.default_rng(0).normal(size=(10_000, 3)).astype(np.float32).astype(np.float64)
    values[:, 1] *= 2.0**-100
    before = values.copy()
    for grid in (NARROW, WIDE):
        assert sums_of(grid, [values]) == [math.fsum(column) for column in values.T.tolist()]
    assert np.array_equal(values, before)
    assert sums_of(NARROW, [values[:0]]) == [0.0, 0.0, 0.0]


def test_the_digits_of_many_large_numbers_do_not_overflow() -> None:
    largest = math.ldexp(2 - 2.0**-52, 100)
    for sign in (1, -1):
        assert sums_of(NARROW, [np.full((1 << 16, 1), sign * largest)]) == [sign * largest * 2**16]


def test_a_user_s_errors_of_numpy_are_not_raised() -> None:
    with np.errstate(all="raise"):
        assert sums_of(NARROW, [np.array([[1e38], [1.0]])]) == [1e38]
        assert sums_of(WIDE, [np.array([[1e300], [1e-300]])]) == [1e300]
        assert NARROW.integers(np.array([[1e38], [1e-300]])) is None


def test_a_sum_that_is_too_large_is_infinite() -> None:
    values = np.full((3, 1), -1.5e308)
    assert sums_of(WIDE, [values]) == [-math.inf]
