"""Names that share memory in what is loaded into: one tensor under two names (tied weights), and views that overlap.

A checkpoint has a tensor for each name. Of the names of one tensor, the first is read into place and the others into
host memory of their own, to be compared with it. All of this is about one rank's memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from raysharded.checkpoint.state.parts import Held
from raysharded.checkpoint.state.staging import STAGE_BYTES, Piece, carve, cut, host_buffer, snapshot_bytes
from raysharded.errors import CheckpointError

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_apart(wanted: Mapping[str, Held]) -> None:
    """Raises CheckpointError for tensors that share memory with one another, or within themselves."""
    for name, held in wanted.items():
        if any(stride == 0 and size > 1 for size, stride in zip(held.local.shape, held.local.stride(), strict=True)):
            raise CheckpointError(
                f"{name} cannot be loaded into: several of its elements are one in memory, as expand() makes them. "
                "Load into a clone() of it."
            )
    for first, second in _near(wanted):
        if np.shares_memory(_place_of(wanted[first].local), _place_of(wanted[second].local)):
            raise CheckpointError(
                f"{first} and {second} overlap in memory here, and are not one tensor. Load into tensors of their own, "
                "or choose one of the two with names=[...]."
            )


def untied(found: Mapping[str, Held], ties: Mapping[str, str]) -> dict[str, Held]:
    """As found, but host memory of its own for each name that is tied to another."""
    tied = [found[name] for name in ties]
    buffer = host_buffer(snapshot_bytes(tied), pinned=False)
    views = carve(buffer, [(one.dtype, tuple(one.local.shape) if one.parts else (0,)) for one in tied])
    own = {name: replace(one, local=view) for name, one, view in zip(ties, tied, views, strict=True)}
    return {**found, **own}


def require_equal(filled: Mapping[str, Held], ties: Mapping[str, str]) -> None:
    """Raises CheckpointError for two names of one tensor of which the checkpoint had different values, to the bit."""
    for name, other in ties.items():
        for part in filled[name].parts:
            for piece in cut(Piece(filled[name], part), STAGE_BYTES):
                if not _same_bits(piece.tensor, Piece(filled[other], piece.part).tensor):
                    raise CheckpointError(
                        f"{other} and {name} are one tensor here and differ in the checkpoint. Load into what has two "
                        "of them, or choose one of the two with names=[...]."
                    )


def _near(wanted: Mapping[str, Held]) -> Iterator[tuple[str, str]]:
    """Names of tensors of which one begins before the other ends."""
    devices: dict[torch.device, list[tuple[int, int, str]]] = defaultdict(list)
    for name, held in wanted.items():
        if held.local.numel():
            devices[held.local.device].append((*_extent(held.local), name))
    for extents in devices.values():
        reaching: list[tuple[int, str]] = []
        for begin, stop, name in sorted(extents):
            reaching = [(end, other) for end, other in reaching if end > begin]
            yield from ((other, name) for _, other in reaching)
            reaching.append((stop, name))


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first byte and after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _place_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """An array at the tensor's addresses, which must not be read: they may be an accelerator's."""
    described = {
        "version": 3,
        "typestr": f"|V{tensor.itemsize}",
        "data": (tensor.data_ptr(), True),
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
    }
    return np.asarray(SimpleNamespace(__array_interface__=described))


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """As whole numbers of the same width."""
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(_WHOLE[tensor.itemsize])
