"""Conversions between torch and bytes: dtype names, a tensor's memory, and values as `torch.save` writes them."""

from __future__ import annotations

import io
from typing import Any

import torch

from raysharded.checkpoint.byte_ranges import Bytes
from raysharded.checkpoint.interop.dcp.flatten import Entry, ValueEntry
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.state_dict.staging import torch_dtype


def name_of(dtype: torch.dtype) -> str:
    """Name of a dtype: torch.float32 -> `float32`."""
    return str(dtype).removeprefix("torch.")


def tensor_of(data: Bytes, dtype: str, sizes: tuple[int, ...]) -> torch.Tensor:
    """Bytes as a tensor, not copied."""
    return torch.from_numpy(data).view(torch_dtype(dtype)).view(sizes)


def saved(value: Any) -> bytes:
    """The bytes that `torch.save` writes for a value."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def value_of(checkpoint: Checkpoint, entry: Entry) -> Any:
    """A value of the state. For an entry that is kept as a tensor without dimensions, the number."""
    if isinstance(entry, ValueEntry):
        return entry.value
    info = checkpoint.manifest.tensors[entry.name]
    data = checkpoint.read(entry.name, (0,) * len(info.shape), info.shape)
    return tensor_of(data, info.dtype, info.shape).item()
