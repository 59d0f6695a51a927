"""How much is measured: minutes to see that it works, an hour for a look, or all that the page of the figures needs."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class Effort(StrEnum):
    QUICK = "quick"
    """Minutes, with small sizes and few peers: whether it works."""
    HOUR = "hour"
    """Everything and everyone, in less than an hour on 2 cores: one to three rounds."""
    FULL = "full"
    """Five rounds and more, in four to five hours: docs/benchmarks.md."""

    def pick(self, *, quick: T, hour: T, full: T) -> T:
        """The one for this effort."""
        return {Effort.QUICK: quick, Effort.HOUR: hour, Effort.FULL: full}[self]
