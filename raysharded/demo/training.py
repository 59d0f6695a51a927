"""The record of one of the demo's two runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Training:
    """What one of the two runs showed."""

    fingerprint: str = ""
    entries: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    kills: list[tuple[float, tuple[int, ...]]] = field(default_factory=list)
    """(monotonic seconds, workers killed)"""
    url: str = ""
