"""What people want to see of a run while it goes on, kept up to date entry by entry. Pure."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from raysharded.journal.entry_text import brief, incident_text
from raysharded.quantities import count, listing, printable

_WINDOW_S = 60.0
_WINDOW_STEPS = 64
_POINTS = 256
"""Of the loss are kept, of however many steps."""
_HAPPENED = 8
_ASKED = ("pause", "resume", "resize", "drain", "learning_rate", "reshard", "rewind", "stop")
"""Kinds of entries that say what somebody asked for; with `_refused` that it could not be had."""


class Standing(Protocol):
    """Where a run stands, as its handle's `status()` has it."""

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
    """What the live line says."""

    doing: str
    """What the run is about, when that is not training."""
    step: int
    max_steps: int
    """0: not known."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Happened:
    """Something that happened to the run, or that somebody asked for."""

    at: float
    """In the clock of those who tell."""
    text: str
    cost_s: float | None = None
    """Seconds that it held up training; None: not known, or it did not."""


class Watched:
    """The state while entries come, oldest first, from wherever somebody began to look."""

    def __init__(self, max_steps: int, tokens_per_step: int | None = None) -> None:
        """`max_steps`: 0 if it is not known yet. `tokens_per_step`: to count tokens per second; otherwise samples, or
        steps, are counted."""
        self._max_steps = max_steps
        self._per_step, self._unit = (tokens_per_step, "tokens") if tokens_per_step else (1, "steps")
        self._step, self._workers, self._doing = 0, 0, "starting workers"
        self._loss: float | None = None
        self._avoided = 0
        self._warning = ""
        self._steps_per_s = math.nan
        self._done: deque[tuple[float, int]] = deque(maxlen=_WINDOW_STEPS)
        """(when, step) of the newest steps of this generation."""
        self._done_at: float | None = None
        """When the newest step was done."""
        self._members: set[int] | None = None
        """Of the newest generation that was formed."""
        self._forming: set[int] = set()
        self._ready: set[int] = set()
        self.losses = Curve()
        self.incidents: deque[Happened] = deque(maxlen=_HAPPENED)
        """The newest."""
        self.asked: deque[Happened] = deque(maxlen=_HAPPENED)
        """What somebody asked for lately."""
        self.checkpoints: deque[Happened] = deque(maxlen=_HAPPENED)

    def take(self, kind: str, fields: Mapping[str, Any], at: float) -> list[str]:
        """A journal entry was made; unknown kinds are passed over. Returns the lines that stay for it."""
        found = (_line(kind, fields), self._take(kind, fields, at))
        lines = [printable(line) for line in found if line is not None]
        self._keep(kind, fields, at, lines)
        return lines

    def progress(self) -> Progress:
        """What the live line says now."""
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
            avoided=self._avoided,
            warning=self._warning,
        )

    def _keep(self, kind: str, fields: Mapping[str, Any], at: float, lines: list[str]) -> None:
        asked = kind.removesuffix("_refused") in _ASKED and fields.get("who", "asked") == "asked"
        if asked and (kind != "rewind" or "who" in fields):
            self.asked.append(Happened(at=at, text=lines[0] if lines else printable(_in_words(kind, fields))))
        elif kind == "checkpoint":
            self.checkpoints.extend(Happened(at=at, text=line) for line in lines)
        elif kind not in ("step", "started", "finished", "stopped"):
            cost_s = float(fields["total_s"]) if kind == "recovery" else None
            if kind == "formed" and self._done_at is not None:
                cost_s = max(0.0, at - self._done_at)
            self.incidents.extend(Happened(at=at, text=line, cost_s=cost_s) for line in lines)
        if kind == "step":
            self._done_at = at

    def _take(self, kind: str, fields: Mapping[str, Any], at: float) -> str | None:
        """Keep what the line says; returns a line that stays, for what only a comparison tells."""
        match kind:
            case "started":
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
                self._avoided += 1
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
            case "checkpoint":
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
        return f"step {self._step}: {who} joined, {count(len(self._members), 'worker')}"

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
    """A series in at most so many points, of which each stands for as many values: their mean."""

    def __init__(self, points: int = _POINTS) -> None:
        self._most, self._each = points, 1
        self.points: list[float] = []
        self._sum, self._number = 0.0, 0

    def add(self, value: float) -> None:
        """What is not finite is left out."""
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
    """None also for an entry of another version that says too little."""
    try:
        return incident_text(kind, fields)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError):
        return None


def _in_words(kind: str, fields: Mapping[str, Any]) -> str:
    told = ", ".join(f"{name} {value}" for name, value in fields.items() if name not in ("at", "kind"))
    return brief(f"{kind.replace('_', ' ')}: {told}")
