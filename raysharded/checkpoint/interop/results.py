"""What exports and imports tell of what they did."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """What an export wrote."""

    files: tuple[str, ...]
    """Relative to the folder, in the order in which they were written."""
    num_tensors: int
    size_bytes: int
    """Of the tensors' data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """A checkpoint that was written."""

    digest: str
    """Of its manifest."""
    step: int
    num_tensors: int
    size_bytes: int
    """Of the tensors' data."""
