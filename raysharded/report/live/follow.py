"""The changes of a running run, from its storage alone, as they are written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from raysharded.checkpoint import NoSuchKey, Storage
from raysharded.journal.log import read_segment, segment_key
from raysharded.report.newest_step import STANDS_STILL
from raysharded.report.overview import RunOverview, State, look
from raysharded.report.recent import entries_of
from raysharded.report.state_meaning import meaning

OVER = ("finished", "stopped", "failed", "ended", "damaged")
"""States after which nothing happens until the run is started again."""
LOOK_EVERY_S = 10.0
"""Seconds between checks of the driver while the journal does not change."""


def follow(
    storage: Storage,
    glance: RunOverview,
    last_segment: int,
    *,
    every_s: float,
    pause: Callable[[float], None] = time.sleep,
    now: Callable[[], float] = time.time,
    complete: Callable[[RunOverview], RunOverview] = lambda found: found,
) -> Iterator[Sequence[Mapping[str, Any]]]:
    """New data after every poll: journal entries, and entries of kind `state` with `state` and `meaning`.

    One small request per poll. Ends when the run's driver is no longer at work, at once if it is not now. `complete`
    adds to an overview what storage alone does not show. Raises StorageError.
    """
    state, next_segment, looked_at = glance.state, last_segment + 1, now()
    while state not in OVER:
        new, next_segment = _new_entries(storage, next_segment)
        ending = any(entry["kind"] in OVER or entry["kind"] == "orphaned" for entry in new)
        if new and not ending:
            looked_at = now()
            at_work: State = "paused" if _stands_still(new, state == "paused") else "running"
            if state != at_work:
                state = at_work
                glance = replace(glance, state=state)
                new.append(_state(glance, now()))
        elif ending or now() - looked_at >= LOOK_EVERY_S:
            (glance,), looked_at = look([storage], now=now, pause=pause), now()
            glance = complete(glance)
            if glance.state != state:
                state = glance.state
                new.append(_state(glance, looked_at))
        if new:
            yield new
        if state not in OVER:
            pause(every_s)


def _stands_still(entries: Sequence[Mapping[str, Any]], before: bool) -> bool:
    """True if the run is paused after these entries."""
    told = [STANDS_STILL[entry["kind"]] for entry in entries if entry["kind"] in STANDS_STILL]
    return told[-1] if told else before


def _state(run: RunOverview, at: float) -> dict[str, Any]:
    return {"kind": "state", "at": at, "state": run.state, "meaning": meaning(run)}


def _new_entries(storage: Storage, number: int) -> tuple[list[dict[str, Any]], int]:
    """The entries of segments from `number` on, and the number after the last existing segment."""
    found: list[dict[str, Any]] = []
    while True:
        try:
            found += entries_of(read_segment(storage, segment_key(number)))
        except NoSuchKey:
            return found, number
        number += 1
