"""Long series, thinned to what can be drawn: of each bucket of neighbours the lowest and the highest stay. Pure.

A line drawn through them covers the same pixels as one through all points, as long as there are more buckets than
pixels: no peak is lost (as in Jugel et al., "M4: A Visualization-Oriented Time Series Data Aggregation", VLDB 2014,
without the first and last of each bucket).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def extremes(values: Sequence[float] | Floats, buckets: int) -> list[int]:
    """At most `3 * buckets + 2` indices, ascending: the first and the last, and of each bucket the lowest, the highest,
    and the first that is not finite. All of them, if they are no more than `2 * buckets`.

    Law: the kept values have the same minimum and maximum as all of any bucket.
    """
    number = len(values)
    if number <= 2 * buckets:
        return list(range(number))
    series, kept = np.asarray(values, dtype=np.float64), {0, number - 1}
    for bucket in range(buckets):
        begin, end = bucket * number // buckets, (bucket + 1) * number // buckets
        kept.update(begin + index for index in _extremes(series[begin:end]))
    return sorted(kept)


def changes(values: Sequence[float] | Floats, buckets: int) -> list[int]:
    """Where a stepwise series changes, with the point before each change, the first and the last; thinned as
    `extremes` does if that is too much."""
    series = np.asarray(values, dtype=np.float64)
    number = len(series)
    at = np.flatnonzero(series[1:] != series[:-1]) + 1
    kept = np.unique(np.concatenate(([0], at, at - 1, [number - 1]))) if number else at
    if len(kept) > 4 * buckets:
        kept = kept[extremes(series[kept], buckets)]
    found: list[int] = kept.tolist()
    return found


def _extremes(values: Floats) -> list[int]:
    """The indices of the lowest and the highest, and of the first that is not finite."""
    finite = np.isfinite(values)
    if finite.all():
        return [int(values.argmin()), int(values.argmax())]
    found = [int((~finite).argmax())]
    if finite.any():
        found += [int(np.where(finite, values, np.inf).argmin()), int(np.where(finite, values, -np.inf).argmax())]
    return found
