"""Typical writers of metrics, good and bad."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from raysharded.metrics import Beginning, RunEvent, StepMetrics

WAIT_S = 20.0


@dataclass
class Kept:
    """Keeps all that it receives."""

    beginnings: list[Beginning] = field(default_factory=list)
    steps: list[StepMetrics] = field(default_factory=list)
    events: list[RunEvent] = field(default_factory=list)
    closed: int = 0
    threads: set[int] = field(default_factory=set)

    def begin(self, beginning: Beginning) -> None:
        self._called()
        self.beginnings.append(beginning)

    def step(self, step: StepMetrics) -> None:
        self._called()
        self.steps.append(step)

    def event(self, event: RunEvent) -> None:
        self._called()
        self.events.append(event)

    def close(self) -> None:
        self._called()
        self.closed += 1

    def _called(self) -> None:
        self.threads.add(threading.get_ident())


@dataclass
class Failing(Kept):
    """Raises in a step."""

    in_step: int = 2
    error: BaseException = field(default_factory=lambda: OSError("the disk of metrics is full"))

    def step(self, step: StepMetrics) -> None:
        super().step(step)
        if step.step == self.in_step:
            raise self.error


@dataclass
class Stuck(Kept):
    """Does not return from its first step until the test releases it."""

    entered: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    def step(self, step: StepMetrics) -> None:
        self.entered.set()
        assert self.go_on.wait(WAIT_S)
        super().step(step)
