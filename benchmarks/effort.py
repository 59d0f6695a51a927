"""The amount of measuring: minutes for a check, an hour for an overview, or all rounds that the page of figures
needs."""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")


class Effort(StrEnum):
    QUICK = "quick"
    """Minutes, with small sizes and few peers: a check that it works."""
    HOUR = "hour"
    """Everything and everyone, in less than an hour on 2 cores: one to three rounds."""
    FULL = "full"
    """Five rounds and more, in four to five hours: docs/benchmarks.md."""

    def pick(self, *, quick: T, hour: T, full: T) -> T:
        """The one for this effort."""
        return {Effort.QUICK: quick, Effort.HOUR: hour, Effort.FULL: full}[self]
