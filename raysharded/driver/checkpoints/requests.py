"""Requests for a checkpoint now, each with a promise of the answer; and throttled calls to workers about their saves.

A worker has few threads to answer with, so only a few such calls run at once. Thread-safe.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future

from raysharded.driver.state.commands import Answer
from raysharded.driver.state.events import NOBODY
from raysharded.errors import CheckpointError, RunFailed
from raysharded.ids import GenerationId, WorkerId

Promise = Future[tuple[int, str]]
"""(step, folder) of the checkpoint once it is committed, or the error."""


class Requests:
    """Requests that wait for an answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Promise] = {}
        self._newest = NOBODY
        self._over = ""

    def add(self) -> tuple[int, Promise]:
        """Number and promise of a new request. Raises RunFailed if the run is over."""
        with self._lock:
            if self._over:
                raise RunFailed(self._over)
            self._newest += 1
            promise = self._waiting[self._newest] = Promise()
            return self._newest, promise

    def answer(self, answer: Answer) -> None:
        """Fulfil the promises of these requests."""
        with self._lock:
            promises = [self._waiting.pop(request) for request in answer.requests if request in self._waiting]
        for promise in promises:
            if answer.error:
                promise.set_exception(
                    CheckpointError(f"the checkpoint of step {answer.step} could not be written: {answer.error}")
                )
            else:
                promise.set_result((answer.step, answer.prefix))

    def end(self, reason: str) -> None:
        """Fail all waiting requests: the run is over."""
        with self._lock:
            self._over = reason
            promises, self._waiting = list(self._waiting.values()), {}
        for promise in promises:
            promise.set_exception(RunFailed(reason))


CALLS_AT_ONCE = 2
"""Calls to one worker that may wait for a save at once. An interrupt must always find a free thread."""


class SaveCallThrottle:
    """Limits the calls that wait for a save: surplus calls to a worker wait here, oldest first."""

    def __init__(self, call: Callable[[WorkerId, GenerationId, int], None]) -> None:
        self._call = call
        self._out: defaultdict[WorkerId, int] = defaultdict(int)
        self._waiting: defaultdict[WorkerId, deque[tuple[GenerationId, int]]] = defaultdict(deque)

    def ask(self, worker: WorkerId, generation: GenerationId, step: int) -> None:
        """Query a worker about its part of a save, now or after it has answered earlier calls."""
        self._waiting[worker].append((generation, step))
        self._send(worker)

    def answered(self, worker: WorkerId) -> None:
        """Record that the worker answered one of these calls."""
        if worker in self._out:
            self._out[worker] -= 1
            self._send(worker)

    def forget(self, worker: WorkerId) -> None:
        """Discard the calls of a lost worker."""
        self._out.pop(worker, None)
        self._waiting.pop(worker, None)

    def _send(self, worker: WorkerId) -> None:
        waiting = self._waiting[worker]
        while waiting and self._out[worker] < CALLS_AT_ONCE:
            self._out[worker] += 1
            self._call(worker, *waiting.popleft())
