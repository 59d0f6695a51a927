"""A remote view of a run: a screen redrawn in place on a terminal. In a file or pipe, a line per event, and one of
progress every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live

from raysharded.display.quantities import moment
from raysharded.report.live.progress import PLAIN_INTERVAL_S, progress_text
from raysharded.report.live.screen import screen
from raysharded.report.live.tracker import Standing, Watched

Entry = Mapping[str, Any]
"""An entry with `kind` and `at`."""
_REDRAW_S = 0.25
_ASK_S = 1.0
"""Seconds between two queries of the run's status."""
_PAST = 5
"""Number of lines shown about events before the view began."""


def view(
    batches: Iterable[Sequence[Entry]],
    status: Callable[[], Standing],
    console: Console,
    *,
    now: Callable[[], float] = time.time,
) -> None:
    """Show a run until there are no more batches; an empty one marks the passage of time. Errors of `status` end it."""
    watched, standing, drawn_at, asked_at = Watched(status().max_steps), status(), 0.0, now()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop", redirect_stdout=False) as live:
        for batch in batches:
            for entry in batch:
                watched.take(entry["kind"], entry, float(entry["at"]))
            if now() - asked_at >= _ASK_S:
                standing, asked_at = status(), now()
            if now() - drawn_at >= _REDRAW_S:
                drawn_at = now()
                live.update(screen(watched, standing, drawn_at), refresh=True)
        live.update(screen(watched, status(), now()), refresh=True)


def lines(batches: Iterable[Sequence[Entry]], max_steps: int, *, past: bool = False) -> Iterator[str]:
    """The view as lines, each with its time. `max_steps`: 0 if unknown. `past`: the first batch has earlier events, of
    which only the newest few are shown. Entries of kind `state` have a `meaning`."""
    watched, told_at, step = Watched(max_steps), 0.0, 0
    for number, batch in enumerate(batches):
        found = [f"{moment(float(entry['at']))}  {line}" for entry in batch for line in _told(watched, entry)]
        yield from found[-_PAST:] if past and not number else found
        done = next((entry for entry in reversed(batch) if entry["kind"] == "step"), None)
        if done is None:
            continue
        at, is_last = float(done["at"]), done["step"] == watched.progress().max_steps
        if (at - told_at >= PLAIN_INTERVAL_S or is_last) and done["step"] != step:
            told_at, step = at, done["step"]
            yield f"{moment(at)}  {progress_text(watched.progress())}"


def _told(watched: Watched, entry: Entry) -> list[str]:
    if entry["kind"] == "state":
        return [f"{entry['state']}: {entry['meaning']}"]
    return watched.take(entry["kind"], entry, float(entry["at"]))
