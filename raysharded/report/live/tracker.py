"""A running run's data for people, updated entry by entry. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from raysharded.display.plain_text import brief, one_line
from raysharded.display.quantities import count, listing
from raysharded.journal.entry_text import incident_text
from raysharded.report.history.incidents import is_incident

_WINDOW_S = 60.0
_GCS_LOST = "GCS LOST"
_WINDOW_STEPS = 64
_POINTS = 256
"""Number of loss values kept, for any number of steps."""
_HAPPENED = 8
_ASKED = ("pause", "resume", "resize", "drain", "learning_rate", "mixture_weights", "reshard", "rewind", "stop")
"""Kinds of entries for requests; with `_refused`, for requests that were rejected."""
_NO_INCIDENTS = ("step", "started", "finished", "stopped")


class Standing(Protocol):
    """The current state of a run, as returned by its handle's `status()`."""

    @property
    def name(self) -> str: ...
    @property
    def url(self) -> str: ...
    @property
    def phase(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def max_steps(self) -> int: ...
    @property
    def workers(self) -> tuple[int, ...]: ...
    @property
    def pids(self) -> Mapping[int, int]: ...
    @property
    def nodes(self) -> Mapping[int, str]: ...
    @property
    def mesh(self) -> str: ...
    @property
    def driver(self) -> str: ...
    @property
    def loss(self) -> float | None: ...
    @property
    def checkpoint_step(self) -> int | None: ...
    @property
    def doing(self) -> Mapping[int, str]: ...
    @property
    def busy_s(self) -> Mapping[int, float]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """The content of the live line."""

    doing: str
    """The run's activity, unless it is training."""
    step: int
    max_steps: int
    """The run's last step; 0 if unknown."""
    loss: float | None
    """The newest loss; None before the first step."""
    rate: float
    """Units per second; NaN if unknown so far."""
    unit: str
    workers: int
    left_s: float
    """Seconds to the end; NaN if unknown."""
    avoided: int = 0
    """Nodes that get no new workers."""
    warning: str = ""
    """An important warning, for as long as it holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Happened:
    """An event of the run, or a request."""

    at: float
    """Time of the event, by the caller's clock."""
    text: str
    cost_s: float | None = None
    """Seconds that it held up training; None if unknown, or if it did not."""


class Watched:
    """The state while entries arrive, oldest first, from any point in the run."""

    def __init__(self, max_steps: int, tokens_per_step: int | None = None) -> None:
        """`max_steps`: 0 if unknown so far. `tokens_per_step`: to count tokens per second; otherwise samples, or steps,
        are counted."""
        self._max_steps = max_steps
        self._per_step, self._unit = (tokens_per_step, "tokens") if tokens_per_step else (1, "steps")
        self._step, self._workers, self._doing = 0, 0, "starting workers"
        self._loss: float | None = None
        self._avoided, self._dead = set[str](), set[str]()
        """Ids of nodes that get no new workers, and of nodes that are lost."""
        self._warning = ""
        self._steps_per_s = math.nan
        self._done: deque[tuple[float, int]] = deque(maxlen=_WINDOW_STEPS)
        """(time, step) of the newest steps of this generation."""
        self._done_at: float | None = None
        """The time when the newest step was done."""
        self._members: set[int] | None = None
        """Members of the newest formed generation."""
        self._forming: set[int] = set()
        self._ready: set[int] = set()
        self.losses = Curve()
        self.incidents: deque[Happened] = deque(maxlen=_HAPPENED)
        """The newest incidents."""
        self.asked: deque[Happened] = deque(maxlen=_HAPPENED)
        """The newest requests."""
        self.checkpoints: deque[Happened] = deque(maxlen=_HAPPENED)

    def take(self, kind: str, fields: Mapping[str, Any], at: float) -> list[str]:
        """Take a new journal entry; unknown kinds are ignored. Returns its permanent lines."""
        found = (_line(kind, fields), self._take(kind, fields, at))
        lines = [one_line(line) for line in found if line is not None]
        self._keep(kind, fields, at, lines)
        return lines

    def progress(self) -> Progress:
        """The current content of the live line."""
        known = self._max_steps and self._steps_per_s > 0
        left = (self._max_steps - self._step) / self._steps_per_s if known else math.nan
        return Progress(
            doing=self._doing,
            step=self._step,
            max_steps=self._max_steps,
            loss=self._loss,
            rate=self._steps_per_s * self._per_step,
            unit=self._unit,
            workers=self._workers,
            left_s=left,
            avoided=len(self._avoided - self._dead),
            warning=self._warning,
        )

    def _keep(self, kind: str, fields: Mapping[str, Any], at: float, lines: list[str]) -> None:
        asked = kind.removesuffix("_refused") in (*_ASKED, "paused") and fields.get("who", "asked") == "asked"
        if asked and (kind != "rewind" or "who" in fields):
            self.asked.append(Happened(at=at, text=lines[0] if lines else one_line(_in_words(kind, fields))))
        elif kind == "checkpoint":
            self.checkpoints.extend(Happened(at=at, text=line) for line in lines)
        elif kind not in _NO_INCIDENTS and (kind != "waiting" or is_incident({"kind": kind, **fields})):
            cost_s = float(fields["total_s"]) if kind == "recovery" else None
            if kind == "formed" and self._done_at is not None:
                cost_s = max(0.0, at - self._done_at)
            self.incidents.extend(Happened(at=at, text=line, cost_s=cost_s) for line in lines)
        if kind == "step":
            self._done_at = at

    def _take(self, kind: str, fields: Mapping[str, Any], at: float) -> str | None:
        """Update the live line's content; returns a permanent line for changes that only a comparison reveals."""
        match kind:
            case "started":
                self._avoided, self._dead = set(), set()  # another driver judges anew
                self._max_steps = int(fields.get("max_steps") or self._max_steps)
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
                self._avoided.add(fields["node"])
            case "node_allowed":
                self._avoided.discard(fields["node"])
            case "node_lost":
                self._dead.add(fields["node"])
            case "node_back":
                self._dead.discard(fields["node"])
            case "generation":
                self._forming = set(fields["members"])
                self._workers, self._step = len(self._forming), int(fields["step"])
                self._doing = "building" if self._members is None else "resharding"
                if fields.get("paused"):  # it will do no step
                    self._doing = "paused"
            case "formed":
                return self._formed(at)
            case "step":
                self._take_step(int(fields["step"]), float(fields["loss"]), int(fields["workers"]), at)
            case "checkpoints_failing":
                newest = fields.get("newest")
                self._warning = f"NO CHECKPOINT SINCE STEP {newest}" if newest else "NO CHECKPOINT"
            case "storage_failing":
                self._warning = "STORAGE FAILS"
            case "gcs_lost":
                self._warning = _GCS_LOST
            case "checkpoint" | "storage_back" | "gcs_back" if (self._warning == _GCS_LOST) == (kind == "gcs_back"):
                self._warning = ""
            case "finished" | "failed" | "stopped":
                self._doing = kind
        return None

    def _formed(self, at: float) -> str | None:
        before, self._members = self._members, set(self._forming)
        self._doing = "paused" if self._doing == "paused" else ""
        self._done.clear()
        self._done.append((at, self._step))
        joined = [str(worker) for worker in sorted(self._members - before)] if before is not None else []
        if not joined:
            return None
        who = f"worker{'s' if len(joined) > 1 else ''} {listing(joined)}"
        first = min(self._step + 1, self._max_steps or self._step + 1)
        return f"step {first}: {who} joined, {count(len(self._members), 'worker')}"

    def _take_step(self, step: int, loss: float, workers: int, at: float) -> None:
        self._step, self._loss, self._workers = step, loss, workers
        self._doing = "pausing" if self._doing == "pausing" else ""
        self.losses.add(loss)
        self._done.append((at, step))
        while len(self._done) > 2 and self._done[0][0] < at - _WINDOW_S:
            self._done.popleft()
        (since, first), (until, last) = self._done[0], self._done[-1]
        if last > first and until > since:
            self._steps_per_s = (last - first) / (until - since)


class Curve:
    """A series in a limited number of points, each the mean of equally many values."""

    def __init__(self, points: int = _POINTS) -> None:
        self._most, self._each = points, 1
        self.points: list[float] = []
        self._sum, self._number = 0.0, 0

    def add(self, value: float) -> None:
        """Add a value; non-finite values are ignored."""
        if not math.isfinite(value):
            return
        self._sum, self._number = self._sum + value, self._number + 1
        if self._number < self._each:
            return
        self.points.append(self._sum / self._number)
        self._sum, self._number = 0.0, 0
        if len(self.points) >= self._most:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points, self._each = [(one + two) / 2 for one, two in pairs], 2 * self._each


def _line(kind: str, fields: Mapping[str, Any]) -> str | None:
    """The line of an entry; None also for another version's entry without the needed fields."""
    try:
        return incident_text(kind, fields)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def _in_words(kind: str, fields: Mapping[str, Any]) -> str:
    told = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in ("at", "kind"))
    return brief(f"{kind.replace('_', ' ')}: {told}")
