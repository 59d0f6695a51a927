"""Contents of a checkpoint: tensors, their files, the place of every box, and a digest of every chunk. Pure.

Tensors have the element types of format version 1. `docs/format.md` describes the format; this module has its values
and their invariants (`check`). `encoding` turns them into bytes and back.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raysharded.checkpoint.format.boxes import BoxTable, Int32, Int64, joined, padded
from raysharded.checkpoint.format.limits import (
    MAX_CELLS,
    MAX_CHUNK_BYTES,
    MAX_CHUNKS,
    MAX_DEPTH,
    MAX_DIMS,
    MAX_FILES,
    MAX_TENSOR_BYTES,
    MAX_TENSORS,
    MAX_TEXT,
)
from raysharded.checkpoint.format.paths import is_own, is_usable, parse_save_folder, save_folder
from raysharded.checkpoint.format.tiling import TooIrregular, first_fault
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint

SAFETENSORS_DTYPES: dict[str, tuple[str, int]] = {
    "bool": ("BOOL", 1),
    "uint8": ("U8", 1),
    "int8": ("I8", 1),
    "uint16": ("U16", 2),
    "int16": ("I16", 2),
    "uint32": ("U32", 4),
    "int32": ("I32", 4),
    "uint64": ("U64", 8),
    "int64": ("I64", 8),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float32": ("F32", 4),
    "float64": ("F64", 8),
    "complex64": ("C64", 8),
}
"""Map from a dtype, torch's name without `torch.`, to (safetensors code, bytes per element)."""


