"""How much of each phase a worker computes, and how much of it it waits for others.

In a synchronous step all workers take equally long; the slow one is the one that does not wait. A thread looks at the
one that computes some twenty times a step: where its innermost call is in a collective, it waits. Each look takes the
interpreter from the one that computes: more of them were felt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from raysharded.actors.telemetry.stack_probe import is_waiting
from raysharded.ids import GenerationId

_LOOKS_PER_STEP = 20
_SHORTEST_S, _LONGEST_S = 0.02, 0.5
"""Between two looks."""
_PHASES = frozenset({"data", "forward", "backward", "reduce", "norm", "agree", "apply", "snapshot"})
"""Those of a step; a checkpoint or an evaluation says nothing about a worker's speed."""
_MEMORY = 0.8
"""What the average over steps keeps of itself at every step."""


@dataclass(slots=True)
class Busy:
    """Seconds per step that are not waited, by phase: an average of the newest steps. Any thread."""

    _step: int = -1
    _now: dict[str, float] = field(default_factory=dict)
    _average: dict[str, float] = field(default_factory=dict)
    _num_steps: int = 0

    def add(self, step: int, phase: str, seconds: float) -> None:
        """A stretch of time in a phase of the step after `step`."""
        if step != self._step:
            self._close()
            self._step = step
        self._now[phase] = self._now.get(phase, 0.0) + seconds

    @property
    def num_steps(self) -> int:
        """How many steps the average is of."""
        return self._num_steps

    def average(self) -> Mapping[str, float]:
        return dict(self._average)

    def _close(self) -> None:
        if self._step < 0:
            return
        keep = _MEMORY if self._num_steps else 0.0
        phases = self._average.keys() | self._now.keys()
        self._average = {
            phase: keep * self._average.get(phase, 0.0) + (1 - keep) * self._now.get(phase, 0.0) for phase in phases
        }
        self._now = {}
        self._num_steps += 1


class Sampled(Protocol):
    """What trains, as far as it is looked at: an `Engine`."""

    @property
    def generation(self) -> GenerationId: ...

    @property
    def step(self) -> int: ...

    @property
    def phase(self) -> str: ...


class Sampler:
    """Watches a worker's computing thread, as long as the process lives."""

    def __init__(self, thread_id: Callable[[], int | None], engine: Callable[[], Sampled | None]) -> None:
        """`engine`: of the current generation, None between two."""
        self._thread_id, self._engine = thread_id, engine
        self._busy = Busy()
        self._generation: GenerationId | None = None
        self._step, self._step_began_at = -1, 0.0
        self._pause_s = _SHORTEST_S

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name="sampler").start()

    def busy(self) -> Busy:
        """Of the current generation."""
        return self._busy

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(self._pause_s)
            now = time.monotonic()
            self._sample(now - before, now)  # the whole process may be slow: then it is longer
            before = now

    def _sample(self, seconds: float, now: float) -> None:
        engine = self._engine()
        if engine is None:
            return
        if engine.generation != self._generation:
            self._busy, self._generation = Busy(), engine.generation
        if engine.step != self._step:
            steps, took_s = max(1, engine.step - self._step), now - self._step_began_at
            if self._step >= 0:
                self._pause_s = min(_LONGEST_S, max(_SHORTEST_S, took_s / steps / _LOOKS_PER_STEP))
            self._step, self._step_began_at = engine.step, now
        if engine.phase in _PHASES:
            waits = is_waiting(self._thread_id())
            self._busy.add(engine.step, engine.phase, 0.0 if waits else seconds)
