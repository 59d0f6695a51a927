"""Names that share memory in the load target: one tensor under two names (tied weights), and views that overlap.

A checkpoint has a tensor for each name. Of the names of one tensor, the first is read into place. The others are read
into separate host memory, and compared with it. Tensors that overlap in another way (a transpose, a part) are all read
into separate host memory and copied into place one after the other. Then they are compared with their places. This
concerns only one rank's memory.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from raysharded.checkpoint.state_dict.shard_boxes import Held
from raysharded.checkpoint.state_dict.staging import STAGE_BYTES, Piece, carve, cut, host_buffer, snapshot_bytes
from raysharded.errors import CheckpointError

_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


Pair = tuple[str, str]
"""Names of two tensors that share memory."""


def overlaps(wanted: Mapping[str, Held]) -> list[Pair]:
    """All overlapping pairs. Raises CheckpointError for a tensor of which several elements are one in memory."""
    for name, held in wanted.items():
        if _overlaps_itself(held.local.shape, held.local.stride()):
            raise CheckpointError(
                f"{name} cannot be loaded into: several of its elements are one in memory, as expand() and "
                "as_strided() can make them. Load into a clone() of it."
            )
    return [
        (first, second)
        for first, second in _near(wanted)
        if np.shares_memory(_place_of(wanted[first].local), _place_of(wanted[second].local))
    ]


def apart(found: Mapping[str, Held], names: Iterable[str]) -> dict[str, Held]:
    """The `found` tensors, with separate host memory for the given names."""
    moved = {name: found[name] for name in names}
    buffer = host_buffer(snapshot_bytes(list(moved.values())), pinned=False)
    views = carve(buffer, [(one.dtype, tuple(one.local.shape) if one.parts else (0,)) for one in moved.values()])
    own = {name: replace(one, local=view) for (name, one), view in zip(moved.items(), views, strict=True)}
    return {**found, **own}


def require_equal(filled: Mapping[str, Held], ties: Mapping[str, str]) -> None:
    """Raise CheckpointError for two names of one tensor whose values in the checkpoint differ in any bit."""
    for name, other in ties.items():
        if not _is_equal(filled[name], filled[other]):
            raise CheckpointError(
                f"{other} and {name} are one tensor here and differ in the checkpoint. Load into what has two of them, "
                "or choose one of the two with names=[...]."
            )


def put_in_place(filled: Mapping[str, Held], places: Mapping[str, Held], pairs: Sequence[Pair]) -> None:
    """Copy overlapping tensors into place. Raises CheckpointError if one of them overwrites different values."""
    names = list(dict.fromkeys(name for pair in pairs for name in pair))
    for name in names:
        _copy(filled[name], places[name])
    for name in names:
        if not _is_equal(filled[name], places[name]):
            raise CheckpointError(
                f"{name} and {_over(name, filled, places, pairs)} overlap in memory here, and differ there in the "
                "checkpoint. Load into separate tensors, or choose one of the two with names=[...]."
            )


def _over(name: str, filled: Mapping[str, Held], places: Mapping[str, Held], pairs: Sequence[Pair]) -> str:
    """The first tensor whose values, copied into place, change those of `name`."""
    others = [first if second == name else second for first, second in pairs if name in (first, second)]
    for other in others[:-1]:
        _copy(filled[name], places[name])
        _copy(filled[other], places[other])
        if not _is_equal(filled[name], places[name]):
            return other
    return others[-1]


def _copy(source: Held, to: Held) -> None:
    for part in source.parts:
        Piece(to, part).tensor.copy_(Piece(source, part).tensor)


def _is_equal(a: Held, b: Held) -> bool:
    """True if both are equal to the bit."""
    pieces = (piece for part in a.parts for piece in cut(Piece(a, part), STAGE_BYTES))
    return all(_same_bits(piece.tensor, Piece(b, piece.part).tensor) for piece in pieces)


def _overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """True if several elements have the same place.

    They have not if every stride is beyond what the smaller strides reach together. Only tensors of other strides are
    counted: that takes a byte of host memory for each place.
    """
    steps = sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1)
    if 0 in shape or all(
        stride > sum((size - 1) * smaller for smaller, size in steps[:at]) for at, (stride, _) in enumerate(steps)
    ):
        return False
    num_places = 1 + sum((size - 1) * stride for stride, size in steps)
    if num_places < math.prod(shape):
        return True
    places = np.zeros(num_places, np.bool_)
    np.lib.stride_tricks.as_strided(places, tuple(shape), tuple(strides))[...] = True
    return int(np.count_nonzero(places)) < math.prod(shape)


def _near(wanted: Mapping[str, Held]) -> Iterator[tuple[str, str]]:
    """Pairs of names of tensors whose address ranges overlap."""
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
    """Addresses of the first byte and after the last byte."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def _place_of(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """An array at the tensor's addresses. It must not be read: they may be an accelerator's."""
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
    """The tensor's bits as whole numbers of the same width."""
    plain = tensor.cpu().resolve_conj().resolve_neg().contiguous()
    return plain.view(_WHOLE[tensor.itemsize])
