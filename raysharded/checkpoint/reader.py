"""Reading a checkpoint at any number of workers: each asks for its boxes, and only their bytes are read.

Bytes come in chunks, and every chunk is checked against its digest whenever it is read. Two boxes may share a chunk:
ask for all that a worker needs in one `read_many`, which reads and checks each chunk once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raysharded.checkpoint.coverage import is_within
from raysharded.checkpoint.encoding import decode
from raysharded.checkpoint.fetch import fetch, find_damage
from raysharded.checkpoint.manifest import Manifest, TensorInfo
from raysharded.checkpoint.paths import MANIFEST_NAME, parse_save_folder
from raysharded.checkpoint.pieces import BoxIndex, Bytes, Piece
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint

Request = tuple[str, Sequence[int], Sequence[int], memoryview | Bytes]
"""(tensor, offsets, sizes, where to put it): a writable, contiguous buffer of exactly the box's bytes."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint whose manifest has been validated. Thread-safe."""

    storage: Storage
    prefix: str
    manifest: Manifest
    _index: BoxIndex

    @property
    def step(self) -> int:
        return self.manifest.step

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """dtype and global shape of every tensor."""
        return dict(self.manifest.tensors)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Bytes:
        """The box's bytes in C order, as a new flat array. Raises as `read_many`."""
        out = np.empty(math.prod(sizes) * self._info(name).item_bytes, np.uint8)
        self.read_into(name, offsets, sizes, out)
        return out

    def read_into(self, name: str, offsets: Sequence[int], sizes: Sequence[int], out: memoryview | Bytes) -> None:
        """The box's bytes in C order, into `out`. Raises as `read_many`."""
        self.read_many([(name, offsets, sizes, out)])

    def read_many(self, requests: Iterable[Request]) -> None:
        """Fills the buffers of all requests; every chunk that any of them needs is read and checked once.

        Empty boxes are allowed; buffers must not overlap. Raises CheckpointError for a tensor that is not there, a
        box outside it or a buffer of the wrong size, before reading anything; CorruptCheckpoint or
        IncompleteCheckpoint naming the file and the chunk, after which the buffers' contents are undefined.
        """
        pieces = [piece for request in requests for piece in self._pieces(request)]
        if pieces:
            fetch(self.storage, self.prefix, self.manifest.files, pieces)

    def find_damage(self) -> list[CheckpointError]:
        """Reads every byte; one error for every part that is missing or changed."""
        return find_damage(self.storage, self.prefix, self.manifest.files)

    def verify(self) -> None:
        """Reads every byte; raises the first CorruptCheckpoint or IncompleteCheckpoint, and tells how many follow."""
        damage = self.find_damage()
        if damage:
            more = f" ({len(damage) - 1} further parts are damaged.)" if len(damage) > 1 else ""
            raise type(damage[0])(f"{damage[0]}{more}")

    def _info(self, name: str) -> TensorInfo:
        info = self.manifest.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"step {self.step} under {self.storage.url}/{self.prefix} has no tensor {name!r} among its "
                f"{len(self.manifest.tensors)}. Was it saved by another model or optimizer?"
            )
        return info

    def _pieces(self, request: Request) -> Iterator[Piece]:
        name, offsets, sizes, out = request
        info = self._info(name)
        empty = 0 in sizes and min(sizes) == 0 and len(offsets) == len(sizes) == len(info.shape)
        if not empty and not is_within(info.shape, (tuple(offsets), tuple(sizes))):
            raise CheckpointError(
                f"tensor {name!r} has shape {info.shape}; the box at {list(offsets)} of {list(sizes)} is outside it."
            )
        view = out.data if isinstance(out, np.ndarray) else out
        expected = math.prod(sizes) * info.item_bytes
        if view.nbytes != expected or view.readonly or not view.c_contiguous:
            raise CheckpointError(
                f"tensor {name!r}: {list(sizes)} of {info.dtype} needs a writable, contiguous buffer of {expected} "
                f"bytes; this one has {view.nbytes}, readonly={view.readonly}, contiguous={view.c_contiguous}."
            )
        if not empty:
            yield from self._index.pieces(name, offsets, sizes, np.frombuffer(view.cast("B"), np.uint8))


def open_checkpoint(storage: Storage, prefix: str) -> Checkpoint:
    """The checkpoint in the folder `prefix` of `storage`, its manifest validated; no data is read yet.

    Raises IncompleteCheckpoint if it was never committed, CorruptCheckpoint if the manifest is damaged or belongs
    to another save.
    """
    key = f"{prefix}/{MANIFEST_NAME}"
    where = f"{storage.url}/{key}"
    try:
        data = storage.read(key)
    except NoSuchKey as error:
        raise IncompleteCheckpoint(
            f"{where} does not exist: the save was never finished, or has been deleted. Use another checkpoint."
        ) from error
    manifest = decode(data, where)
    named = parse_save_folder(prefix.rsplit("/", 1)[-1])
    if named is not None and named != (manifest.step, manifest.save_id):
        raise CorruptCheckpoint(
            f"{where} is the manifest of step {manifest.step}, save {manifest.save_id!r}, not of its folder's. It was "
            "put there by mistake; use another checkpoint."
        )
    return Checkpoint(storage, prefix, manifest, BoxIndex(manifest))
