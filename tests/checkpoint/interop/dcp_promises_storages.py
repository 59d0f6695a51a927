"""torch's own storage of `torch.distributed.checkpoint` and ours, with one interface: all differences by name are
here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from raysharded.checkpoint.interop import RayshardedReader, RayshardedWriter
from tests.checkpoint.interop.ranks import dcp


@dataclass(frozen=True, slots=True)
class Kind:
    """The reader and writer that a test's body runs with."""

    name: str

    @property
    def is_ours(self) -> bool:
        return self.name == "ours"

    def writer(self, folder: Path, *, overwrite: bool = False) -> Any:
        if self.is_ours:
            return RayshardedWriter(folder, overwrite=overwrite)
        return FileSystemWriter(folder, overwrite=overwrite)

    def reader(self, folder: Path) -> Any:
        return RayshardedReader(folder) if self.is_ours else FileSystemReader(folder)

    def save(self, state: dict[str, Any], folder: Path, **options: Any) -> Any:
        return dcp.save(state, storage_writer=self.writer(folder), **options)

    def load(self, state: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
        """The state, filled."""
        dcp.load(state, storage_reader=self.reader(folder), **options)
        return state

    def is_checkpoint(self, folder: Path) -> bool:
        """True if a save has finished there."""
        return (folder / ("manifest.json" if self.is_ours else ".metadata")).exists()


KINDS = (Kind("torch"), Kind("ours"))


def said(act: Any, *args: Any, **options: Any) -> str:
    """The call's error, as text; "" if it returned. torch's CheckpointException is no Exception."""
    try:
        act(*args, **options)
    except BaseException as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def weights(*names: str, seed: int = 0) -> dict[str, Any]:
    """A few tensors of several dtypes and strides for each name, all different."""
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, Any] = {}
    for name in names:
        found[f"{name}.weight"] = torch.randn(6, 5, generator=generator)
        found[f"{name}.turned"] = torch.randn(4, 3, generator=generator).t()
        found[f"{name}.half"] = torch.randn(7, generator=generator).bfloat16()
        found[f"{name}.count"] = torch.randint(0, 1 << 40, (), generator=generator)
    return found


def blank(state: Any) -> Any:
    """The state with zeros for tensors and None for all other values."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return None
