"""Detection of a lost peer without the driver: a thread that sees a connection of a generation end.

A worker on an accelerator waits on its device, and neither NVLink nor shared memory reports a peer's death. Its host
connections do, within milliseconds: the kernel closes those of a process that dies. A peer that aborts the generation
shuts its connections down, so one death ends the connections of all members, also while the driver is away. A peer
whose machine stops answers nothing: only the driver's deadlines find it.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import Callable, Sequence

_ENDED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)
"""Linux reports the end of the peer's half as POLLRDHUP, without a read."""


class HangupWatch:
    """A thread that calls `on_hangup` once, when a connection ends. `close` ends it; any thread, any number of times.

    It reads nothing: the connections stay those of their group.
    """

    def __init__(self, connections: Sequence[socket.socket], on_hangup: Callable[[], None], name: str) -> None:
        self._on_hangup = on_hangup
        self._wake, self._woken = os.pipe()
        self._closing = threading.Lock()
        self._is_closed = False
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._held = [os.dup(each.fileno()) for each in connections]
        """Duplicates: a descriptor that another thread closes would be reused while it is polled. Not `socket.dup`,
        which lets reads of the connection block, also for the group."""
        for fd in self._held:
            self._poll.register(fd, _ENDED)
        self._thread = threading.Thread(target=self._watch, daemon=True, name=f"watch {name}")
        self._thread.start()

    def _watch(self) -> None:
        try:
            found = {fd for fd, _ in self._poll.poll()}
        finally:
            for fd in self._held:
                os.close(fd)
        if self._wake not in found:
            self._on_hangup()

    def close(self) -> None:
        """End the thread without a call; waits for it, unless it is the caller."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
        os.write(self._woken, b"x")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        os.close(self._wake)
        os.close(self._woken)
