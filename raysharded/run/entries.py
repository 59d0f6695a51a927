"""The newest journal entries of a run, for those who follow it: numbered, bounded, waited for. Any thread."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from raysharded.run.results import Entry

LIMIT = 20_000
"""Entries that are kept; the journal has all of them."""
AT_ONCE = 2_000
"""Entries of one answer."""


class Entries:
    """Entries from this driver's first on, as far as they are kept."""

    def __init__(
        self, first: int = 1, *, limit: int = LIMIT, at_once: int = AT_ONCE, wall: Callable[[], float] = time.time
    ) -> None:
        """`first`: the number of the first entry; of a later driver it is above all those of the one before."""
        self._kept: deque[Entry] = deque(maxlen=limit)
        self._next, self._at_once, self._wall = first, at_once, wall
        self._changed = threading.Condition()
        self._closed = False

    def add(self, kind: str, fields: dict[str, Any]) -> None:
        """An entry was made; the fields must not change any more."""
        at = self._wall()
        with self._changed:
            self._kept.append((self._next, kind, {"at": at, **fields}))
            self._next += 1
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing more comes: nobody waits."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def after(self, number: int, timeout_s: float) -> list[Entry]:
        """The entries with a higher number, oldest first, the oldest that are kept if that is long ago; waits up to
        `timeout_s` for the first. Empty: there is none."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next - 1 > number, timeout_s)
            new = min(self._next - 1 - number, len(self._kept))
            newest = list(itertools.islice(reversed(self._kept), max(0, new)))
            return newest[::-1][: self._at_once]
