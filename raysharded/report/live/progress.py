"""Progress of a running run: one live line, and one permanent line for every event.

On a terminal the live line is redrawn in place; elsewhere (a file, a job's log) it is printed every few seconds.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from raysharded.clock import Clock
from raysharded.display.quantities import count, duration, short
from raysharded.report.live.tracker import Progress, Watched

PLAIN_INTERVAL_S = 10.0
"""Seconds between two progress lines if they cannot be redrawn."""
_REDRAW_INTERVAL_S = 0.1
_GONE = (OSError, ValueError, SystemExit)
"""Errors of writing to a closed terminal or pipe (rich then ends the process). The run must survive them."""


def progress_text(progress: Progress) -> str:
    """The live line."""
    parts = [f"step {progress.step}/{progress.max_steps}" if progress.max_steps else f"step {progress.step}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if math.isfinite(progress.rate):
        parts.append(f"{short(progress.rate)} {progress.unit}/s")
    if progress.workers:
        parts.append(count(progress.workers, "worker"))
    if progress.doing:
        parts.append(progress.doing)
    elif math.isfinite(progress.left_s) and progress.left_s > 0:
        parts.append(f"{duration(max(1.0, round(progress.left_s)))} left")
    if progress.avoided:
        parts.append(f"{count(progress.avoided, 'node')} avoided")
    if progress.warning:
        parts.append(progress.warning)
    return "  ".join(parts)


class LiveView:
    """Shows a run from its journal entries. All calls from one thread; `close` is mandatory, also after an error."""

    def __init__(self, console: Console, max_steps: int, clock: Clock, tokens_per_step: int | None = None) -> None:
        """`tokens_per_step`: to show tokens per second; otherwise samples, or steps, per second are shown."""
        self._console, self._clock = console, clock
        self._watched = Watched(max_steps, tokens_per_step)
        self._redraws = console.is_terminal and not console.is_dumb_terminal
        self._live: Live | None = None
        self._gone = False
        self._shown_at = -math.inf

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def on_entry(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Show a new journal entry. Unknown kinds are ignored."""
        lines = self._watched.take(kind, fields, self._clock.monotonic())
        if self._gone:
            return
        try:
            for line in lines:
                self._print(line)
            self._show(kind)
        except _GONE:
            self._gone = True

    def progress(self) -> Progress:
        """The current content of the live line."""
        return self._watched.progress()

    def close(self) -> None:
        """Keep the last line in place and release the terminal. May be called twice."""
        live, self._live = self._live, None
        if live is not None:
            live.update(self._line(), refresh=False)
            with contextlib.suppress(*_GONE):
                live.stop()

    # -- output --

    def _line(self) -> Text:
        return Text(progress_text(self.progress()), no_wrap=True, overflow="crop")

    def _is_done(self) -> bool:
        now = self.progress()
        return now.step >= now.max_steps

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True, highlight=False)

    def _show(self, kind: str) -> None:
        now = self._clock.monotonic()
        if self._redraws:
            if self._live is None:
                live = Live(console=self._console, auto_refresh=False)
                live.start()
                self._live = live
            if kind != "step" or now - self._shown_at >= _REDRAW_INTERVAL_S or self._is_done():
                self._shown_at = now
                self._live.update(self._line(), refresh=True)
        elif kind == "step" and (now - self._shown_at >= PLAIN_INTERVAL_S or self._is_done()):
            self._shown_at = now
            self._print(progress_text(self.progress()))
