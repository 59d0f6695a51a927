"""Long series, thinned to what can be drawn: of each bucket of neighbours the lowest and the highest stay. Pure.

A line drawn through them covers the same pixels as one through all points, as long as there are more buckets than
pixels: no peak is lost (as in Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014,
without the first and last of each bucket).
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def extremes(values: Sequence[float], buckets: int) -> list[int]:
    """At most `3 * buckets + 2` indices, ascending: the first and the last, and of each bucket the lowest, the highest,
    and the first that is not finite. All of them, if they are no more than `2 * buckets`.

    Law: the kept values have the same minimum and maximum as all of any bucket.
    """
    number = len(values)
    if number <= 2 * buckets:
        return list(range(number))
    kept = {0, number - 1}
    for bucket in range(buckets):
        begin, end = bucket * number // buckets, (bucket + 1) * number // buckets
        kept.update(begin + index for index in _extremes(values[begin:end]))
    return sorted(kept)


def changes(values: Sequence[float], buckets: int) -> list[int]:
    """Where a stepwise series changes, with the point before each change, the first and the last; thinned as
    `extremes` does if that is too much."""
    number = len(values)
    at = [index for index in range(1, number) if values[index] != values[index - 1]]
    kept = sorted({0, *at, *(index - 1 for index in at), number - 1}) if number else []
    if len(kept) <= 4 * buckets:
        return kept
    return [kept[index] for index in extremes([values[index] for index in kept], buckets)]


def _extremes(values: Sequence[float]) -> list[int]:
    """The indices of the lowest and the highest, and of the first that is not finite."""
    odd = next((index for index, value in enumerate(values) if not math.isfinite(value)), None)
    if odd is None:
        return [values.index(min(values)), values.index(max(values))]
    finite = [(value, index) for index, value in enumerate(values) if math.isfinite(value)]
    return [odd, *([min(finite)[1], max(finite)[1]] if finite else [])]
