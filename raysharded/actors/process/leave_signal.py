"""Leave notices of a worker: it reports them to the driver and trains until it is no longer needed.

Then the driver ends the worker. After SIGTERM the worker ends itself when its grace period is over.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from raysharded.ids import WorkerId
from raysharded.protocol.messages import WorkerNotice

_log = logging.getLogger("raysharded.worker")


@dataclass(frozen=True, slots=True)
class _Told:
    reason: str
    by: float
    whole_node: bool


class LeaveInbox:
    """Leave notices that this worker received. Any thread."""

    def __init__(self, worker: WorkerId, grace_s: float, leave: Callable[[], None] = lambda: os._exit(0)) -> None:
        """`leave` does not return in a real worker."""
        self._worker, self._grace_s, self._leave = worker, grace_s, leave
        self._told: list[_Told] = []
        self._changed = threading.Condition()
        self._is_heard = False
        """True once a driver has requested notices; before, nobody needs this worker."""
        self._signals: SimpleQueue[float] = SimpleQueue()  # a signal handler may put into it

    def listen(self) -> None:
        """Treat SIGTERM as a leave notice. Has no effect outside the main thread, where signals cannot be handled."""
        if self._grace_s > 0 and threading.current_thread() is threading.main_thread():
            threading.Thread(target=self._wait, daemon=True, name="leaving").start()
            signal.signal(signal.SIGTERM, lambda *_: self._signals.put(time.monotonic()))

    def tell_node(self, reason: str, within_s: float) -> None:
        """Record that this worker's machine will be taken away after `within_s` seconds."""
        self._tell(_Told(reason, time.monotonic() + within_s, whole_node=True))

    def next(self, after: int, timeout_s: float) -> WorkerNotice | None:
        """The notice that follows the first `after`, or None; waits for it up to `timeout_s`.

        Notices are returned one by one: a later one may leave more time, or not concern the whole machine.
        """
        with self._changed:
            self._is_heard = True
            self._changed.wait_for(lambda: len(self._told) > after, timeout_s)
            if len(self._told) <= after:
                return None
            told, number = self._told[after], after + 1
        left_s = max(0.0, told.by - time.monotonic())
        return WorkerNotice(number=number, reason=told.reason, left_s=left_s, whole_node=told.whole_node)

    def _tell(self, told: _Told) -> None:
        _log.warning("worker %s must leave within %.0f s: %s", self._worker, told.by - time.monotonic(), told.reason)
        with self._changed:
            self._told.append(told)
            self._changed.notify_all()

    def _wait(self) -> None:
        by = self._signals.get() + self._grace_s
        with self._changed:
            heard = self._is_heard
        if heard:
            self._tell(_Told("SIGTERM", by, whole_node=False))
            time.sleep(max(0.0, by - time.monotonic()))
        _log.warning("worker %s leaves", self._worker)
        self._leave()
