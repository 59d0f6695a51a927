"""The global state as named tensors, laid end to end on one line of bytes.

Tensor `t` of a `StateSpec` occupies the bytes `base[t] <= position < base[t] + nbytes[t]` of the line, its cells in
row-major order. The line does not depend on the holders: every layout is a set of intervals on it.

A tensor that tensor parallelism cuts along another dimension than the first is listed as several entries, its strips.
Each strip has its own stretch of the line. So layouts of any degree that divides their number are intervals as well.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysharded.errors import ConfigError

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every dtype a state may hold; the names are torch's without `torch.`.

Checkpoints hold all of them.
"""

MOST_STRIPS = 16
"""Most strips of a tensor, unless the tensor parallel degree is larger. Layouts may have any degree that divides the
number of strips, but each strip is moved as a separate piece."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of the global state, or one strip of it: its name, dtype and whole shape.

    `replicated`: every rank holds it whole. Otherwise dimension 0 is cut over the ranks. A tensor of no dimensions is
    always replicated.

    `tensor_dim`: the dimension that tensor parallelism cuts; None: every worker of a tensor parallel group holds the
    same rows. A tensor cut along a later dimension than the first is listed as `strips` strips of equal width, each
    with the shape of the whole. `strip` is the number of this one. Each strip lies on the line separately.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    replicated: bool = False
    tensor_dim: int | None = None
    strip: int = 0
    strips: int = 1

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(
                f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}. Convert it; a "
                "buffer with persistent=False may have any dtype."
            )
        if any(n < 0 for n in self.shape):
            raise ConfigError(f"tensor {self.name!r}: shape {self.shape} has a negative size.")
        if self.shape == ():
            object.__setattr__(self, "replicated", True)
        self._require_tensor_dim()

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        """Length of dimension 0; 1 for a tensor of no dimensions."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dimension 0; for a strip, only its own."""
        return math.prod(self.shape[1:]) * self.itemsize // self.strips

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor; for a strip, only its own."""
        return self.rows * self.row_bytes

    @property
    def strip_range(self) -> tuple[int, int, int]:
        """Dimension that is cut, and start and stop along it, of a strip or of a tensor with a single strip.

        For any other tensor dimension 0, whole.
        """
        dim = self.tensor_dim or 0
        width = (self.shape[dim] if self.shape else 1) // self.strips
        return dim, self.strip * width, (self.strip + 1) * width

    def _require_tensor_dim(self) -> None:
        dim, strips = self.tensor_dim, self.strips
        if dim is not None and (self.replicated or not 0 <= dim < len(self.shape)):
            raise ConfigError(
                f"tensor {self.name!r}: tensor_dim={dim} of shape {self.shape}, replicated={self.replicated}; give a "
                "dimension of a tensor that is not replicated, or None."
            )
        if strips < 1 or not 0 <= self.strip < strips or (strips > 1 and not dim) or (dim and self.shape[dim] % strips):
            raise ConfigError(
                f"tensor {self.name!r}: strip {self.strip} of {strips} along tensor_dim={dim} of shape {self.shape}; "
                "strips are of equal width, along a dimension behind the first."
            )


def tensor_specs(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    *,
    replicated: bool = False,
    tensor_dim: int | None = None,
    strips: int = 1,
) -> tuple[TensorSpec, ...]:
    """All entries of one tensor, in order: its strips, or itself.

    `strips`: see `strips_of`; means nothing unless `tensor_dim` is 1 or more.
    """
    first = TensorSpec(
        name=name,
        dtype=dtype,
        shape=shape,
        replicated=replicated,
        tensor_dim=tensor_dim,
        strips=strips if tensor_dim else 1,
    )
    return tuple(replace(first, strip=strip) for strip in range(first.strips)) if first.strips > 1 else (first,)


def strips_of(width: int, degree: int) -> int:
    """Number of strips of a tensor that tensor parallelism of this degree cuts along a dimension of `width` indices.

    It is a divisor of `width` and a multiple of `degree`: the largest up to `MOST_STRIPS` if there is one, otherwise
    `degree`. Raises ConfigError if `degree` does not divide `width`.
    """
    if degree < 1 or width % degree:
        raise ConfigError(
            f"a dimension of {width} cannot be cut in {degree} equal parts; choose a degree that divides it."
        )
    possible = range(MOST_STRIPS // degree * degree, 0, -degree)
    return next((strips for strips in possible if width % strips == 0), degree)


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """The global state: tensors with unique names, in a fixed order, on one line of bytes.

    All strips of a tensor follow each other, in order. `base`, `rows`, `row_bytes`, `nbytes` (int64) and `replicated`
    (bool) have one entry per tensor or strip, in order; so have `tensor_dim` (-1: None), `strip` and `strips` (0: not
    in strips). Raises ConfigError when a name occurs twice, or a strip is missing or unlike the others.
    """

    tensors: tuple[TensorSpec, ...]
    base: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    rows: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    row_bytes: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    nbytes: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    replicated: NDArray[np.bool_] = field(init=False, repr=False, compare=False)
    tensor_dim: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    strip: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    strips: NDArray[np.int64] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require_whole(self.tensors)
        rows = np.array([t.rows for t in self.tensors], np.int64)
        row_bytes = np.array([t.row_bytes for t in self.tensors], np.int64)
        nbytes = rows * row_bytes
        columns = {
            "rows": rows,
            "row_bytes": row_bytes,
            "nbytes": nbytes,
            "base": np.cumsum(nbytes) - nbytes,
            "replicated": np.array([t.replicated for t in self.tensors], np.bool_),
            "tensor_dim": np.array([-1 if t.tensor_dim is None else t.tensor_dim for t in self.tensors], np.int64),
            "strip": np.array([t.strip for t in self.tensors], np.int64),
            "strips": np.array([t.strips if t.tensor_dim else 0 for t in self.tensors], np.int64),
        }
        for name, column in columns.items():
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    def __reduce__(self) -> tuple[Callable[[str], StateSpec], tuple[str]]:
        """Pickle as one text: a receiver of the same spec from thousands of workers creates one object of it, once."""
        return _state_spec, (self._text(),)

    @property
    def total_bytes(self) -> int:
        """Length of the line: every tensor once."""
        return int(self.nbytes.sum())

    def digest(self) -> str:
        """64 hex digits that name this spec; the same in every process, different for any other spec."""
        return hashlib.blake2b(self._text().encode(), digest_size=32).hexdigest()

    def to_rows(self) -> list[list[Any]]:
        """The spec as a JSON value: one list per tensor, not per strip."""
        return [_row(tensor) for tensor in self.tensors if tensor.strip == 0]

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Any]]) -> StateSpec:
        """The spec whose `to_rows` are given."""
        return cls(tensors=tuple(entry for row in rows for entry in _entries(*row)))

    def _text(self) -> str:
        return json.dumps(self.to_rows(), ensure_ascii=True, separators=(",", ":"))


def possible_degree(spec: StateSpec, degree: int) -> str | None:
    """Reason why the state cannot be laid out with this tensor parallel degree; None if it can.

    The degree must divide the number of strips of every tensor that is listed in strips.
    """
    unlike = np.flatnonzero(spec.strips % max(degree, 1))
    if degree >= 1 and len(unlike) == 0:
        return None
    common = int(np.gcd.reduce(spec.strips))
    possible = "any" if common == 0 else ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    if degree < 1:
        return f"A tensor parallel degree of {degree} is invalid; these are possible: {possible}."
    tensor = spec.tensors[unlike[0]]
    return (
        f"A tensor parallel degree of {degree} is not possible: {tensor.name!r} {tensor.shape} is kept in "
        f"{tensor.strips} strips along dimension {tensor.tensor_dim}, which the degree must divide. "
        f"These are possible: {possible}."
    )


def _require_whole(tensors: Sequence[TensorSpec]) -> None:
    """Raise ConfigError unless every name occurs once, or for all strips of one tensor."""
    seen: set[str] = set()
    position = 0
    while position < len(tensors):
        first = tensors[position]
        if first.name in seen:
            raise ConfigError(f"StateSpec: two tensors are named {first.name!r}; give each its own name.")
        seen.add(first.name)
        if first.strips > 1:
            of_tensor = tuple(tensors[position : position + first.strips])
            if of_tensor != tuple(replace(first, strip=strip) for strip in range(first.strips)):
                raise ConfigError(
                    f"StateSpec: {first.name!r} is in {first.strips} strips; list all of them, in order, alike in "
                    "dtype, shape and dimension (as `tensor_specs` does)."
                )
        position += first.strips


def _row(tensor: TensorSpec) -> list[Any]:
    row = [tensor.name, tensor.dtype, list(tensor.shape), tensor.replicated]
    return row if tensor.tensor_dim is None else [*row, tensor.tensor_dim, tensor.strips]


def _entries(
    name: str, dtype: str, shape: Sequence[int], replicated: bool, tensor_dim: int | None = None, strips: int = 1
) -> Iterator[TensorSpec]:
    yield from tensor_specs(name, dtype, tuple(shape), replicated=replicated, tensor_dim=tensor_dim, strips=strips)


@lru_cache(maxsize=8)
def _state_spec(text: str) -> StateSpec:
    return StateSpec.from_rows(json.loads(text))
