"""Thread pools that run work in the calling thread once Python starts no more threads.

Soon after a program's last line, thread pools accept no more work. A save that has begun continues after that, for
example in a thread of torch's `async_save`, or in a function that `atexit` calls.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Generic, ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class _Once(Generic[T]):
    """Work that runs once, in the first thread that calls it. Other calls return None at once."""

    def __init__(self, work: Callable[[], T]) -> None:
        self._work, self._claim = work, threading.Lock()
        self.outcome: Future[T] = Future()
        """Result or error of the work."""

    def __call__(self) -> T | None:
        if not self._claim.acquire(blocking=False):
            return None
        try:
            value = self._work()
        except BaseException as error:
            self.outcome.set_exception(error)
            raise
        self.outcome.set_result(value)
        return value


class Threads(ThreadPoolExecutor):
    """A pool whose `submit` does the work itself if no thread can be started for it."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit as ThreadPoolExecutor does. Raises RuntimeError if the pool was shut down.

        Work is queued before a thread is started for it. So after a failed start a thread of the pool may still take it
        from the queue: whichever of the two comes first does it, and the other does not.
        """
        once = _Once(partial(fn, *args, **kwargs))
        try:
            return cast("Future[T]", super().submit(once))
        except RuntimeError:
            if self._shutdown:
                raise
        with suppress(BaseException):  # it is in the outcome
            once()
        return once.outcome


NICENESS = 10
"""Niceness added to the process's own.

The thread gets a tenth of what ordinary threads get of a contended core, and all of an uncontended one. The tenth holds
up to a process niceness of 9, because Linux's maximum is 19.
"""


def step_back() -> None:
    """Lower the priority of the calling thread, and of those that it starts from now on. Linux only, else no effect."""
    with suppress(AttributeError, OSError):
        of_process = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), of_process + NICENESS)
