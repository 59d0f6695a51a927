"""Bytes of one worker, by kind and moment."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "Setting": "raysharded.planning.memory.footprint",
    "WorkerMemory": "raysharded.planning.memory.footprint",
    "worker_memory": "raysharded.planning.memory.footprint",
}

if TYPE_CHECKING:
    from raysharded.planning.memory.footprint import (
        Setting as Setting,
        WorkerMemory as WorkerMemory,
        worker_memory as worker_memory,
    )

__all__ = ["Setting", "WorkerMemory", "worker_memory"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
