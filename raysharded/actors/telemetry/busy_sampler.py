"""Time in which a worker computes in each phase, without the time in which it waits for others.

In a synchronous step all workers take equally long; the slow one is the one that does not wait. A thread samples the
training thread some twenty times a step: if its innermost call is in a collective, it waits. Each sample takes the
interpreter from the training thread, so more of them would slow it down noticeably.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from raysharded.actors.telemetry.stack_probe import is_waiting, look_at
from raysharded.ids import GenerationId
from raysharded.protocol.messages import ProbeReply

_LOOKS_PER_STEP = 20
_SHORTEST_S, _LONGEST_S = 0.02, 0.5
"""Shortest and longest pause between two samples."""
_PHASES = frozenset({"data", "forward", "backward", "reduce", "norm", "agree", "apply", "snapshot"})
"""Phases of a step; a checkpoint or an evaluation does not show a worker's speed."""
_MEMORY = 0.8
"""Weight of the previous average at every step."""


@dataclass(slots=True)
class Busy:
    """Seconds per step without waits, by phase: an average of the newest steps. Any thread."""

    _step: int = -1
    _now: dict[str, float] = field(default_factory=dict)
    _average: dict[str, float] = field(default_factory=dict)
    _num_steps: int = 0

    def add(self, step: int, phase: str, seconds: float) -> None:
        """Add time in a phase of the step after `step`."""
        if step != self._step:
            self._close()
            self._step = step
        self._now[phase] = self._now.get(phase, 0.0) + seconds

    @property
    def num_steps(self) -> int:
        """Number of steps in the average."""
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
    """The sampled part of an `Engine`."""

    @property
    def generation(self) -> GenerationId: ...

    @property
    def step(self) -> int: ...

    @property
    def phase(self) -> str: ...

    @property
    def phase_since(self) -> float: ...


class Sampler:
    """Sampler of a worker's training thread, as long as the process lives."""

    def __init__(self, thread_id: Callable[[], int | None], engine: Callable[[], Sampled | None]) -> None:
        """`engine`: returns the current generation's engine, or None between two."""
        self._thread_id, self._engine = thread_id, engine
        self._busy = Busy()
        self._generation: GenerationId | None = None
        self._step, self._step_began_at = -1, 0.0
        self._pause_s = _SHORTEST_S

    def start(self) -> None:
        threading.Thread(target=self._watch, daemon=True, name="sampler").start()

    def look(self, generation: GenerationId, stacks: Callable[[], str]) -> ProbeReply:
        """The step, phase and stack of the thread now, and its busy times. `stacks`: as `look_at` takes it."""
        engine, found, busy = self._engine(), look_at(self._thread_id(), stacks), self._busy
        return ProbeReply(
            generation=generation,
            step=engine.step if engine else 0,
            phase=engine.phase if engine else "form",
            phase_s=time.monotonic() - engine.phase_since if engine else 0.0,
            waits=found.waits,
            stack=found.stack,
            where=found.where,
            in_collective=found.in_collective,
            busy=busy.average(),
            num_steps=busy.num_steps,
        )

    def _watch(self) -> None:
        before = time.monotonic()
        while True:
            time.sleep(self._pause_s)
            now = time.monotonic()
            self._sample(now - before, now)  # longer than the pause if the whole process is slow
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
