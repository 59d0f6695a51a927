"""Long series, thinned."""

from __future__ import annotations

import math

from hypothesis import given, strategies as st

from raysharded.report.page.charts import changes, extremes

values = st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=300)


@given(values, st.integers(1, 20))
def test_of_every_bucket_the_lowest_and_the_highest_stay(series: list[float], buckets: int) -> None:
    kept = extremes(series, buckets)
    assert kept == sorted(set(kept))
    assert len(kept) <= max(2 * buckets, 3 * buckets + 2)
    if len(series) <= 2 * buckets:
        assert kept == list(range(len(series)))
        return
    assert (kept[0], kept[-1]) == (0, len(series) - 1)
    for bucket in range(buckets):
        places = range(bucket * len(series) // buckets, (bucket + 1) * len(series) // buckets)
        finite = [series[place] for place in places if math.isfinite(series[place])]
        there = [series[place] for place in kept if place in places]
        if finite:
            assert (min(finite), max(finite)) == (min(filter(math.isfinite, there)), max(filter(math.isfinite, there)))
        if len(finite) < len(places):
            assert any(not math.isfinite(value) for value in there)


def test_a_single_peak_in_a_million_stays() -> None:
    series = [1.0] * 1_000_000
    series[654_321] = 9.0
    kept = extremes(series, 1000)
    assert 654_321 in kept
    assert len(kept) <= 3002


@given(st.lists(st.integers(1, 3), max_size=60))
def test_a_stepwise_series_can_be_drawn_from_its_changes(workers: list[int]) -> None:
    series = [float(number) for number in workers]
    kept = changes(series, 100)
    assert len(kept) == len(set(kept))
    for place, value in enumerate(series):
        following = next(index for index in kept if index >= place)
        assert series[following] == value


def test_a_stepwise_series_that_always_changes_is_thinned_too() -> None:
    assert len(changes([float(number % 2) for number in range(100_000)], 100)) <= 302
