"""Threads beside their caller, who does the work itself once Python starts no more of them.

Soon after a program's last line no thread pool takes work any more. A save that was begun goes on after that, in a
thread of torch's `async_save` for one, or in a function that `atexit` calls.
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
    """A pool whose `submit` returns when the work is done, where there is no thread to do it."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As ThreadPoolExecutor's. Raises RuntimeError if the pool was shut down."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            if self._shutdown:
                raise
        done: Future[T] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - as the pool's own threads have it
            done.set_exception(error)
        return done


NICENESS = 10
"""On top of the process's own: a tenth of what its ordinary threads get where both want the same core (up to a
niceness of 9: Linux goes no further than 19), all of it where nobody else does."""


def step_back() -> None:
    """Let other threads go before the calling one, and before those that it starts from now on. Linux; else nothing."""
    with suppress(AttributeError, OSError):
        of_process = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), of_process + NICENESS)
