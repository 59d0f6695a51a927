"""Differences between two checkpoints, tensor by tensor, read in slabs.

Equality means equal bytes. Differences of floating point and complex numbers are computed in float64, over the elements
that are finite on both sides. Whole numbers and bools are converted to float64 too.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysharded.checkpoint.byte_ranges import Bytes
from raysharded.checkpoint.format.manifest import FileRecord, TensorInfo
from raysharded.checkpoint.interop.names import chosen
from raysharded.checkpoint.interop.slabs import Progress, cut_tensors, read_slabs
from raysharded.checkpoint.reader import Checkpoint

DIFF_SLAB_BYTES = 4 << 20
"""Slab size of a comparison: small, as a slab becomes several arrays of float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorDiff:
    """Differences of one tensor. `num_differing` of its elements differ in their bits."""

    name: str
    num_elements: int
    num_differing: int
    num_not_finite: int
    """Differing elements with at least one side that is not finite. The fields below exclude them."""
    max_abs: float
    """The largest difference."""
    mean_abs: float
    """The mean difference, over all elements."""
    relative_l2: float | None
    """Norm of the difference over the norm of the first tensor; None if that norm is zero."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Diff:
    """Differences between checkpoints `a` and `b`."""

    only_in_a: tuple[str, ...]
    only_in_b: tuple[str, ...]
    changed: tuple[tuple[str, TensorInfo, TensorInfo], ...]
    """Tensors of another dtype or shape: (name, in a, in b)."""
    different: tuple[TensorDiff, ...]
    equal: tuple[str, ...]
    """Tensors equal to the bit."""
    by_digests: tuple[str, ...] = ()
    """Tensors in `equal` that were not read, because the digests of their files are equal."""

    @property
    def is_empty(self) -> bool:
        """Whether both hold the same tensors with the same bits."""
        return not (self.only_in_a or self.only_in_b or self.changed or self.different)


def diff(a: Checkpoint, b: Checkpoint, *, names: tuple[str, ...] = (), progress: Progress = lambda _: None) -> Diff:
    """The differences, only of tensors that `names` (patterns) match if any are given.

    Tensors whose chunks have the same places and digests in both are not read. Raises CheckpointError if a pattern
    matches nothing in either, CorruptCheckpoint for damage in the bytes that are read.
    """
    left, right = a.manifest.tensors, b.manifest.tensors
    wanted = chosen(list(dict.fromkeys([*left, *right])), names)
    both = [name for name in wanted if name in left and name in right]
    same_kind = [name for name in both if left[name] == right[name]]
    known = _known_equal(a, b)
    unread = [name for name in same_kind if name in known]
    progress(sum(left[name].size_bytes for name in unread))
    compared = list(_compared(a, b, [name for name in same_kind if name not in known], progress))
    different = {found.name: found for found in compared if found.num_differing}
    return Diff(
        only_in_a=tuple(name for name in wanted if name not in right),
        only_in_b=tuple(name for name in wanted if name not in left),
        changed=tuple((name, left[name], right[name]) for name in both if left[name] != right[name]),
        different=tuple(different.values()),
        equal=tuple(name for name in same_kind if name not in different),
        by_digests=tuple(unread),
    )


def _known_equal(a: Checkpoint, b: Checkpoint) -> set[str]:
    """Tensors that are equal by the digests in the manifests: every file with one of their boxes is in both."""
    if a.digest == b.digest:
        return set(a.manifest.tensors)
    there = {_contents(file) for file in b.manifest.files}
    same: set[str] = set()
    other: set[str] = set()
    for file in a.manifest.files:
        names = {file.boxes.names[number] for number in np.unique(file.boxes.tensor)}
        (same if _contents(file) in there else other).update(names)
    return same - other


def _contents(file: FileRecord) -> tuple[object, ...]:
    """Contents of a file, independent of its path: digests of the bytes, and the boxes that they hold."""
    boxes = file.boxes
    places = (boxes.names, *(c.tobytes() for c in (boxes.tensor, boxes.ndim, boxes.offsets, boxes.sizes, boxes.start)))
    return file.size_bytes, file.chunk_size_bytes, file.digests, file.digest_table, places


def _compared(a: Checkpoint, b: Checkpoint, names: Iterable[str], progress: Progress) -> Iterator[TensorDiff]:
    for name in names:
        sums = _Sums()
        wanted = list(cut_tensors(a, [name], DIFF_SLAB_BYTES))
        slabs = zip(read_slabs(a, wanted, DIFF_SLAB_BYTES), read_slabs(b, wanted, DIFF_SLAB_BYTES), strict=True)
        for x, y in slabs:
            sums.add(x.data, y.data, x.info)
            progress(len(x.data))
        yield sums.result(name, math.prod(a.manifest.tensors[name].shape))


class _Sums:
    """Accumulator of one tensor's differences."""

    def __init__(self) -> None:
        self._differing = self._not_finite = 0
        self._max = self._total = self._squares = self._norm_squares = 0.0

    def add(self, x: Bytes, y: Bytes, info: TensorInfo) -> None:
        if not np.array_equal(x, y):
            differs = (x.reshape(-1, info.item_bytes) != y.reshape(-1, info.item_bytes)).any(axis=1)
            left, right = numbers(x, info.dtype), numbers(y, info.dtype)
            with np.errstate(invalid="ignore", over="ignore"):
                finite = np.isfinite(left) & np.isfinite(right)
                apart = np.abs(left - right)[differs & finite]
            self._differing += int(differs.sum())
            self._not_finite += int((differs & ~finite).sum())
            self._max = max(self._max, float(apart.max(initial=0.0)))
            self._total += float(apart.sum())
            self._squares += float(np.square(apart).sum())
        else:
            left = numbers(x, info.dtype)
        with np.errstate(invalid="ignore", over="ignore"):
            squares = np.square(np.abs(left))
        self._norm_squares += float(squares[np.isfinite(squares)].sum())

    def result(self, name: str, num_elements: int) -> TensorDiff:
        norm = math.sqrt(self._norm_squares)
        return TensorDiff(
            name=name,
            num_elements=num_elements,
            num_differing=self._differing,
            num_not_finite=self._not_finite,
            max_abs=self._max,
            mean_abs=self._total / num_elements if num_elements else 0.0,
            relative_l2=math.sqrt(self._squares) / norm if norm else None,
        )


