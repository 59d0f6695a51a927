"""The global state as named tensors, laid end to end on one line of bytes.

Tensor `t` of a `StateSpec` occupies the bytes `base[t] <= position < base[t] + nbytes[t]` of the line, its cells in
row-major order. The line does not depend on who holds what: every layout is a set of intervals on it.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from raysharded.errors import ConfigError

ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element of every dtype a state may hold; the names are torch's without `torch.`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of the global state: its name, dtype and whole shape.

    `replicated`: every rank holds it whole. Otherwise dimension 0 is cut over the ranks. A tensor of no dimensions
    is always replicated, whatever was given.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    replicated: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in ITEM_BYTES:
            raise ConfigError(f"tensor {self.name!r}: dtype {self.dtype!r} is not one of {', '.join(ITEM_BYTES)}.")
        if any(n < 0 for n in self.shape):
            raise ConfigError(f"tensor {self.name!r}: shape {self.shape} has a negative size.")
        if self.shape == ():
            object.__setattr__(self, "replicated", True)

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return ITEM_BYTES[self.dtype]

    @property
    def rows(self) -> int:
        """The length of dimension 0; 1 for a tensor of no dimensions."""
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of dimension 0."""
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.rows * self.row_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class StateSpec:
    """The global state: tensors with unique names, in a fixed order, on one line of bytes.

    `base`, `rows`, `row_bytes`, `nbytes` (int64) and `replicated` (bool) have one entry per tensor, in order.
    Raises ConfigError when a name occurs twice.
    """

    tensors: tuple[TensorSpec, ...]
    base: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    rows: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    row_bytes: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    nbytes: NDArray[np.int64] = field(init=False, repr=False, compare=False)
    replicated: NDArray[np.bool_] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for tensor in self.tensors:
            if tensor.name in seen:
                raise ConfigError(f"StateSpec: two tensors are named {tensor.name!r}; give each its own name.")
            seen.add(tensor.name)
        rows = np.array([t.rows for t in self.tensors], np.int64)
        row_bytes = np.array([t.row_bytes for t in self.tensors], np.int64)
        nbytes = rows * row_bytes
        columns = {
            "rows": rows,
            "row_bytes": row_bytes,
            "nbytes": nbytes,
            "base": np.cumsum(nbytes) - nbytes,
            "replicated": np.array([t.replicated for t in self.tensors], np.bool_),
        }
        for name, column in columns.items():
            column.flags.writeable = False
            object.__setattr__(self, name, column)

    def __reduce__(self) -> tuple[Callable[[str], StateSpec], tuple[str]]:
        """As one text: whoever gets the same spec from thousands of workers makes one object of it, once."""
        return _state_spec, (self._text(),)

    @property
    def total_bytes(self) -> int:
        """The length of the line: every tensor once."""
        return int(self.nbytes.sum())

    def digest(self) -> str:
        """64 hex digits that name this spec; the same in every process, different for any other spec."""
        return hashlib.blake2b(self._text().encode(), digest_size=32).hexdigest()

    def _text(self) -> str:
        rows = [[t.name, t.dtype, list(t.shape), t.replicated] for t in self.tensors]
        return json.dumps(rows, ensure_ascii=True, separators=(",", ":"))


@lru_cache(maxsize=8)
def _state_spec(text: str) -> StateSpec:
    tensors = (
        TensorSpec(name=name, dtype=dtype, shape=tuple(shape), replicated=replicated)
        for name, dtype, shape, replicated in json.loads(text)
    )
    return StateSpec(tensors=tuple(tensors))
