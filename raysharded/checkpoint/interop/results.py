"""Results of exports and imports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Result of an export."""

    files: tuple[str, ...]
    """Written files relative to the folder, in the order of writing."""
    num_tensors: int
    size_bytes: int
    """Size of the tensors' data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Imported:
    """Result of an import: the checkpoint that was written."""

    digest: str
    """Digest of the manifest."""
    step: int
    num_tensors: int
    size_bytes: int
    """Size of the tensors' data."""
