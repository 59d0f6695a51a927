"""Tensors as bytes in host memory: in place where possible, otherwise copied in bounded amounts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from raysharded.checkpoint.format.shardfile import ShardTensor
from raysharded.checkpoint.state_dict.shard_boxes import Held, Part

STAGE_BYTES = 256 << 20
"""Host memory for data that cannot be written or read in place: on a GPU, or scattered in memory."""
_ALIGN = 64  # a whole number of elements of any dtype, and a cache line


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name: `float32` -> `torch.float32`."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_in_place(tensor: torch.Tensor) -> bool:
    """Whether the tensor's bytes lie in host memory in C order, without gaps."""
    return tensor.device.type == "cpu" and is_plain(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the memory holds the values in C order without gaps. Lazy conjugation or negation makes it False."""
    return tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """The memory of a tensor that is in place, as bytes. Writing to them writes to the tensor."""
    array: NDArray[np.uint8] = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy()
    return array


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait until copies on the current streams of accelerators are done."""
    for device in set(devices):
        if device.type != "cpu":
            torch.accelerator.current_stream(device).synchronize()


def host_buffer(size_bytes: int, *, pinned: bool) -> torch.Tensor:
    """Host memory with all its pages allocated.

    It is page-locked (`pinned`) for copies to or from an accelerator.
    """
    if pinned or not size_bytes:  # an empty numpy array has no stride
        return torch.zeros(size_bytes, dtype=torch.uint8, pin_memory=pinned)
    return torch.from_numpy(np.empty(size_bytes, np.uint8)).zero_()  # numpy requests huge pages from the system


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a tensor for this rank to write: all or some of its share."""

    held: Held
    part: Part

    @property
    def tensor(self) -> torch.Tensor:
        return self.part.of(self.held.local)

    @property
    def size_bytes(self) -> int:
        return int(np.prod(self.part.sizes, dtype=np.int64)) * self.held.item_bytes

    def shard_tensor(self, data: NDArray[np.uint8]) -> ShardTensor:
        held, part = self.held, self.part
        return ShardTensor(
            name=held.name, dtype=held.dtype, shape=held.shape, offsets=part.offsets, sizes=part.sizes, data=data
        )


def batches_of_bytes(pieces: Sequence[Piece], stage_bytes: int = STAGE_BYTES) -> Iterator[list[ShardTensor]]:
    """The pieces as bytes: one batch of those in place, then batches of at most `stage_bytes`.

    The latter share one buffer: a batch is valid until the next one is requested.
    """
    direct = [piece for piece in pieces if is_in_place(piece.tensor)]
    if direct:
        yield [piece.shard_tensor(bytes_of(piece.tensor)) for piece in direct]
    staged = [part for piece in pieces if not is_in_place(piece.tensor) for part in cut(piece, stage_bytes)]
    batches = list(in_batches(staged, stage_bytes))
    if not batches:
        return
    size = max(space_for(batch) for batch in batches)
    buffer = host_buffer(size, pinned=any(piece.tensor.device.type != "cpu" for piece in staged))
    for batch in batches:
        views = carve(buffer, [(piece.held.dtype, piece.part.sizes) for piece in batch])
        for view, piece in zip(views, batch, strict=True):
            view.copy_(piece.tensor, non_blocking=True)
        synchronize(piece.tensor.device for piece in batch)
        yield [piece.shard_tensor(bytes_of(view)) for view, piece in zip(views, batch, strict=True)]


def snapshot_bytes(held: Sequence[Held]) -> int:
    """Memory that a copy of this rank's share needs."""
    return _places([one.local.numel() * one.item_bytes if one.parts else 0 for one in held])[1]


def carve(buffer: torch.Tensor, wanted: Sequence[tuple[str, Sequence[int]]]) -> list[torch.Tensor]:
    """Tensors of these (dtype, shape) in a buffer of bytes, one after the other."""
    dtypes = [torch_dtype(dtype) for dtype, _ in wanted]
    sizes = [
        int(np.prod(shape, dtype=np.int64)) * dtype.itemsize for dtype, (_, shape) in zip(dtypes, wanted, strict=True)
    ]
    begins, _ = _places(sizes)
    return [
        buffer[begin : begin + size].view(dtype).view(tuple(shape))
        for begin, size, dtype, (_, shape) in zip(begins, sizes, dtypes, wanted, strict=True)
    ]


def cut(piece: Piece, most_bytes: int) -> list[Piece]:
    """The piece in slabs of at most `most_bytes`, or of one element."""
    dim = next((dim for dim, size in enumerate(piece.part.sizes) if size > 1), None)
    if piece.size_bytes <= most_bytes or dim is None:
        return [piece]
    size = piece.part.sizes[dim]
    count = max(1, most_bytes * size // piece.size_bytes)
    slabs = [
        Piece(piece.held, piece.part.slab(dim, first, min(count, size - first))) for first in range(0, size, count)
    ]
    return [part for slab in slabs for part in cut(slab, most_bytes)]


def in_batches(pieces: Sequence[Piece], most_bytes: int) -> Iterator[list[Piece]]:
    """Groups of consecutive pieces that together fit into `most_bytes`; a larger piece is alone."""
    batch: list[Piece] = []
    filled = 0
    for piece in pieces:
        size = -(-piece.size_bytes // _ALIGN) * _ALIGN
        if batch and filled + size > most_bytes:
            yield batch
            batch, filled = [], 0
        batch.append(piece)
        filled += size
    if batch:
        yield batch


def space_for(pieces: Sequence[Piece]) -> int:
    """Bytes of a buffer that `carve` can cut into tensors for these pieces."""
    return _places([piece.size_bytes for piece in pieces])[1]


def _places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """The pair (begin of each, total length)."""
    ends = list(accumulate((-(-size // _ALIGN) * _ALIGN for size in sizes), initial=0))
    return ends[:-1], ends[-1]
