"""Time as an argument: pure code takes a `Clock`, tests pass their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where the time comes from."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary fixed point; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for people to read; may jump."""
        ...


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
