"""Time as an argument: pure code takes a `Clock`, tests pass a fake one."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary fixed point; never decreases."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for display; may jump."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
