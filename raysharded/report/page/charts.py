"""Data of the page's charts: series, pieces of time and marks, thinned and rounded. Pure.

Of each bucket of neighbours the lowest and the highest value remain. A line through them covers the same pixels as one
through all points, as long as there are more buckets than pixels: no peak is lost. (As in Jugel et al., "M4: A
Visualization-Oriented Time Series Data Aggregation", VLDB 2014, without the first and last value of each bucket.)
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from raysharded.display.plain_text import brief
from raysharded.report.history.incidents import LETTERS, costliest
from raysharded.report.history.run_summary import RunSummary
from raysharded.report.history.step_table import Floats, Group, Int64s
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
NAMED_BUCKETS = 400
"""Buckets of an evaluation or a metric: there may be many."""
LOST_BUCKETS = 250
MOST_NAMED = 12
"""Maximum number of charts of evaluations and metrics."""
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
    gaps, apart = _gaps(track, counted, total), _apart(lost)
    return {
        "begun": summary.first_at if math.isfinite(summary.first_at) else None,
        "total": total / MICRO,
        "charts": [
            {
                "name": chart.name,
                "title": chart.title,
                "stepped": chart.name == "workers",
                "log": chart.name not in _FROM_ZERO,
                "sparse": chart.steps is not None,
                "counted": _series(track, counted, gaps, chart, chart.buckets),
                "lost": _series(track, lost, apart, chart, min(chart.buckets, LOST_BUCKETS)),
            }
            for chart in _charts(summary)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Chart:
    name: str
    """As the column of `metrics_table`, where it has one."""
    title: str
    values: Floats
    """A value for every computed step, in order of time."""
    steps: npt.NDArray[np.bool_] | None = None
    """The computed steps that have a value; None: all of them."""
    buckets: int = BUCKETS


_FROM_ZERO = ("rate", "workers")
"""Charts whose axis begins at 0: it cannot be logarithmic."""


def _charts(summary: RunSummary) -> Iterator[_Chart]:
    """The charts, from top to bottom."""
    records = summary.track.records
    yield _Chart(name="loss", title="Loss", values=records.real("loss"))
    for group, name in named(summary)[:MOST_NAMED]:
        has = records.has(group, name)
        yield _Chart(
            name=f"{group}/{name}",
            title=title_of(group, name),
            values=records.named(group, name),
            steps=None if has.all() else has,
            buckets=NAMED_BUCKETS,
        )
    yield _Chart(name="lr", title="Learning rate", values=records.real("lr"))
    yield _Chart(name="rate", title=f"{summary.unit.capitalize()} per second", values=_rate(summary.track))
    yield _Chart(name="workers", title="Workers", values=records.whole("workers").astype(np.float64))


def named(summary: RunSummary) -> list[tuple[Group, str]]:
    """(group, name) of the run's evaluations, then of its metrics."""
    groups: tuple[Group, ...] = ("evaluation", "metrics")
    return [(group, name) for group in groups for name in summary.track.records.names(group)]


def title_of(group: Group, name: str) -> str:
    """The title of an evaluation or a metric."""
    return f"Evaluation: {brief(name, 60)}" if group == "evaluation" else f"Metric: {brief(name, 60)}"


def _rate(track: Track) -> Floats:
    """Tokens, or samples, per second."""
    seconds = (np.array(track.ends) - np.array(track.begins)) / MICRO
    seconds = np.where(seconds == 0, track.records.total_s(), seconds)
    rate = np.full(len(seconds), np.nan)
    np.divide(track.records.real("weight"), seconds, out=rate, where=seconds > 0)
    return rate


def _series(track: Track, indices: Int64s, gaps: list[int], chart: _Chart, buckets: int) -> dict[str, list[Any]]:
    """Columns: step, time, value. A non-finite value is None; a row of None is a gap: before each of `gaps`, places in
    the track's `indices`."""
    if chart.steps is not None:  # they are apart anyway
        indices, gaps = indices[chart.steps[indices]], []
    values = chart.values[indices]
    edges = {edge for place in gaps for edge in (place - 1, place)}
    kept = sorted({*(changes(values, buckets) if chart.name == "workers" else extremes(values, buckets)), *edges})
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


def _apart(indices: Int64s) -> list[int]:
    """The places of indices that do not follow the previous one: the widest gaps, if there are many."""
    apart = np.diff(indices)
    wide = np.flatnonzero(apart > 1)
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
