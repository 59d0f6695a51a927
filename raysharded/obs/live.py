"""A run while it goes on: one live line, and one line that stays for everything that happens to it.

On a terminal the live line is redrawn in place; elsewhere (a file, a job's log) it is printed every few seconds.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from raysharded.clock import Clock
from raysharded.obs.lines import incident_text
from raysharded.obs.units import count, duration, listing, short

PLAIN_INTERVAL_S = 10.0
"""Between two progress lines where they cannot be redrawn."""
_REDRAW_INTERVAL_S = 0.1
_GONE = (OSError, ValueError, SystemExit)
"""What writing raises when the terminal or pipe was closed (rich ends the process then). The run must not end by it."""
_WINDOW_S = 60.0
_WINDOW_STEPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What the live line says."""

    doing: str
    """What the run is about, when that is not training."""
    step: int
    max_steps: int
    loss: float | None
    """None before the first step."""
    rate: float
    """Units per second; NaN if it is not known yet."""
    unit: str
    workers: int
    left_s: float
    """Seconds to the end; NaN if not known."""
    avoided: int = 0
    """Nodes that get no new workers."""
    warning: str = ""
    """What must not be overlooked, for as long as it is so."""


def progress_text(progress: Progress) -> str:
    """The live line."""
    parts = [f"step {progress.step}/{progress.max_steps}"]
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.4f}")
    if math.isfinite(progress.rate):
        parts.append(f"{short(progress.rate)} {progress.unit}/s")
    if progress.workers:
        parts.append(count(progress.workers, "worker"))
    if progress.doing:
        parts.append(progress.doing)
    elif math.isfinite(progress.left_s):
        parts.append(f"{duration(max(1.0, round(progress.left_s)))} left")
    if progress.avoided:
        parts.append(f"{count(progress.avoided, 'node')} avoided")
    if progress.warning:
        parts.append(progress.warning)
    return "  ".join(parts)


