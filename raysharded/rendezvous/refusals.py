"""One line about connections that were closed, at most every few seconds, however many there are."""

from __future__ import annotations

import logging
import time

EVERY_S = 10.0
"""Shortest time between two lines."""


class Refusals:
    """Counts closed connections and names them in the log. One thread at a time."""

    def __init__(self, log: logging.Logger, where: str) -> None:
        """`where`: whose connections they were, for the line."""
        self.count = 0
        self._log, self._where, self._told, self._told_at = log, where, 0, -EVERY_S
        self._newest = ""

    def add(self, peer: str, why: str) -> None:
        """Count a closed connection of `peer`, and log it, unless a line was written a moment ago."""
        self.count += 1
        self._newest = f"{peer}: {why}"
        if time.monotonic() - self._told_at >= EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Write the line, if connections were closed since the last one."""
        if self.count > self._told:
            number, self._told, self._told_at = self.count - self._told, self.count, time.monotonic()
            word = "connection" if number == 1 else "connections"
            self._log.warning(
                "%s: closed %d %s that it does not admit, the last from %s", self._where, number, word, self._newest
            )
