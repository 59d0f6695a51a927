"""Changes of a module for the rest of a process, for example a worker's, which ends with it."""

from __future__ import annotations

from types import ModuleType


def replace(module: ModuleType, name: str, value: object) -> None:
    """Put a value in the place of one that the module has. Raises AssertionError if it has none of this name."""
    assert name in vars(module), f"{module.__name__} has no {name}: nothing would look there"
    vars(module)[name] = value
