"""A checkpoint opened for reading parts of it as tensors."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType, TracebackType
from typing import Any, Self, SupportsIndex

import numpy as np
import torch

from raysharded.checkpoint.format.manifest import TensorInfo
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.state_dict import tree
from raysharded.checkpoint.state_dict.staging import bytes_of, torch_dtype
from raysharded.display.plain_text import masked
from raysharded.errors import CheckpointError, CorruptCheckpoint
from raysharded.locations import join_url

Index = int | slice | EllipsisType
_Cut = tuple[int, int, int, bool]
"""One dimension of an index: first index, count, step, and whether the dimension is removed."""


@dataclass(frozen=True, slots=True, repr=False)
class OpenCheckpoint:
    """A checkpoint whose manifest has been read and checked. Data is read and checked on demand. Thread-safe.

    Closing is unnecessary, but `with open(uri) as checkpoint:` works too.
    """

    checkpoint: Checkpoint
    """The checkpoint as raw bytes."""

    @property
    def step(self) -> int:
        """The optimizer step after which the state was saved."""
        return self.checkpoint.step

    @property
    def digest(self) -> str:
        """Digest of the manifest. It stands for every byte of the checkpoint."""
        return self.checkpoint.digest

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """dtype and shape of every tensor, by name."""
        return self.checkpoint.tensors

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Metadata that `save` got besides the state."""
        return self.checkpoint.manifest.metadata

    @property
    def data(self) -> Mapping[str, Any]:
        """Position of the run in its data."""
        return self.checkpoint.manifest.data

    @property
    def tree(self) -> tree.Tree:
        """Tree that nests the tensors in the saved state; None: the state is the tensors by name."""
        return self.checkpoint.manifest.tree

    def read(self, name: str, index: Index | tuple[Index, ...] = ...) -> torch.Tensor:
        """A tensor, or a part of it as `tensor[index]` would be: whole numbers, slices with a positive step, `...`.

        Reads everything between the first and the last index in every dimension. Raises CheckpointError for an unknown
        name or an index outside the tensor, and CorruptCheckpoint, IncompleteCheckpoint or StorageError.
        """
        info = self.checkpoint.manifest.tensors.get(name)
        if info is None:
            close = difflib.get_close_matches(name, list(self.tensors), n=1, cutoff=0.8)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            raise CheckpointError(
                f"there is no tensor {name!r} among the {len(self.tensors)} of step {self.step}.{meant}"
            )
        cuts = _cuts(name, info.shape, index)
        out = torch.empty([count for _, count, _, _ in cuts], dtype=torch_dtype(info.dtype))
        if out.numel():
            self.checkpoint.read_into(name, [first for first, _, _, _ in cuts], list(out.shape), bytes_of(out))
        return out[tuple(0 if gone else slice(None, None, step) for _, _, step, gone in cuts)]

    def state(self) -> Any:
        """The whole state as it was saved: nested dicts and lists with tensors in this process's memory."""
        read, stored = self._read_all(), self.tree
        return read if stored is None else tree.unflatten(stored, lambda name: _known(read, name))

    def _read_all(self) -> dict[str, torch.Tensor]:
        tensors = {n: torch.empty(info.shape, dtype=torch_dtype(info.dtype)) for n, info in self.tensors.items()}
        self.checkpoint.read_many(
            [(n, [0] * t.dim(), list(t.shape), bytes_of(t)) for n, t in tensors.items() if t.numel()]
        )
        return tensors

    def __repr__(self) -> str:
        uri = masked(join_url(self.checkpoint.storage.url, self.checkpoint.prefix))
        return f"OpenCheckpoint({uri!r}, step={self.step}, {len(self.tensors)} tensors)"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _known(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in tensors:
        raise CorruptCheckpoint(f"the checkpoint's tree names {name!r}, which is not among its {len(tensors)} tensors.")
    return tensors[name]


def _cuts(name: str, shape: tuple[int, ...], index: Index | tuple[Index, ...]) -> list[_Cut]:
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    if any(isinstance(item, (Sequence, torch.Tensor, np.ndarray)) for item in items):
        raise CheckpointError(
            f"tensor {name!r} cannot be indexed by {index!r}: scattered parts are not read in one go. Give whole "
            "numbers and slices, one for each dimension, as in (1, slice(2, 4)); or read all, and index that."
        )
    if Ellipsis not in items:
        items.append(...)
    at = items.index(...)
    missing = len(shape) - (len(items) - 1)
    if missing < 0 or items.count(...) > 1:
        raise CheckpointError(f"tensor {name!r} of shape {list(shape)} cannot be indexed by {index!r}.")
    items[at : at + 1] = [slice(None)] * missing
    return [_cut(name, dim, length, item) for dim, (length, item) in enumerate(zip(shape, items, strict=True))]


def _cut(name: str, dim: int, length: int, item: Index) -> _Cut:
    if isinstance(item, slice) and _is_forward(item):
        first, stop, step = item.indices(length)
        return first, max(stop - first, 0), step, False
    if isinstance(item, int) and not isinstance(item, bool) and -length <= item < length:
        return item % length, 1, 1, True
    raise CheckpointError(
        f"tensor {name!r}: index {item!r} in dimension {dim} of length {length}. Give a whole number within it or a "
        "slice with a positive step."
    )


def _is_forward(item: slice) -> bool:
    """Whether the slice consists of whole numbers, with a positive step."""
    parts = (item.start, item.stop, item.step)
    return all(part is None or isinstance(part, SupportsIndex) for part in parts) and (
        item.step is None or item.step > 0
    )
