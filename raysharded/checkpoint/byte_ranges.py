"""Map from a requested box to the byte ranges of files and their places in the caller's buffer. Pure.

A piece whose bytes are contiguous on both sides goes straight to its place. Any other piece, such as columns of a
row-major tensor, is staged: the bytes from its first to its last element are gathered, then copied with strides. It is
split into slabs of at most STAGE_BYTES, which limits the memory and the extra bytes that are read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from raysharded.checkpoint.format.manifest import Manifest

Bytes = NDArray[np.uint8]
STAGE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes start..stop of file number `file`, and their destination."""

    file: int
    start: int
    stop: int
    sink: Straight | Staged

    def put(self, at: int, data: Bytes) -> None:
        """Deliver the file's bytes from `at` on, all of them within the piece. Parts may come in any order."""
        self.sink.put(at - self.start, data)


@dataclass(frozen=True, slots=True)
class Straight:
    """A destination that takes bytes directly."""

    out: Bytes

    def put(self, at: int, data: Bytes) -> None:
        self.out[at : at + len(data)] = data


class Staged:
    """A destination that gathers `size_bytes`, then copies the elements among them to their places. Thread-safe."""

    def __init__(self, size_bytes: int, source: _Strided, target: _Strided, out: Bytes) -> None:
        self._size_bytes, self._source, self._target, self._out = size_bytes, source, target, out
        self._missing_bytes = size_bytes
        self._buffer: Bytes | None = None
        self._lock = threading.Lock()

    def put(self, at: int, data: Bytes) -> None:
        with self._lock:
            if self._buffer is None:
                self._buffer = np.empty(self._size_bytes, np.uint8)
            self._buffer[at : at + len(data)] = data
            self._missing_bytes -= len(data)
            if self._missing_bytes == 0:
                self._target.of(self._out)[...] = self._source.of(self._buffer)
                self._buffer = None


@dataclass(frozen=True, slots=True)
class _Strided:
    """A box of elements in a buffer."""

    item_bytes: int
    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, buffer: Bytes) -> NDArray[np.void]:
        dtype = np.dtype(f"u{self.item_bytes}" if self.item_bytes <= 8 else f"V{self.item_bytes}")
        return np.ndarray(self.sizes, dtype, buffer=buffer, offset=self.start, strides=self.strides)

    @property
    def span_bytes(self) -> int:
        """Bytes from the first byte of the first element to the last byte of the last element."""
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return last + self.item_bytes

    @property
    def is_contiguous(self) -> bool:
        return self.span_bytes == math.prod(self.sizes) * self.item_bytes

    def slab(self, dim: int, first: int, count: int) -> _Strided:
        sizes = (*self.sizes[:dim], count, *self.sizes[dim + 1 :])
        return _Strided(self.item_bytes, self.start + first * self.strides[dim], sizes, self.strides)


class BoxIndex:
    """Index of a manifest's boxes that finds those intersecting a given box. Immutable once made."""

    def __init__(self, manifest: Manifest) -> None:
        file, boxes = manifest.boxes()
        begin = boxes.offsets[:, 0] if boxes.offsets.shape[1] else np.zeros(len(boxes), np.int64)
        order = np.lexsort((begin, boxes.tensor))
        self._item_bytes = {name: info.item_bytes for name, info in manifest.tensors.items()}
        self._number = {name: number for number, name in enumerate(manifest.tensors)}
        self._file, self._boxes, self._begin = file[order], boxes.rows(order), begin[order]
        self._edges = np.searchsorted(self._boxes.tensor, np.arange(len(self._number) + 1))
        self._reach = self._running_reach()

    def _running_reach(self) -> NDArray[np.int64]:
        """For each box: the largest end in dimension 0 of all boxes of its tensor up to and including it."""
        sizes = self._boxes.sizes
        reach = self._begin + (sizes[:, 0] if sizes.shape[1] else 1)
        for first, last in pairwise(self._edges.tolist()):
            np.maximum.accumulate(reach[first:last], out=reach[first:last])
        return reach

    def pieces(self, name: str, offsets: Sequence[int], sizes: Sequence[int], out: Bytes) -> Iterator[Piece]:
        """The pieces that fill `out` with the box, in C order. The box must be inside the tensor."""
        item_bytes = self._item_bytes[name]
        first, last = self._edges[self._number[name] : self._number[name] + 2].tolist()
        lo, hi = (offsets[0], offsets[0] + sizes[0]) if offsets else (0, 1)
        stop = first + int(np.searchsorted(self._begin[first:last], hi))
        first += int(np.searchsorted(self._reach[first:last], lo, side="right"))
        for row in (first + self._meeting(slice(first, stop), offsets, sizes)).tolist():
            box = self._boxes[row]
            begin = tuple(max(a, b) for a, b in zip(offsets, box.offsets, strict=True))
            ends = zip(offsets, sizes, box.offsets, box.sizes, strict=True)
            common = tuple(min(a + n, b + m) - at for (a, n, b, m), at in zip(ends, begin, strict=True))
            source = _within(box.offsets, box.sizes, begin, common, item_bytes, box.start)
            target = _within(offsets, sizes, begin, common, item_bytes, 0)
            yield from _split(int(self._file[row]), source, target, out)

    def _meeting(self, rows: slice, offsets: Sequence[int], sizes: Sequence[int]) -> NDArray[np.int64]:
        """Positions in `rows`, counted from its first row, of the boxes that intersect the given box.

        Not a loop over rows: if a tensor is cut in columns, every box meets the request in dimension 0.
        """
        width = len(offsets)
        begin, size = self._boxes.offsets[rows, :width], self._boxes.sizes[rows, :width]
        low = np.asarray(offsets, np.int64)
        ends = np.minimum(begin + size, low + np.asarray(sizes, np.int64))
        return np.flatnonzero((ends > np.maximum(begin, low)).all(axis=1))


def _within(
    offsets: Sequence[int],
    sizes: Sequence[int],
    begin: Sequence[int],
    common: tuple[int, ...],
    item_bytes: int,
    at: int,
) -> _Strided:
    """The box (begin, common) in a C-ordered buffer that holds the box (offsets, sizes) from byte `at` on."""
    strides: list[int] = []
    step = item_bytes
    for size in reversed(sizes):
        strides.insert(0, step)
        step *= size
    start = at + sum((b - o) * s for b, o, s in zip(begin, offsets, strides, strict=True))
    return _Strided(item_bytes, start, common, tuple(strides))


def _split(file: int, source: _Strided, target: _Strided, out: Bytes) -> Iterator[Piece]:
    span = source.span_bytes
    if source.is_contiguous and target.is_contiguous:
        yield Piece(file, source.start, source.start + span, Straight(out[target.start : target.start + span]))
        return
    dim = next(dim for dim, size in enumerate(source.sizes) if size > 1)
    if span <= STAGE_BYTES:
        here = _Strided(source.item_bytes, 0, source.sizes, source.strides)
        yield Piece(file, source.start, source.start + span, Staged(span, here, target, out))
        return
    count = max(1, STAGE_BYTES // source.strides[dim])
    for first in range(0, source.sizes[dim], count):
        some = min(count, source.sizes[dim] - first)
        yield from _split(file, source.slab(dim, first, some), target.slab(dim, first, some), out)
