"""Reading a checkpoint at any number of workers: each requests its boxes, and only their bytes are read.

Bytes come in chunks, and every chunk is checked against its digest whenever it is read. Two boxes may share a chunk:
request all boxes of a worker in one `read_many`, which reads and checks each chunk once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from raysharded.checkpoint.byte_ranges import BoxIndex, Bytes, Piece
from raysharded.checkpoint.chunk_reader import DataFiles
from raysharded.checkpoint.format.encoding import ForeignManifest, decode, digest_of, is_signed
from raysharded.checkpoint.format.identity import check_identity
from raysharded.checkpoint.format.limits import MAX_MANIFEST_BYTES
from raysharded.checkpoint.format.manifest import Manifest, TensorInfo
from raysharded.checkpoint.format.paths import MANIFEST_NAME, is_data, is_replaced, key_of, replaced_name
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.format.tiling import is_within
from raysharded.checkpoint.storage import NoSuchKey, NotAFile, Storage
from raysharded.checkpoint.storage.small_objects import intact_on_disk, read_small
from raysharded.display.quantities import count
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, NoCheckpoint
from raysharded.locations import join_url

Request = tuple[str, Sequence[int], Sequence[int], memoryview | Bytes]
"""(tensor, offsets, sizes, destination): a writable, contiguous buffer of exactly the box's bytes."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A committed checkpoint whose manifest has been validated. Thread-safe."""

    storage: Storage
    """Storage that holds the checkpoint."""
    prefix: str
    """Folder of the checkpoint in the storage."""
    manifest: Manifest
    """The manifest: everything that is known without reading data."""
    digest: str
    """Digest of the manifest, which covers every byte of the checkpoint."""
    signed: bool
    """Whether the manifest carries a signature. It was checked if there was a key."""
    _index: BoxIndex
    _files: DataFiles

    @property
    def step(self) -> int:
        """Optimizer step after which the checkpoint was saved."""
        return self.manifest.step

    @property
    def tensors(self) -> dict[str, TensorInfo]:
        """dtype and global shape of every tensor."""
        return dict(self.manifest.tensors)

    def read(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> Bytes:
        """The box's bytes in C order, as a new flat array. Raises as `read_many`."""
        size_bytes = self._size_bytes(name, offsets, sizes)
        try:
            out = np.empty(size_bytes, np.uint8)
        except MemoryError as error:
            raise CheckpointError(f"tensor {name!r}: {list(sizes)} is {size_bytes} bytes: more than fits.") from error
        self.read_into(name, offsets, sizes, out)
        return out

    def read_into(self, name: str, offsets: Sequence[int], sizes: Sequence[int], out: memoryview | Bytes) -> None:
        """Read the box's bytes in C order into `out`. Raises as `read_many`."""
        self.read_many([(name, offsets, sizes, out)])

    def read_many(self, requests: Iterable[Request]) -> int:
        """Fill the buffers of all requests. Every chunk that any of them needs is read and checked once.

        Returns the number of bytes read from storage, including the rest of the chunks at the boxes' edges. Empty boxes
        are allowed; buffers must not overlap.

        Raises CheckpointError, before reading anything, for an unknown tensor, a box outside it or a buffer of the
        wrong size. Raises CorruptCheckpoint or IncompleteCheckpoint naming the file and the chunk; the buffers'
        contents are then undefined.
        """
        pieces = [piece for request in requests for piece in self._pieces(request)]
        return self._files.fetch(pieces) if pieces else 0

    def find_damage(self, progress: Callable[[int], None] = lambda _: None) -> list[CheckpointError]:
        """Read every byte; one error for every missing or changed part. Calls `progress(bytes read)`."""
        return self._files.find_damage(progress)

    def verify(self) -> None:
        """Read every byte; raise the first CorruptCheckpoint or IncompleteCheckpoint, with the number that follow."""
        damage = self.find_damage()
        if damage:
            more = f" ({count(len(damage) - 1, 'further damaged part')}.)" if len(damage) > 1 else ""
            raise type(damage[0])(f"{damage[0]}{more}")

    def _info(self, name: str) -> TensorInfo:
        info = self.manifest.tensors.get(name)
        if info is None:
            raise CheckpointError(
                f"step {self.step} under {join_url(self.storage.url, self.prefix)} has no tensor {name!r} among its "
                f"{len(self.manifest.tensors)}. Was it saved by another model or optimizer?"
            )
        return info

    def _size_bytes(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> int:
        """Bytes of a box, which may be empty. Raises CheckpointError if the box is not inside the tensor."""
        info = self._info(name)
        empty = 0 in sizes and min(sizes) == 0 and len(offsets) == len(sizes) == len(info.shape)
        if not empty and not is_within(info.shape, (tuple(offsets), tuple(sizes))):
            raise CheckpointError(
                f"tensor {name!r} has shape {info.shape}; the box at {list(offsets)} of {list(sizes)} is outside it."
            )
        return math.prod(sizes) * info.item_bytes

    def _pieces(self, request: Request) -> Iterator[Piece]:
        name, offsets, sizes, out = request
        expected = self._size_bytes(name, offsets, sizes)
        view = out.data if isinstance(out, np.ndarray) else out
        if view.nbytes != expected or view.readonly or not view.c_contiguous:
            raise CheckpointError(
                f"tensor {name!r}: {list(sizes)} of {self._info(name).dtype} needs a writable, contiguous buffer of "
                f"{expected} bytes; this one has {view.nbytes}, readonly={view.readonly}, "
                f"contiguous={view.c_contiguous}."
            )
        if expected:
            yield from self._index.pieces(name, offsets, sizes, np.frombuffer(view.cast("B"), np.uint8))


def open_checkpoint(
    storage: Storage, prefix: str, *, key: SigningKey | None = None, digest: str | None = None
) -> Checkpoint:
    """The checkpoint in the folder `prefix` of `storage`, its manifest validated; no data is read yet.

    With a `key`, a manifest that was not signed with it is rejected, and so is a signed one of another run or step than
    its folder's (`identity.check_identity`). With a `digest`, only the manifest of that digest is accepted. It may have
    been replaced since, as long as the files it needs exist. Raises NoCheckpoint if the save was never committed,
    IncompleteCheckpoint if its index is missing, CorruptCheckpoint if the manifest is damaged, rejected, or of another
    save. Raises ForeignManifest, a CorruptCheckpoint, for another program's file in a folder without a checkpoint's
    data.
    """
    at = key_of(prefix, MANIFEST_NAME)
    where = f"{join_url(storage.url, at)}"
    data = _read_manifest(storage, at, where)
    if digest is not None and digest_of(data) != digest:
        replaced = _read_replaced(storage, prefix, digest)
        if replaced is None:
            raise CorruptCheckpoint(
                f"{where} has digest {digest_of(data)!r}, expected {digest!r}: it is not the checkpoint that was meant."
            )
        data = replaced
    try:
        manifest = decode(
            data,
            where,
            folder=prefix.rpartition("/")[2],
            key=key,
            read_index=lambda path, size: _read_index(storage, prefix, path, size),
        )
        if key is not None:
            check_identity(manifest, join_url(storage.url, prefix))
    except ForeignManifest as error:
        if not any(is_data(one, prefix) for one in storage.list(prefix)):
            raise
        raise CorruptCheckpoint(f"{error} It replaced the manifest of the checkpoint whose data are there.") from None
    files = DataFiles(storage, prefix, manifest.files)
    return Checkpoint(storage, prefix, manifest, digest_of(data), is_signed(data), BoxIndex(manifest), files)


def _read_manifest(storage: Storage, at: str, where: str) -> bytes:
    try:
        with intact_on_disk(storage, where):
            size = storage.size(at)
            if size > MAX_MANIFEST_BYTES:
                raise CorruptCheckpoint(f"{where} has {size} bytes; a manifest has at most {MAX_MANIFEST_BYTES}.")
            return read_small(storage, at, MAX_MANIFEST_BYTES)
    except NotAFile as error:
        raise CorruptCheckpoint(str(error)) from error
    except NoSuchKey as error:
        raise NoCheckpoint(
            f"{where} does not exist: the folder is not a checkpoint's, or the save was never finished, or has been "
            "deleted. Use another checkpoint."
        ) from error


def _read_replaced(storage: Storage, prefix: str, digest: str) -> bytes | None:
    name = replaced_name(digest)
    if not is_replaced(name):  # a digest from a damaged file may be any text
        return None
    try:
        data = read_small(storage, key_of(prefix, name), MAX_MANIFEST_BYTES)
    except (NoSuchKey, CorruptCheckpoint):
        return None
    return data if digest_of(data) == digest else None


def _read_index(storage: Storage, prefix: str, path: str, size: int) -> bytes:
    where = f"the box index {join_url(storage.url, key_of(prefix, path))}"
    try:
        with intact_on_disk(storage, where):
            return read_small(storage, key_of(prefix, path), size)
    except NoSuchKey as error:
        raise IncompleteCheckpoint(f"{where} is missing. Use another checkpoint, or restore it.") from error
