"""Boxes of a tensor that this rank holds, for plain tensors and for DTensors of any placements.

A DTensor's placements cut its dimensions from left to right. `Shard(d)` cuts the dimension into n chunks as
`torch.chunk` does, and keeps one. `_StridedShard(d, split_factor=f)`, which FSDP2 makes over tensor parallelism, first
cuts it into f pieces, and keeps one n-th of each. A rank therefore holds one or more runs of indices along every
dimension, and the boxes that are their product (torch.distributed.tensor.placement_types).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from raysharded.checkpoint.format.limits import MAX_DIMS
from raysharded.checkpoint.format.manifest import SAFETENSORS_DTYPES
from raysharded.errors import CheckpointError

Run = tuple[int, int]
"""Indices first <= i < stop."""


@dataclass(frozen=True, slots=True)
class Part:
    """A box of a tensor, and its place in the memory of the rank that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local_offsets: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The part's cells as a view of the rank's local tensor."""
        return local[tuple(slice(o, o + n) for o, n in zip(self.local_offsets, self.sizes, strict=True))]

    def within(self, offsets: Sequence[int], sizes: Sequence[int]) -> Part:
        """A box of the tensor that is inside the part."""
        moves = zip(self.local_offsets, self.offsets, offsets, strict=True)
        return Part(tuple(offsets), tuple(sizes), tuple(local + to - begin for local, begin, to in moves))

    def slab(self, dim: int, first: int, count: int) -> Part:
        """The cells first <= index < first + count in dimension `dim`, counted within the part."""
        sizes = (*self.sizes[:dim], count, *self.sizes[dim + 1 :])
        return Part(_moved(self.offsets, dim, first), sizes, _moved(self.local_offsets, dim, first))


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """This rank's share of one tensor of the state."""

    name: str
    dtype: str
    """torch's name without `torch.`."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    local: torch.Tensor
    parts: tuple[Part, ...]
    """Disjoint, non-empty parts. There are none if this rank holds nothing of the tensor."""

    @property
    def item_bytes(self) -> int:
        return SAFETENSORS_DTYPES[self.dtype][1]


def held_of(name: str, tensor: torch.Tensor) -> Held:
    """This rank's share of `tensor`, not copied. Raises CheckpointError for tensors that cannot be stored."""
    if tensor.is_nested:
        raise CheckpointError(f"{name}: a nested tensor cannot be stored. Give its parts, as dense ones.")
    if tensor.dim() > MAX_DIMS:
        raise CheckpointError(f"{name}: it has {tensor.dim()} dimensions, and at most {MAX_DIMS} can be stored.")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"{name}: dtype {tensor.dtype} cannot be stored. Convert it to one of: {', '.join(SAFETENSORS_DTYPES)}."
        )
    if isinstance(tensor, DTensor):
        local, parts = _of_dtensor(name, tensor)
    else:
        local, parts = tensor.detach(), _whole(tuple(tensor.shape))
    _check_plain(name, local)
    return Held(name=name, dtype=dtype, shape=tuple(tensor.shape), local=local, parts=parts)


def runs_along(length: int, cuts: Sequence[tuple[Placement, int, int]]) -> tuple[Run, ...]:
    """The indices of one dimension that remain after `cuts`: (placement, number of chunks, number of the kept one).

    Runs have the order of the rank's memory. Adjacent runs are merged.
    """
    runs: list[Run] = [(0, length)] if length else []
    for placement, count, which in cuts:
        here = sum(stop - first for first, stop in runs)
        factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
        kept: list[Run] = []
        for first, stop in _chunks(here, factor):
            low, high = _chunks(stop - first, count)[which]
            kept += _taken(runs, first + low, first + high)
        runs = kept
    return tuple(_joined(runs))


