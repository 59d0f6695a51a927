"""Old names that keep working until a stated version."""

from __future__ import annotations

import warnings

REMOVED_IN = "0.4"
MOVED_MODULES = {
    "raysharded.checkpoint.exchange": "raysharded.checkpoint.interop",
    "raysharded.checkpoint.exchange.dcp_export": "raysharded.checkpoint.interop",
    "raysharded.checkpoint.exchange.dcp_import": "raysharded.checkpoint.interop",
    "raysharded.checkpoint.exchange.diff": "raysharded.checkpoint.interop.diff",
    "raysharded.checkpoint.exchange.hf_export": "raysharded.checkpoint.interop",
    "raysharded.checkpoint.exchange.hf_import": "raysharded.checkpoint.interop",
    "raysharded.checkpoint.exchange.names": "raysharded.checkpoint.interop",
    "raysharded.checkpoint.exchange.places": "raysharded.checkpoint.interop",
    "raysharded.checkpoint.exchange.torch_dcp": "raysharded.checkpoint.interop",
    "raysharded.driver.events": "raysharded.driver.state.events",
    "raysharded.run.host": "raysharded.run.hosted.driver_actor",
    "raysharded.run.hosting": "raysharded.run.hosted.launch",
}
"""Old name -> new name. The old modules keep their public names, and warn on import."""


def warn_of_old_name(old: str, new: str) -> None:
    """Issue a DeprecationWarning at the line that called this function's caller."""
    _warn(old, new)


def warn_of_old_module(old: str) -> None:
    """Issue a DeprecationWarning at the line that imports the module that calls this function."""
    _warn(old, MOVED_MODULES[old])


def _warn(old: str, new: str) -> None:
    text = f"{old} is deprecated and will be removed in {REMOVED_IN}; use {new}."
    warnings.warn(text, DeprecationWarning, stacklevel=4)
