"""What the page's charts draw: series, pieces of time and marks, thinned and rounded. Pure."""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from raysharded.obs.incidents import LETTERS, costliest
from raysharded.obs.run_summary import RunSummary
from raysharded.obs.times import MICRO, PARTS, Piece, Track
from raysharded.report.thinning import changes, extremes

BUCKETS = 1000
"""More than a screen has pixels for the width of a chart, nearly."""
LOST_BUCKETS = 250
MOST_MARKS = 300
MOST_PIECES = 1500
_MOST_GAPS = 200
_GAP = 1 / 500
"""Of all the time: between two steps that are further apart no line is drawn."""


def drawn(summary: RunSummary) -> dict[str, Any]:
    """As the page's script takes it, ready for JSON. Times are seconds since the run's first entry."""
    track, total = summary.track, summary.times.total
    counted = array("q", (index for index, counts in enumerate(track.counts) if counts))
    lost = array("q", (index for index, counts in enumerate(track.counts) if not counts))
    return {
        "begun": summary.first_at if math.isfinite(summary.first_at) else None,
        "total": total / MICRO,
        "charts": [
            {
                "name": name,
                "title": title,
                "stepped": name == "workers",
                "counted": _series(track, counted, value, total, BUCKETS, stepped=name == "workers"),
                "lost": _series(track, lost, value, total, LOST_BUCKETS, stepped=name == "workers"),
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


def _loss(track: Track, index: int) -> float:
    return track.records[index].loss


def _lr(track: Track, index: int) -> float:
    return track.records[index].lr


def _rate(track: Track, index: int) -> float:
    """Tokens (or samples) per second."""
    record = track.records[index]
    seconds = (track.ends[index] - track.begins[index]) / MICRO or record.total_s
    return record.weight / seconds if seconds > 0 else math.nan


def _workers(track: Track, index: int) -> float:
    return float(track.records[index].workers)


_CHARTS: tuple[tuple[str, str, Callable[[Track, int], float]], ...] = (
    ("loss", "Loss", _loss),
    ("lr", "Learning rate", _lr),
    ("rate", "Tokens (or samples) per second", _rate),
    ("workers", "Workers", _workers),
)


def _series(
    track: Track,
    indices: Sequence[int],
    value: Callable[[Track, int], float],
    total: int,
    buckets: int,
    *,
    stepped: bool,
) -> dict[str, list[Any]]:
    """Columns: step, time, value. A value that is not finite is None; a row of None is a gap, for the axis of time."""
    values = array("d", (value(track, index) for index in indices))
    gaps = _gaps(track, indices, total)
    edges = {edge for place in gaps for edge in (place - 1, place)}
    kept = sorted({*(changes(values, buckets) if stepped else extremes(values, buckets)), *edges})
    steps: list[int | None] = []
    times: list[float | None] = []
    shown: list[float | None] = []
    before = -1
    for place in kept:
        index = indices[place]
        if before >= 0 and _any_in(gaps, before + 1, place):
            steps.append(None)
            times.append(None)
            shown.append(None)
        steps.append(track.records[index].step)
        times.append(round(track.ends[index] / MICRO, 3))
        shown.append(float(f"{values[place]:.7g}") if math.isfinite(values[place]) else None)
        before = place
    return {"step": steps, "t": times, "y": shown}


def _gaps(track: Track, indices: Sequence[int], total: int) -> list[int]:
    """The places, ascending, whose step began long after the one before ended: the widest gaps, if there are many."""
    apart = [(track.begins[indices[place]] - track.ends[indices[place - 1]], place) for place in range(1, len(indices))]
    return sorted(place for _, place in heapq.nlargest(_MOST_GAPS, (gap for gap in apart if gap[0] > total * _GAP)))


def _any_in(places: Sequence[int], first: int, last: int) -> bool:
    """Whether one of the ascending places is within first..last."""
    at = bisect_left(places, first)
    return at < len(places) and places[at] <= last


def _longest(pieces: Sequence[Piece]) -> list[Piece]:
    """All of them, or of very many the longest, in their order."""
    ranked = sorted(range(len(pieces)), key=lambda index: pieces[index].begin - pieces[index].end)
    return [pieces[index] for index in sorted(ranked[:MOST_PIECES])]
