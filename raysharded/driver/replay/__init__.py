"""Replay of a recorded run: `load` reads one, and its drivers' events go through the machine again."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "load": "raysharded.driver.replay.rerun",
}

if TYPE_CHECKING:
    from raysharded.driver.replay.rerun import load as load

__all__ = ["load"]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)
