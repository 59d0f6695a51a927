"""What a checkpoint is: tensors, the files that hold them, which box is where, and a digest of every chunk.

Pure. `docs/format.md` is the format's description; here are its values and what must hold among them (`check`).
`encoding` turns them into bytes and back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raysharded.checkpoint.coverage import Extent, find_fault, is_within
from raysharded.checkpoint.dtypes import SAFETENSORS_DTYPES
from raysharded.checkpoint.paths import is_inside
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint

VERSION = 1
CHUNK_SIZE_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A tensor of the global state."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        return SAFETENSORS_DTYPES[self.dtype][1]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FileBox:
    """A hyper-rectangle of one tensor, in C order from byte `start` of its file on."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One data file. Chunk i is its bytes from i * chunk_size_bytes on; the last chunk may be shorter."""

    path: str
    """Relative to the checkpoint's folder."""
    size_bytes: int
    chunk_size_bytes: int
    digests: tuple[str, ...]
    """BLAKE3 of every chunk: 64 hexadecimal digits."""
    boxes: tuple[FileBox, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A whole checkpoint. Its existence in storage makes the checkpoint real."""

    run: str
    step: int
    generation: int
    save_id: str
    writer: str
    """Who committed it."""
    created_at: float
    """Seconds since the Unix epoch, for people to read."""
    tensors: Mapping[str, TensorInfo]
    files: tuple[FileRecord, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Anything JSON can hold: seed, data position, fingerprint, ..."""
    version: int = VERSION


BAD_WRITER = "What wrote it does not follow the format; resume from another checkpoint."


def check(manifest: Manifest, where: str) -> None:
    """Every box of every tensor is in exactly one place, and every place is inside its file. Raises as `decode`."""
    if manifest.version != VERSION:
        raise CheckpointError(f"{where}: version {manifest.version}; this raysharded knows version {VERSION} alone.")
    for name, info in manifest.tensors.items():
        if info.dtype not in SAFETENSORS_DTYPES or any(n < 0 for n in info.shape):
            raise CorruptCheckpoint(f"{where}: tensor {name!r} has dtype {info.dtype!r} and shape {info.shape}.")
    extents: dict[str, list[Extent]] = {name: [] for name in manifest.tensors}
    paths: set[str] = set()
    for file in manifest.files:
        _check_file(file, where)
        if file.path in paths:
            raise CorruptCheckpoint(f"{where}: file {file.path!r} is listed twice. {BAD_WRITER}")
        paths.add(file.path)
        _check_boxes(file, manifest.tensors, extents, where)
    for name, info in manifest.tensors.items():
        _check_coverage(name, info, extents[name], where)


def _check_file(file: FileRecord, where: str) -> None:
    if not is_inside(file.path):
        raise CorruptCheckpoint(f"{where}: file {file.path!r} is not inside the checkpoint's folder. {BAD_WRITER}")
    if file.size_bytes < 0 or file.chunk_size_bytes < 1:
        raise CorruptCheckpoint(
            f"{where}: file {file.path!r} has size {file.size_bytes} and chunks of {file.chunk_size_bytes} bytes."
        )
    num_chunks = -(-file.size_bytes // file.chunk_size_bytes)
    if len(file.digests) != num_chunks:
        raise IncompleteCheckpoint(
            f"{where}: file {file.path!r} has {num_chunks} chunks but {len(file.digests)} digests. {BAD_WRITER}"
        )


def _check_boxes(
    file: FileRecord, tensors: Mapping[str, TensorInfo], extents: dict[str, list[Extent]], where: str
) -> None:
    """Every box is inside its tensor, and its bytes inside the file and apart from the others'; fills `extents`."""
    at = 0
    for box in sorted(file.boxes, key=lambda box: box.start):
        info = tensors.get(box.name)
        if info is None:
            raise CorruptCheckpoint(f"{where}: file {file.path!r} has a box of unknown tensor {box.name!r}.")
        extent = (box.offsets, box.sizes)
        if not is_within(info.shape, extent):
            raise CorruptCheckpoint(f"{where}: {box} in file {file.path!r} is outside its tensor of {info.shape}.")
        stop = box.start + math.prod(box.sizes) * info.item_bytes
        if box.start < at or stop > file.size_bytes:
            raise CorruptCheckpoint(
                f"{where}: bytes {box.start}..{stop} of {box} in file {file.path!r} ({file.size_bytes} bytes) lie "
                "outside the file or in another box."
            )
        at = stop
        extents[box.name].append(extent)


def _check_coverage(name: str, info: TensorInfo, extents: Sequence[Extent], where: str) -> None:
    fault = find_fault(info.shape, extents)
    if fault is None:
        return
    kind, cell = fault
    if kind == "missing":
        raise IncompleteCheckpoint(
            f"{where}: tensor {name!r} of shape {info.shape} is not covered by its {len(extents)} boxes; first "
            f"missing: {list(cell)}. A writer's shard was left out; resume from another checkpoint."
        )
    raise CorruptCheckpoint(f"{where}: tensor {name!r} of shape {info.shape} is covered twice at {list(cell)}.")