class LiveView:
    """Shows a run from its journal entries. All calls from one thread; `close` is a must, also after an error."""

    def __init__(self, console: Console, max_steps: int, clock: Clock, tokens_per_step: int | None = None) -> None:
        """`tokens_per_step`: to show tokens per second; otherwise samples, or steps, per second are shown."""
        self._console, self._clock, self._max_steps = console, clock, max_steps
        self._per_step, self._unit = (tokens_per_step, "tokens") if tokens_per_step else (1, "steps")
        self._redraws = console.is_terminal and not console.is_dumb_terminal
        self._live: Live | None = None
        self._gone = False
        self._shown_at = -math.inf
        self._step, self._workers, self._doing = 0, 0, "starting workers"
        self._loss: float | None = None
        self._avoided = 0
        self._warning = ""
        self._steps_per_s = math.nan
        self._done: deque[tuple[float, int]] = deque(maxlen=_WINDOW_STEPS)
        """(when, step) of the newest steps of this generation."""
        self._members: set[int] | None = None
        """Of the newest generation that was formed."""
        self._forming: set[int] = set()
        self._ready: set[int] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def on_entry(self, kind: str, fields: Mapping[str, Any]) -> None:
        """A journal entry was made. Unknown kinds are passed over."""
        text = self._take(kind, fields)
        if self._gone:
            return
        try:
            for line in (incident_text(kind, fields), text):
                if line is not None:
                    self._print(line)
            self._show(kind)
        except _GONE:
            self._gone = True

    def progress(self) -> Progress:
        """What the live line says now."""
        left = (self._max_steps - self._step) / self._steps_per_s if self._steps_per_s > 0 else math.nan
        return Progress(
            doing=self._doing,
            step=self._step,
            max_steps=self._max_steps,
            loss=self._loss,
            rate=self._steps_per_s * self._per_step,
            unit=self._unit,
            workers=self._workers,
            left_s=left,
            avoided=self._avoided,
            warning=self._warning,
        )

    def close(self) -> None:
        """Leave the last line where it is and give the terminal back. May be called twice."""
        live, self._live = self._live, None
        if live is not None:
            live.update(self._line(), refresh=False)
            with contextlib.suppress(*_GONE):
                live.stop()

    # -- what an entry changes --

    def _take(self, kind: str, fields: Mapping[str, Any]) -> str | None:
        """Keep what the line says; returns a line that stays, for what only a comparison tells."""
        match kind:
            case "started":
                batch = fields.get("batch")
                if batch and self._unit == "steps":
                    self._per_step, self._unit = int(batch["global_batch_size"]), "samples"
                self._step = int(fields.get("resumed_after_step", 0))
            case "worker_ready":
                self._ready.add(int(fields["worker"]))
                if self._members is None:
                    self._doing = f"starting workers: {len(self._ready)} ready"
            case "pause":
                self._doing = "pausing"
            case "paused":
                self._doing = "paused"
            case "resume" | "pause_refused":
                self._doing = ""
            case "worker_left":
                self._ready.discard(int(fields["worker"]))
            case "worker_lost":
                self._ready.discard(int(fields["worker"]))
                if int(fields["worker"]) in self._forming:
                    self._doing = "recovering"
            case "node_avoided":
                self._avoided += 1
            case "generation":
                self._forming = set(fields["members"])
                self._workers, self._step = len(self._forming), int(fields["step"])
                self._doing = "building" if self._members is None else "resharding"
                if fields.get("paused"):  # it will do no step
                    self._doing = "paused"
            case "formed":
                return self._formed()
            case "step":
                self._take_step(int(fields["step"]), float(fields["loss"]), int(fields["workers"]))
            case "checkpoints_failing":
                newest = fields.get("newest")
                self._warning = f"NO CHECKPOINT SINCE STEP {newest}" if newest else "NO CHECKPOINT"
            case "checkpoint":
                self._warning = ""
            case "finished" | "failed" | "stopped":
                self._doing = kind
        return None

    def _formed(self) -> str | None:
        before, self._members = self._members, set(self._forming)
        self._doing = "paused" if self._doing == "paused" else ""
        self._done.clear()
        self._done.append((self._clock.monotonic(), self._step))
        joined = [str(worker) for worker in sorted(self._members - before)] if before is not None else []
        if not joined:
            return None
        who = f"worker{'s' if len(joined) > 1 else ''} {listing(joined)}"
        return f"step {self._step}: {who} joined, {count(len(self._members), 'worker')}"

    def _take_step(self, step: int, loss: float, workers: int) -> None:
        self._step, self._loss, self._workers = step, loss, workers
        self._doing = "pausing" if self._doing == "pausing" else ""
        now = self._clock.monotonic()
        self._done.append((now, step))
        while len(self._done) > 2 and self._done[0][0] < now - _WINDOW_S:
            self._done.popleft()
        (since, first), (until, last) = self._done[0], self._done[-1]
        if last > first and until > since:
            self._steps_per_s = (last - first) / (until - since)

    # -- showing it --

    def _line(self) -> Text:
        return Text(progress_text(self.progress()), no_wrap=True, overflow="crop")

    def _print(self, line: str) -> None:
        self._console.print(Text(line), soft_wrap=True, highlight=False)

    def _show(self, kind: str) -> None:
        now = self._clock.monotonic()
        if self._redraws:
            if self._live is None:
                live = Live(console=self._console, auto_refresh=False)
                live.start()
                self._live = live
            if kind != "step" or now - self._shown_at >= _REDRAW_INTERVAL_S or self._step >= self._max_steps:
                self._shown_at = now
                self._live.update(self._line(), refresh=True)
        elif kind == "step" and (now - self._shown_at >= PLAIN_INTERVAL_S or self._step >= self._max_steps):
            self._shown_at = now
            self._print(progress_text(self.progress()))
