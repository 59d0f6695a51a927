"""Numbers as people read them."""

from __future__ import annotations

import math

import pytest

from raysharded.display.quantities import count, duration, listing, moment, short, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (0.254, "0.25 s"),
        (9.99, "9.99 s"),
        (9.999, "10 s"),
        (59.6, "1 min 0 s"),
        (200, "3 min 20 s"),
        (3599.9, "1 h 0 min"),
        (8000, "2 h 13 min"),
        (370_800, "4 d 7 h"),
        (math.nan, "?"),
        (math.inf, "?"),
    ],
)
def test_durations_have_the_two_units_that_matter(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (3, "3"),
        (0.874, "0.87"),
        (42.06, "42.1"),
        (100, "100"),
        (980.4, "980"),
        (999.6, "1.00k"),
        (12345, "12.3k"),
        (4_560_000, "4.56M"),
        (2.5e15, "2500T"),
        (math.nan, "?"),
    ],
)
def test_numbers_have_three_digits(number: float, text: str) -> None:
    assert short(number) == text


def test_sizes_moments_counts_and_lists() -> None:
    assert [size(512), size(3482), size(3 << 40)] == ["512 B", "3.4 KiB", "3.0 TiB"]
    assert moment(1_700_000_000) == "2023-11-14 22:13:20 UTC"
    assert [count(1, "worker"), count(3, "worker"), count(0, "box", "boxes")] == ["1 worker", "3 workers", "0 boxes"]
    assert [listing([]), listing(["3"]), listing(["3", "5"]), listing(["3", "5", "8"])] == [
        "",
        "3",
        "3 and 5",
        "3, 5 and 8",
    ]
