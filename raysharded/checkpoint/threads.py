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
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Threads(ThreadPoolExecutor):
    """A pool whose `submit` does the work itself if no thread can be started for it."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit as ThreadPoolExecutor does. Raises RuntimeError if the pool was shut down."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            if self._shutdown:
                raise
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as in the pool's own threads
            done.set_exception(error)
        return done


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
