"""Data of the page's charts: series, pieces of time and marks, thinned and rounded. Pure.

Of each bucket of neighbours the lowest and the highest value remain. A line through them covers the same pixels as one
through all points, as long as there are more buckets than pixels: no peak is lost. (As in Jugel et al., "M4: A
Visualization-Oriented Time Series Data Aggregation", VLDB 2014, without the first and last value of each bucket.)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from raysharded.report.history.incidents import LETTERS, costliest
from raysharded.report.history.run_summary import RunSummary
from raysharded.report.history.step_table import Floats, Int64s
from raysharded.report.history.wall_time import MICRO, PARTS, Piece, Track


def extremes(values: Sequence[float] | Floats, buckets: int) -> list[int]:
    """At most `3 * buckets + 2` indices, ascending: the first and the last, and of each bucket the lowest, the highest,
    and the first non-finite value. All indices, if they are no more than `2 * buckets`.

    Law: the kept values of any bucket have the same minimum and maximum as all its values.
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
    """The changes of a stepwise series, with the point before each change, the first and the last; thinned as by
    `extremes` if there are too many."""
    series = np.asarray(values, dtype=np.float64)
    number = len(series)
    at = np.flatnonzero(series[1:] != series[:-1]) + 1
    kept = np.unique(np.concatenate(([0], at, at - 1, [number - 1]))) if number else at
    if len(kept) > 4 * buckets:
        kept = kept[extremes(series[kept], buckets)]
    found: list[int] = kept.tolist()
    return found


def _extremes(values: Floats) -> list[int]:
    """The indices of the lowest, the highest, and the first non-finite value."""
    finite = np.isfinite(values)
    if finite.all():
        return [int(values.argmin()), int(values.argmax())]
    found = [int((~finite).argmax())]
    if finite.any():
        found += [int(np.where(finite, values, np.inf).argmin()), int(np.where(finite, values, -np.inf).argmax())]
    return found


BUCKETS = 1000
"""Nearly always more than the pixels of a chart's width."""
LOST_BUCKETS = 250
MOST_MARKS = 300
MOST_PIECES = 1500
_MOST_GAPS = 200
_GAP = 1 / 500
"""Fraction of all the time: no line is drawn between two steps that are further apart."""


def drawn(summary: RunSummary) -> dict[str, Any]:
    """The data of the page's script, ready for JSON. Times are seconds since the run's first entry."""
    track, total = summary.track, summary.times.total
    counts = np.frombuffer(track.counts, dtype=np.uint8)
    counted, lost = np.flatnonzero(counts), np.flatnonzero(counts == 0)
    return {
        "begun": summary.first_at if math.isfinite(summary.first_at) else None,
        "total": total / MICRO,
        "charts": [
            {
                "name": name,
                "title": title,
                "stepped": name == "workers",
                "counted": _series(track, counted, value(track), total, BUCKETS, stepped=name == "workers"),
                "lost": _series(track, lost, value(track), total, LOST_BUCKETS, stepped=name == "workers"),
            }
            for name, title, value in _CHARTS
        ],
        "pieces": [
            [PARTS.index(piece.part), round(piece.begin / MICRO, 3), round(piece.end / MICRO, 3)]
            for piece in _longest(track.pieces)
        ],
        "parts": list(PARTS),
        "marks": [
            {
                "number": number,
                "kind": mark.kind,
                "t": round(mark.at_s, 3),
                "step": mark.step,
                "text": mark.text,
                "letter": LETTERS[mark.kind],
            }
            for number in costliest(summary.incidents, MOST_MARKS)
            for mark in [summary.incidents[number]]
        ],
    }


def _loss(track: Track) -> Floats:
    return track.records.real("loss")


def _lr(track: Track) -> Floats:
    return track.records.real("lr")


def _rate(track: Track) -> Floats:
    """Tokens (or samples) per second."""
    seconds = (np.array(track.ends) - np.array(track.begins)) / MICRO
    seconds = np.where(seconds == 0, track.records.total_s(), seconds)
    rate = np.full(len(seconds), np.nan)
    np.divide(track.records.real("weight"), seconds, out=rate, where=seconds > 0)
    return rate


def _workers(track: Track) -> Floats:
    return track.records.whole("workers").astype(np.float64)


_CHARTS: tuple[tuple[str, str, Callable[[Track], Floats]], ...] = (
    ("loss", "Loss", _loss),
    ("lr", "Learning rate", _lr),
    ("rate", "Tokens (or samples) per second", _rate),
    ("workers", "Workers", _workers),
)


def _series(
    track: Track,
    indices: Int64s,
    all_values: Floats,
    total: int,
    buckets: int,
    *,
    stepped: bool,
) -> dict[str, list[Any]]:
    """Columns: step, time, value. A non-finite value is None; a row of None is a gap, for the axis of time."""
    values = all_values[indices]
    gaps = _gaps(track, indices, total)
    edges = {edge for place in gaps for edge in (place - 1, place)}
    kept = sorted({*(changes(values, buckets) if stepped else extremes(values, buckets)), *edges})
    steps: list[int | None] = []
    times: list[float | None] = []
    shown: list[float | None] = []
    numbers, before = track.records.whole("step"), -1
    for place in kept:
        index = int(indices[place])
        if before >= 0 and _any_in(gaps, before + 1, place):
            steps.append(None)
            times.append(None)
            shown.append(None)
        steps.append(int(numbers[index]))
        times.append(round(track.ends[index] / MICRO, 3))
        shown.append(float(f"{values[place]:.7g}") if math.isfinite(values[place]) else None)
        before = place
    return {"step": steps, "t": times, "y": shown}


def _gaps(track: Track, indices: Int64s, total: int) -> list[int]:
    """The indices, ascending, of steps that began long after the previous step ended: the widest gaps, if there are
    many."""
    apart = np.array(track.begins, dtype=np.int64)[indices[1:]] - np.array(track.ends, dtype=np.int64)[indices[:-1]]
    wide = np.flatnonzero(apart > total * _GAP)
    widest = wide[np.argsort(-apart[wide], kind="stable")[:_MOST_GAPS]]
    return sorted((widest + 1).tolist())


def _any_in(places: Sequence[int], first: int, last: int) -> bool:
    """True if one of the ascending places is within first..last."""
    at = bisect_left(places, first)
    return at < len(places) and places[at] <= last


def _longest(pieces: Sequence[Piece]) -> list[Piece]:
    """All pieces; if there are very many, the longest ones, in order."""
    ranked = sorted(range(len(pieces)), key=lambda index: pieces[index].begin - pieces[index].end)
    return [pieces[index] for index in sorted(ranked[:MOST_PIECES])]