VERSION = 2
"""Format version that is written; version 1 is read too."""
READABLE_VERSIONS = (1, 2)
DIGEST_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """A tensor of the global state."""

    dtype: str
    """Element type, torch's name without `torch.`: "float32", "bfloat16", ..."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one element."""
        return SAFETENSORS_DTYPES[self.dtype][1]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """One data file. Chunk i is its bytes from i * chunk_size_bytes on; the last chunk may be shorter."""

    path: str
    """Path relative to the checkpoint's folder."""
    size_bytes: int
    """Bytes of the whole file, header included."""
    chunk_size_bytes: int
    """Bytes of every chunk but the last."""
    digests: bytes = b""
    """BLAKE3 digests of all chunks, 32 bytes each; empty if they are in a table."""
    digest_table: str = ""
    """BLAKE3 of the table, the file `<path>.b3` that holds the digests one after the other; empty if there is none."""
    boxes: BoxTable
    """Boxes in the file, and their positions."""

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the file."""
        return -(-self.size_bytes // self.chunk_size_bytes)

    @property
    def table_path(self) -> str:
        """Path of the table of digests, if there is one."""
        return f"{self.path}.b3"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """A whole checkpoint. Its existence in storage makes the checkpoint real."""

    run: str
    """Name of the run."""
    step: int
    """Optimizer step after which the checkpoint was saved; 0 is before the first."""
    generation: int
    """Number of the membership that wrote the checkpoint; it only grows."""
    save_id: str
    """Id that distinguishes the save from others of the step."""
    writer: str
    """Name of the writer that committed the checkpoint."""
    created_at: float
    """Time in seconds since the Unix epoch, for people."""
    tensors: Mapping[str, TensorInfo]
    """Tensors by name."""
    files: tuple[FileRecord, ...]
    """Data files."""
    tree: Any = None
    """Nested state that the tensors make up, as anything that JSON can hold; None: no nesting."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Position of the run in its data."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Metadata that JSON can hold: seed, fingerprint, metrics, ..."""
    version: int = VERSION
    """Format version; see docs/format.md."""

    def boxes(self) -> tuple[Int32, BoxTable]:
        """(the number of each box's file, all boxes). Tensors are numbered in the order of `tensors`.

        Raises KeyError for a box of a tensor that is not in `tensors`.
        """
        width = max((len(info.shape) for info in self.tensors.values()), default=0)
        return joined([file.boxes for file in self.files], tuple(self.tensors), width)


BAD_WRITER = "Its writer does not follow the format; resume from another checkpoint."


def shown(value: object) -> str:
    """Short text of any value, for messages."""
    try:
        return reprlib.repr(value)
    except ValueError:  # a whole number with more digits than Python writes
        return f"a {type(value).__qualname__} too long to show"


def check(manifest: Manifest, where: str) -> None:
    """Check that every element of every tensor is stored exactly once, inside its file. Raises as `decode`."""
    if manifest.version not in READABLE_VERSIONS:
        raise CheckpointError(f"{where}: version {manifest.version}; this raysharded reads {READABLE_VERSIONS}.")
    check_tensors(manifest, where)
    _check_files(manifest, where)
    try:
        file, boxes = manifest.boxes()
    except KeyError as error:
        raise CorruptCheckpoint(f"{where}: there is a box of unknown tensor {error}. {BAD_WRITER}") from None
    _check_boxes(manifest, file, boxes, where)
    _check_tiling(manifest, boxes, where)


def check_tensors(manifest: Manifest, where: str) -> None:
    """The part of `check` that needs no files: numbers, texts, and the tensors' dtypes and shapes."""
    _check_counts(manifest, where)
    _check_texts(manifest, where)
    _check_tensors(manifest, where)


def _check_counts(manifest: Manifest, where: str) -> None:
    tensors, files = len(manifest.tensors), len(manifest.files)
    boxes = sum(len(file.boxes) for file in manifest.files)
    width = max([2, *(len(t.shape) for t in manifest.tensors.values()), *(f.boxes.width for f in manifest.files)])
    if tensors > MAX_TENSORS or files > MAX_FILES or max(tensors, boxes) * width > MAX_CELLS:
        raise CorruptCheckpoint(
            f"{where}: {tensors} tensors of up to {width} dimensions in {boxes} boxes in {files} files are more than a "
            f"reader takes ({MAX_TENSORS} tensors, {MAX_FILES} files, {MAX_CELLS} dimensions in all). Save with fewer "
            "writers, or fewer and larger tensors."
        )


def _check_texts(manifest: Manifest, where: str) -> None:
    if parse_save_folder(save_folder(manifest.step, manifest.save_id)) != (manifest.step, manifest.save_id):
        raise CorruptCheckpoint(f"{where}: step={manifest.step}, save_id={shown(manifest.save_id)} name no save.")
    for text in (manifest.run, manifest.writer, *manifest.tensors):
        if not is_text(text):
            raise CorruptCheckpoint(
                f"{where}: {shown(text)} ({len(text)} characters) is not Unicode text of at most {MAX_TEXT} characters."
            )
    for name, value in (("tree", manifest.tree), ("data", manifest.data), ("metadata", manifest.metadata)):
        if _is_deeper(value, MAX_DEPTH):
            raise CorruptCheckpoint(f"{where}: {name} has more than {MAX_DEPTH} arrays and objects in one another.")


def _check_tensors(manifest: Manifest, where: str) -> None:
    for name, info in manifest.tensors.items():
        if info.dtype not in SAFETENSORS_DTYPES or len(info.shape) > MAX_DIMS or any(n < 0 for n in info.shape):
            raise CorruptCheckpoint(
                f"{where}: tensor {name!r} has dtype {shown(info.dtype)} and shape {shown(info.shape)}."
            )
        if math.prod(max(n, 1) for n in info.shape) * info.item_bytes > MAX_TENSOR_BYTES:
            raise CorruptCheckpoint(f"{where}: tensor {name!r} of shape {info.shape} is larger than 2^60 bytes.")


def _check_files(manifest: Manifest, where: str) -> None:
    folder = save_folder(manifest.step, manifest.save_id)
    paths: set[str] = set()
    for file in manifest.files:
        if not is_usable(file.path) or not is_own(file.path, folder):
            raise CorruptCheckpoint(
                f"{where}: file {shown(file.path)} is not inside the checkpoint's folder. {BAD_WRITER}"
            )
        if file.path in paths:
            raise CorruptCheckpoint(f"{where}: file {file.path!r} is listed twice. {BAD_WRITER}")
        paths.add(file.path)
        good = 0 <= file.size_bytes <= MAX_TENSOR_BYTES and 1 <= file.chunk_size_bytes <= MAX_CHUNK_BYTES
        if not good or file.num_chunks > MAX_CHUNKS:
            raise CorruptCheckpoint(
                f"{where}: file {file.path!r} has size {file.size_bytes} and chunks of {file.chunk_size_bytes} bytes; "
                f"at most {MAX_CHUNKS} of {MAX_CHUNK_BYTES} are allowed."
            )
        if not file.digest_table and len(file.digests) != file.num_chunks * DIGEST_BYTES:
            raise IncompleteCheckpoint(
                f"{where}: file {file.path!r} has {file.num_chunks} chunks but {len(file.digests) // DIGEST_BYTES} "
                f"digests. {BAD_WRITER}"
            )


def _check_boxes(manifest: Manifest, file: Int32, boxes: BoxTable, where: str) -> None:
    """Check that every box is inside its tensor, and its bytes inside its file and apart from other boxes."""
    infos = list(manifest.tensors.values())
    width = boxes.sizes.shape[1]
    shapes = padded([info.shape for info in infos], width, 1)
    dims = np.array([len(info.shape) for info in infos], np.int32)
    of_tensor = shapes[boxes.tensor]
    within = (boxes.ndim == dims[boxes.tensor]) & (
        (boxes.offsets >= 0) & (boxes.sizes >= 1) & (boxes.offsets < of_tensor)
    ).all(axis=1)
    within &= (boxes.sizes <= of_tensor - np.minimum(boxes.offsets, of_tensor)).all(axis=1)
    if not within.all():
        box = boxes[int(np.argmin(within))]
        info = manifest.tensors[box.name]
        raise CorruptCheckpoint(f"{where}: {box} is outside its tensor of shape {info.shape}. {BAD_WRITER}")
    _check_places(manifest, file, boxes, where)


def _check_places(manifest: Manifest, file: Int32, boxes: BoxTable, where: str) -> None:
    item_bytes = np.array([info.item_bytes for info in manifest.tensors.values()], np.int64)
    num_bytes: Int64 = boxes.sizes.prod(axis=1) * item_bytes[boxes.tensor]
    file_bytes = np.array([f.size_bytes for f in manifest.files], np.int64)[file]
    good = (boxes.start >= 0) & (boxes.start <= file_bytes - num_bytes)
    order = np.lexsort((boxes.start, file))
    stop = (boxes.start + np.where(good, num_bytes, 0))[order]
    apart = (boxes.start[order][1:] >= stop[:-1]) | (file[order][1:] != file[order][:-1])
    good[order[1:][~apart]] = False
    if not good.all():
        row = int(np.argmin(good))
        named = manifest.files[int(file[row])]
        raise CorruptCheckpoint(
            f"{where}: the {num_bytes[row]} bytes of {boxes[row]} in file {named.path!r} ({named.size_bytes} bytes) "
            f"lie outside the file or in another box. {BAD_WRITER}"
        )


def _check_tiling(manifest: Manifest, boxes: BoxTable, where: str) -> None:
    shapes = [info.shape for info in manifest.tensors.values()]
    try:
        found = first_fault(boxes, shapes)
    except TooIrregular as error:
        raise CorruptCheckpoint(f"{where}: a tensor is cut too irregularly: {error}. {BAD_WRITER}") from None
    if found is None:
        return
    number, (kind, cell) = found
    name, count = list(manifest.tensors)[number], int((boxes.tensor == number).sum())
    if kind == "missing":
        raise IncompleteCheckpoint(
            f"{where}: tensor {name!r} of shape {shapes[number]} is not covered by its {count} boxes; first "
            f"missing: {list(cell)}. A writer's shard was left out; resume from another checkpoint."
        )
    raise CorruptCheckpoint(f"{where}: tensor {name!r} of shape {shapes[number]} is covered twice at {list(cell)}.")


def is_text(text: str) -> bool:
    """Whether a text is short enough and can be written as UTF-8. Half of a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return len(text) <= MAX_TEXT


def _is_deeper(value: object, most: int) -> bool:
    """Whether arrays and objects are nested more than `most` deep. Does not recurse."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)
