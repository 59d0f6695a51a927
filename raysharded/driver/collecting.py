"""What the driver asks of workers about their saves: a few calls at a time, for a worker has few to answer with."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable

from raysharded.ids import GenerationId, WorkerId

AT_ONCE = 2
"""Calls to one worker that may wait for a save; an interrupt must always find room beside them."""


class Collecting:
    """Calls that wait for a save: those of one worker that are too many wait here, oldest first."""

    def __init__(self, call: Callable[[WorkerId, GenerationId, int], None]) -> None:
        self._call = call
        self._out: defaultdict[WorkerId, int] = defaultdict(int)
        self._waiting: defaultdict[WorkerId, deque[tuple[GenerationId, int]]] = defaultdict(deque)

    def ask(self, worker: WorkerId, generation: GenerationId, step: int) -> None:
        """Ask a worker what became of its part of a save, now or when it has answered others."""
        self._waiting[worker].append((generation, step))
        self._send(worker)

    def answered(self, worker: WorkerId) -> None:
        """The worker answered one of these calls."""
        if worker in self._out:
            self._out[worker] -= 1
            self._send(worker)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._out.pop(worker, None)
        self._waiting.pop(worker, None)

    def _send(self, worker: WorkerId) -> None:
        waiting = self._waiting[worker]
        while waiting and self._out[worker] < AT_ONCE:
            self._out[worker] += 1
            self._call(worker, *waiting.popleft())
