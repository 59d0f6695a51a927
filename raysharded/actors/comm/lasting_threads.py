"""Threads for transfers in the background, which last: a later transfer runs in the thread of an earlier one.

torch's gloo keeps 145 bytes for each thread that has called it, for as long as the process lives (torch 2.13): a new
thread for each step's transfer took 150 MB in a million steps. A thread that gloo keeps blocked is no reason to wait:
the next transfer runs in another one, and the blocked one is used again once it is free.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from queue import SimpleQueue

_idle: list[_LastingThread] = []
"""Threads without a transfer. Their number is that of the most that ever ran at once."""
os.register_at_fork(after_in_child=_idle.clear)  # a child has none of its parent's threads


class Transfer:
    """A function in a lasting thread."""

    def __init__(self, do: Callable[[], None], name: str) -> None:
        self.name = name
        self._do: Callable[[], None] | None = do
        self.ended = threading.Event()
        """Set when the function has ended. Wait for it only in a function with the mark of `device_waits`."""

    def run_in(self, thread: _LastingThread) -> None:
        """Call the function. Only in this thread, which takes another transfer as soon as this one has ended."""
        try:
            do, self._do = self._do, None
            if do is not None:
                do()
            del do  # it may hold a whole snapshot
            _idle.append(thread)  # first: the caller that waits for the end may begin the next transfer
        finally:
            self.ended.set()


class _LastingThread(threading.Thread):
    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.inbox: SimpleQueue[Transfer] = SimpleQueue()
        self.start()

    def run(self) -> None:
        while True:
            transfer = self.inbox.get()
            self.name = transfer.name
            transfer.run_in(self)
            del transfer


def begin(do: Callable[[], None], name: str) -> Transfer:
    """Run `do` in a thread named `name`; returns at once. Any thread. An error of `do` ends the thread, as usual."""
    transfer = Transfer(do, name)
    try:
        thread = _idle.pop()
    except IndexError:
        thread = _LastingThread()
    thread.inbox.put(transfer)
    return transfer
