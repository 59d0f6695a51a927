"""A metrics writer in a separate thread: its errors and its speed do not affect the run."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from raysharded.clock import Clock
from raysharded.metrics.translation import Translator
from raysharded.metrics_writer import MetricsWriter

_log = logging.getLogger("raysharded.metrics")
LIMIT = 4096
"""Maximum number of queued entries for a slow writer."""
CLOSE_S = 5.0
"""Seconds that the end of a run waits for all of its writers."""


class Feed:
    """A queue of entries to one writer, in the order of `put`."""

    def __init__(self, writer: MetricsWriter, translator: Translator, clock: Clock, *, limit: int = LIMIT) -> None:
        self._writer, self._translator, self._clock, self._limit = writer, translator, clock, limit
        self._waiting: deque[tuple[str, Mapping[str, Any], float]] = deque()
        self._changed = threading.Condition()
        self._closing = self._broken = False
        self._begun = False
        self.missed = 0
        """Dropped entries: the writer was slower than the run."""
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"metrics {self._name}")
        self._thread.start()

    @property
    def _name(self) -> str:
        return type(self._writer).__name__

    def put(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Enqueue an entry. Returns at once; the fields must not change any more. Any thread."""
        at = self._clock.wall()
        with self._changed:
            if self._broken or self._closing:
                return
            if len(self._waiting) < self._limit:
                self._waiting.append((kind, fields, at))
                self._changed.notify()
                return
            self.missed += 1
            first = self.missed == 1
        if first:
            _log.warning(
                "metrics: %s is slower than the run: %d entries are queued, and further ones are dropped",
                self._name,
                self._limit,
            )

    def end(self) -> None:
        """No more entries follow. Returns at once."""
        with self._changed:
            self._closing = True
            self._changed.notify()

    def wait(self, timeout_s: float) -> None:
        """Return when the writer is closed, or after the timeout; logs the number of missed entries. Call after
        `end`."""
        self._thread.join(max(0.0, timeout_s))
        with self._changed:
            left, self.missed = len(self._waiting), self.missed + len(self._waiting)
            self._waiting.clear()
        if self._thread.is_alive():
            _log.warning("metrics: %s did not finish its entries in time and is abandoned", self._name)
        if self.missed and not self._broken:
            _log.warning(
                "metrics: %s was too slow for %d entries; %d of them were left at the end",
                self._name,
                self.missed,
                left,
            )

    # -- in the thread --

    def _run(self) -> None:
        try:
            while (entry := self._next()) is not None:
                self._tell(*entry)
            if self._begun:
                self._writer.close()
        except (Exception, SystemExit):  # noqa: BLE001 - the boundary of the thread: metrics never hurt a run
            with self._changed:
                self._broken = True
                self._waiting.clear()
            _log.exception("metrics: %s failed and is disabled; the run continues", self._name)

    def _next(self) -> tuple[str, Mapping[str, Any], float] | None:
        with self._changed:
            while not self._waiting:
                if self._closing:
                    return None
                self._changed.wait()
            return self._waiting.popleft()

    def _tell(self, kind: str, fields: Mapping[str, Any], at: float) -> None:
        if kind == "started":
            self._begun = True
            self._writer.begin(self._translator.beginning(fields))
        if not self._begun:  # before the driver has begun: a damaged checkpoint, for example
            return
        if kind == "step":
            self._writer.step(self._translator.of_step(fields, at))
        event = self._translator.event(kind, fields, at)
        if event is not None:
            self._writer.event(event)


def close(feeds: Sequence[Feed], timeout_s: float = CLOSE_S) -> None:
    """End all feeds, and wait up to `timeout_s` for all of them together."""
    for feed in feeds:
        feed.end()
    deadline = time.monotonic() + timeout_s
    for feed in feeds:
        feed.wait(deadline - time.monotonic())