@lru_cache(maxsize=4096)
def parts_of(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], placements: tuple[Placement, ...]
) -> tuple[Part, ...]:
    """The non-empty boxes of a tensor at one coordinate of a mesh."""
    along = [
        runs_along(
            length,
            [
                (placement, mesh_shape[axis], coordinate[axis])
                for axis, placement in enumerate(placements)
                if not isinstance(placement, Replicate) and placement.dim == dim  # type: ignore[attr-defined]  # Shard
            ],
        )
        for dim, length in enumerate(shape)
    ]
    begins = [[0, *accumulate(stop - first for first, stop in runs)] for runs in along]
    return tuple(
        Part(
            tuple(first for _, (first, _) in box),
            tuple(stop - first for _, (first, stop) in box),
            tuple(begins[dim][number] for dim, (number, _) in enumerate(box)),
        )
        for box in product(*(list(enumerate(runs)) for runs in along))
    )


def _of_dtensor(name: str, tensor: DTensor) -> tuple[torch.Tensor, tuple[Part, ...]]:
    mesh, placements = tensor.device_mesh, tuple(tensor.placements)
    for placement in placements:
        if not isinstance(placement, (Shard, _StridedShard, Replicate)):
            raise CheckpointError(
                f"{name}: its placement {placement} holds no final values. Make it Shard or Replicate first, "
                "with `tensor.redistribute(...)`."
            )
    with torch.no_grad():  # outside autograd it is the memory itself
        local: torch.Tensor = tensor.to_local().detach()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return local, ()
    _check_order(name, tensor)
    parts = parts_of(tuple(tensor.shape), tuple(mesh.shape), tuple(coordinate), placements)
    expected = sum(_cells(part.sizes) for part in parts)
    if local.numel() != expected or (parts and local.dim() != tensor.dim()):
        raise CheckpointError(
            f"{name}: its placements {placements} on a mesh of {tuple(mesh.shape)} give this rank {expected} elements, "
            f"but it holds {local.numel()}. Cut it as `distribute_tensor` does, in equal chunks but for the last."
        )
    return local, parts


def _check_order(name: str, tensor: DTensor) -> None:
    """Raise CheckpointError if the dimensions of the mesh cut the tensor in an order other than left to right."""
    if sum(not isinstance(placement, Replicate) for placement in tensor.placements) < 2:
        return
    spec: Any = tensor._spec  # the order has no public name
    order = getattr(spec, "shard_order", None)
    if order is not None and order != type(spec).compute_default_shard_order(spec.placements):
        raise CheckpointError(
            f"{name}: its mesh cuts it in the order {order}, not from left to right. Redistribute it to plain "
            "placements before saving or loading."
        )


def _check_plain(name: str, local: torch.Tensor) -> None:
    if local.layout != torch.strided or local.is_quantized:
        raise CheckpointError(f"{name}: a tensor of layout {local.layout} cannot be stored. Give a dense one.")
    if local.is_meta:
        raise CheckpointError(
            f"{name}: it is on the meta device, which has no memory. Give the module memory first, with "
            "`module.to_empty(device=...)`."
        )
    if type(local) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise CheckpointError(
            f"{name}: a {type(local).__module__}.{type(local).__qualname__} cannot be stored. Give a torch.Tensor or a "
            "DTensor over torch.Tensor."
        )


def _whole(shape: tuple[int, ...]) -> tuple[Part, ...]:
    return () if 0 in shape else (Part((0,) * len(shape), shape, (0,) * len(shape)),)


def _chunks(length: int, count: int) -> list[Run]:
    """Chunks as of torch.chunk: `count` runs of ceil(length / count), the last ones shorter or empty."""
    size = -(-length // count)
    return [(min(i * size, length), min((i + 1) * size, length)) for i in range(count)]


def _taken(runs: Sequence[Run], first: int, stop: int) -> list[Run]:
    """The indices at positions first..stop of `runs`."""
    kept: list[Run] = []
    at = 0
    for low, high in runs:
        begin, end = max(first - at, 0), min(stop - at, high - low)
        if begin < end:
            kept.append((low + begin, low + end))
        at += high - low
    return kept


def _joined(runs: Sequence[Run]) -> list[Run]:
    joined: list[Run] = []
    for first, stop in runs:
        if joined and joined[-1][1] == first:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((first, stop))
    return joined


def _moved(offsets: tuple[int, ...], dim: int, by: int) -> tuple[int, ...]:
    return (*offsets[:dim], offsets[dim] + by, *offsets[dim + 1 :])


def _cells(sizes: Sequence[int]) -> int:
    cells = 1
    for size in sizes:
        cells *= size
    return cells
