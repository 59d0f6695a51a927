"""Slabs of tensors: pieces of bounded size, in C order, so that no tensor is ever held whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import product
from typing import TypeVar

import numpy as np

from raysharded.checkpoint.byte_ranges import Bytes
from raysharded.checkpoint.format.manifest import TensorInfo
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.threads import Threads

S = TypeVar("S")
T = TypeVar("T")

SLAB_BYTES = 16 << 20
"""Slab size: large enough to make the cost of a read irrelevant, small enough to hold a few."""

Progress = Callable[[int], None]
"""Callback that gets the number of bytes just processed."""

Extent = tuple[tuple[int, ...], tuple[int, ...]]
"""The pair (offsets, sizes) of a box."""
Wanted = tuple[str, Extent]
"""A box of the tensor of that name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slab:
    """A box of a tensor and its bytes, in C order."""

    name: str
    info: TensorInfo
    """Info of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    data: Bytes


def cut(sizes: Sequence[int], item_bytes: int, max_bytes: int = SLAB_BYTES) -> Iterator[Extent]:
    """Boxes (offsets, sizes) of at most `max_bytes` (or one element) that make up a box, in order.

    Law: the boxes' bytes in C order, one after the other, are the whole box's bytes in C order.
    """
    if 0 in sizes:
        return
    if not sizes:
        yield (), ()
        return
    dim = next(d for d in range(len(sizes)) if _row_bytes(sizes, d, item_bytes) <= max_bytes or d == len(sizes) - 1)
    count = max(1, max_bytes // _row_bytes(sizes, dim, item_bytes))
    inner = len(sizes) - dim - 1
    for outer in product(*(range(n) for n in sizes[:dim])):
        for first in range(0, sizes[dim], count):
            some = min(count, sizes[dim] - first)
            yield (*outer, first, *[0] * inner), (*[1] * dim, some, *sizes[dim + 1 :])


def cut_tensors(checkpoint: Checkpoint, names: Iterable[str], max_bytes: int = SLAB_BYTES) -> Iterator[Wanted]:
    """The slabs that make up some tensors, in order."""
    for name in names:
        info = checkpoint.manifest.tensors[name]
        for extent in cut(info.shape, info.item_bytes, max_bytes):
            yield name, extent


def read_slabs(checkpoint: Checkpoint, wanted: Iterable[Wanted], max_bytes: int = SLAB_BYTES) -> Iterator[Slab]:
    """The requested slabs, in order. Small ones are read together.

    Memory: about twice `max_bytes`, for the batch in use and the batch that is being read.
    """

    def read(batch: list[Wanted]) -> list[Slab]:
        found = [_empty(checkpoint, name, extent) for name, extent in batch]
        checkpoint.read_many((slab.name, slab.offsets, slab.sizes, slab.data) for slab in found)
        return found

    for slabs in _ahead(read, _batches(checkpoint, wanted, max_bytes)):
        yield from slabs


def _empty(checkpoint: Checkpoint, name: str, extent: Extent) -> Slab:
    info = checkpoint.manifest.tensors[name]
    offsets, sizes = extent
    data = np.empty(math.prod(sizes) * info.item_bytes, np.uint8)
    return Slab(name=name, info=info, offsets=offsets, sizes=sizes, data=data)


def _row_bytes(sizes: Sequence[int], dim: int, item_bytes: int) -> int:
    return math.prod(sizes[dim + 1 :]) * item_bytes


def _batches(checkpoint: Checkpoint, wanted: Iterable[Wanted], max_bytes: int) -> Iterator[list[Wanted]]:
    """Slabs in groups of at most `max_bytes`."""
    batch: list[Wanted] = []
    room = max_bytes
    for name, extent in wanted:
        num_bytes = math.prod(extent[1]) * checkpoint.manifest.tensors[name].item_bytes
        if batch and num_bytes > room:
            yield batch
            batch, room = [], max_bytes
        batch.append((name, extent))
        room -= num_bytes
    if batch:
        yield batch


def _ahead(act: Callable[[S], T], inputs: Iterable[S]) -> Iterator[T]:
    """Yield act(x) for every input, in order. The next one is computed while a result is used."""
    pool = Threads(1, thread_name_prefix="raysharded-ahead")
    try:
        ready: Future[T] | None = None
        for each in inputs:
            coming = pool.submit(act, each)
            if ready is not None:
                yield ready.result()
            ready = coming
        if ready is not None:
            yield ready.result()
    finally:  # perhaps by the garbage collector, which must not wait for a thread
        pool.shutdown(wait=False, cancel_futures=True)
