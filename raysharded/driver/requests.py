"""Requests for a checkpoint now, each with a promise of the answer. Thread-safe."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from raysharded.driver.events import NOBODY, Answer
from raysharded.errors import CheckpointError, RunFailed

Promise = Future[tuple[int, str]]
"""(step, folder) of the checkpoint, once it is committed; or why it will not be."""


class Requests:
    """Those that are waiting for an answer."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[int, Promise] = {}
        self._newest = NOBODY
        self._over = ""

    def add(self) -> tuple[int, Promise]:
        """A new request, by its number. Raises RunFailed if the run is over."""
        with self._lock:
            if self._over:
                raise RunFailed(self._over)
            self._newest += 1
            promise = self._waiting[self._newest] = Promise()
            return self._newest, promise

    def answer(self, answer: Answer) -> None:
        """Keep the promises of these requests."""
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
        """The run is over: nobody gets an answer any more."""
        with self._lock:
            self._over = reason
            promises, self._waiting = list(self._waiting.values()), {}
        for promise in promises:
            promise.set_exception(RunFailed(reason))