def numbers(data: Bytes, dtype: str) -> NDArray[np.float64] | NDArray[np.complex128]:
    """The elements as float64 or complex128, flat. Whole numbers beyond 2^53 are rounded."""
    if dtype == "complex64":
        return data.view(np.complex64).astype(np.complex128)
    if dtype == "bfloat16":  # the upper half of a float32
        return numbers((data.view(np.uint16).astype(np.uint32) << 16).view(np.uint8), "float32")
    if dtype.startswith("float8"):
        return _float8(dtype)[data]
    with np.errstate(invalid="ignore"):  # a signalling NaN becomes a quiet one
        return data.view(dtype).astype(np.float64)


def _float8(dtype: str) -> NDArray[np.float64]:
    """Value of each of the 256 codes (OCP 8-bit floating point specification, 2023)."""
    codes = np.arange(256)
    mantissa_bits, bias = (3, 7) if dtype == "float8_e4m3fn" else (2, 15)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes & 0x7F) >> mantissa_bits
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = (1 + mantissa) * np.exp2(exponent - float(bias))
    value = sign * np.where(exponent == 0, mantissa * 2.0 ** (1 - bias), normal)
    if mantissa_bits == 3:
        value[(codes & 0x7F) == 0x7F] = np.nan
    else:
        value[exponent == 31] = np.where(mantissa[exponent == 31] == 0, sign[exponent == 31] * np.inf, np.nan)
    return value
