"""Bounded reading ahead in background threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def num_ahead(num_threads: int) -> int:
    """Number of values that so many threads read ahead of their use."""
    return num_threads + 1


@dataclass(frozen=True, slots=True)
class Outcome(Generic[Value]):
    """Result of a read: a value, or an error to raise where the value is taken."""

    value: Value | None = None
    error: BaseException | None = None


class Prefetcher(Generic[Key, Value]):
    """Read planned keys in order, at most `depth` ahead of those that were taken. Thread-safe.

    The threads start with the first plan and end with `close`. `read` runs in them, one key at a time in each.
    """

    def __init__(self, read: Callable[[Key], Value], *, depth: int = 2, num_threads: int = 1) -> None:
        self._read = read
        self._depth, self._num_threads = depth, num_threads
        self._queue: deque[Key] = deque()
        self._ready: dict[Key, Outcome[Value]] = {}
        self._in_flight: set[Key] = set()
        self._planned: frozenset[Key] = frozenset()
        self._closed = False
        self._lock = threading.Lock()
        self._work = threading.Condition(self._lock)
        """Notified when there may be a key to read."""
        self._done = threading.Condition(self._lock)
        """Notified when an outcome is there."""
        self._threads: list[threading.Thread] = []

    def plan(self, keys: Iterable[Key]) -> None:
        """Read these keys next, in this order, instead of earlier planned keys that are not among them.

        A key whose read has failed is read again. Raises RuntimeError if a thread cannot be started.
        """
        ordered = list(dict.fromkeys(keys))
        with self._lock:
            self._planned = frozenset(ordered)
            known = self._ready.items()
            self._ready = {key: found for key, found in known if key in self._planned and found.error is None}
            self._queue = deque(key for key in ordered if key not in self._ready and key not in self._in_flight)
            if not self._threads and self._queue and not self._closed:
                for _ in range(self._num_threads):
                    thread = threading.Thread(target=self._run, name="raysharded-prefetch", daemon=True)
                    thread.start()
                    self._threads.append(thread)
            self._begin()

    def take(self, key: Key) -> Outcome[Value] | None:
        """The outcome of reading `key`, after waiting for a read in progress; None if it is not being read.

        The caller then reads it.
        """
        with self._lock:
            while key not in self._ready and key in self._in_flight and not self._closed:
                self._done.wait()
            outcome = self._ready.pop(key, None)
            if outcome is None and key in self._queue:
                self._queue.remove(key)
            self._begin()
            return outcome

    def close(self, timeout_s: float = 5.0) -> None:
        """End the threads. Waits for the reads in progress, but no longer than `timeout_s`."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            self._ready.clear()
            self._work.notify_all()
            self._done.notify_all()
            threads = list(self._threads)
        until = time.monotonic() + timeout_s
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (key := self._next()) is not None:
            outcome = self._attempt(key)
            with self._lock:
                self._in_flight.discard(key)
                if key in self._planned and not self._closed:
                    self._ready[key] = outcome
                self._done.notify_all()

    def _next(self) -> Key | None:
        with self._lock:
            while not self._closed and not self._may_begin():
                self._work.wait()
            if self._closed:
                return None
            key = self._queue.popleft()
            self._in_flight.add(key)
            return key

    def _may_begin(self) -> bool:
        return bool(self._queue) and len(self._ready) + len(self._in_flight) < self._depth

    def _begin(self) -> None:
        """Wake the threads if there is a key for them. With the lock."""
        if self._may_begin():
            self._work.notify_all()

    def _attempt(self, key: Key) -> Outcome[Value]:
        try:
            return Outcome(value=self._read(key))
        except BaseException as error:  # noqa: BLE001 - also SystemExit: the taker of the key must not wait forever
            return Outcome(error=error)
