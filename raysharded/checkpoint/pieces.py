"""Which bytes of which file answer a request for a box, and where in the caller's buffer they go. Pure.

A piece whose bytes are contiguous on both sides goes straight to its place. Any other (columns of a row-major
tensor) is staged: the bytes from its first to its last element are gathered, then copied with strides; it is split
into slabs of at most STAGE_BYTES so that little beyond the wanted bytes is read and little memory is held.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from raysharded.checkpoint.manifest import FileBox, Manifest

Bytes = NDArray[np.uint8]
STAGE_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes start..stop of file number `file`, and who takes them."""

    file: int
    start: int
    stop: int
    sink: Straight | Staged

    def put(self, at: int, data: Bytes) -> None:
        """Delivers the file's bytes from `at` on, all of them within the piece; parts may come in any order."""
        self.sink.put(at - self.start, data)


@dataclass(frozen=True, slots=True)
class Straight:
    """Takes bytes to their place."""

    out: Bytes

    def put(self, at: int, data: Bytes) -> None:
        self.out[at : at + len(data)] = data


class Staged:
    """Gathers `size_bytes` and then copies the elements among them to their places. Thread-safe."""

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
        """From the first byte of the first element to the last byte of the last."""
        last = sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))
        return last + self.item_bytes

    @property
    def is_contiguous(self) -> bool:
        return self.span_bytes == math.prod(self.sizes) * self.item_bytes

    def slab(self, dim: int, first: int, count: int) -> _Strided:
        sizes = (*self.sizes[:dim], count, *self.sizes[dim + 1 :])
        return _Strided(self.item_bytes, self.start + first * self.strides[dim], sizes, self.strides)


class BoxIndex:
    """Finds the boxes of a manifest that meet a given box. Immutable once made."""

    def __init__(self, manifest: Manifest) -> None:
        boxes: dict[str, list[tuple[int, int, FileBox]]] = {name: [] for name in manifest.tensors}
        for number, file in enumerate(manifest.files):
            for box in file.boxes:
                boxes[box.name].append((box.offsets[0] if box.offsets else 0, number, box))
        self._tensors = manifest.tensors
        self._boxes = {name: sorted(found, key=lambda entry: entry[0]) for name, found in boxes.items()}
        self._firsts = {name: [first for first, _, _ in found] for name, found in self._boxes.items()}
        self._reach = {name: _running_max(found) for name, found in self._boxes.items()}

    def pieces(self, name: str, offsets: Sequence[int], sizes: Sequence[int], out: Bytes) -> Iterator[Piece]:
        """The pieces that fill `out` with the box, in C order. The box must be inside the tensor."""
        item_bytes = self._tensors[name].item_bytes
        lo, hi = (offsets[0], offsets[0] + sizes[0]) if offsets else (0, 1)
        first = bisect_right(self._reach[name], lo)
        for _, number, box in self._boxes[name][first : bisect_left(self._firsts[name], hi)]:
            begin = tuple(max(a, b) for a, b in zip(offsets, box.offsets, strict=True))
            ends = zip(offsets, sizes, box.offsets, box.sizes, strict=True)
            common = tuple(min(a + n, b + m) - at for (a, n, b, m), at in zip(ends, begin, strict=True))
            if all(n > 0 for n in common):
                source = _within(box.offsets, box.sizes, begin, common, item_bytes, box.start)
                target = _within(offsets, sizes, begin, common, item_bytes, 0)
                yield from _split(number, source, target, out)


def _running_max(boxes: Sequence[tuple[int, int, FileBox]]) -> list[int]:
    """For each box, sorted by where it begins in dimension 0: how far it or any before it reaches."""
    ends = [first + (box.sizes[0] if box.sizes else 1) for first, _, box in boxes]
    return list(accumulate(ends, max))


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
