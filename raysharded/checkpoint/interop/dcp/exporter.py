"""Export of a checkpoint to a folder that `torch.distributed.checkpoint` loads with its own FileSystemReader.

__0_<n>.distcp   items one after the other: a slab of a tensor or a value, each as `torch.save` writes it
.metadata        a pickle with the place of every item, written last. raysharded pickles nothing else.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from raysharded.checkpoint.interop.dcp.flatten import Entry, TensorEntry, ValueEntry, entries_of
from raysharded.checkpoint.interop.dcp.metadata import METADATA_NAME
from raysharded.checkpoint.interop.dcp.torch_bytes import saved, tensor_of, value_of
from raysharded.checkpoint.interop.locations import Place, refuse_existing, undone_on_error
from raysharded.checkpoint.interop.names import chosen
from raysharded.checkpoint.interop.results import Exported
from raysharded.checkpoint.interop.slabs import Extent, Progress, Slab, cut, read_slabs
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.state_dict.staging import torch_dtype

DCP_SLAB_BYTES = 32 << 20
DCP_FILE_BYTES = 2 << 30


def export_dcp(
    checkpoint: Checkpoint,
    dest: Place,
    *,
    names: tuple[str, ...] = (),
    progress: Progress = lambda _: None,
    slab_bytes: int = DCP_SLAB_BYTES,
    file_bytes: int = DCP_FILE_BYTES,
) -> Exported:
    """Write the checkpoint into the folder `dest`, through a few slabs of memory.

    `names`: patterns of the keys to export (such as `model.*`), all by default. Keys and nesting follow torch's
    `flatten_state_dict`. Data files that an interrupted export left without a `.metadata` are overwritten.

    Raises CheckpointError if `dest` already has a `.metadata`, CorruptCheckpoint for damage in the source, StorageError
    if storage fails. On an error the written files are removed, if storage permits it, and `dest` cannot be loaded.
    """
    entries = _chosen(entries_of(checkpoint.manifest), names)
    refuse_existing(dest, [METADATA_NAME])
    storage, _ = dest
    written: list[_File] = []
    with undone_on_error(dest) as begun:
        for number, items in enumerate(_files(checkpoint, entries, slab_bytes, file_bytes)):
            file = _File(checkpoint, f"__0_{number}.distcp", items, slab_bytes, progress)
            storage.write(begun(file.path), file)
            written.append(file)
        metadata = _metadata(checkpoint, entries, written)
        storage.write(begun(METADATA_NAME), [pickle.dumps(metadata)])
    tensors = [entry.name for entry in entries if isinstance(entry, TensorEntry)]
    return Exported(
        files=(*(file.path for file in written), METADATA_NAME),
        num_tensors=len(tensors),
        size_bytes=sum(checkpoint.manifest.tensors[name].size_bytes for name in tensors),
    )


@dataclass(frozen=True, slots=True)
class _Item:
    """One thing to write: a value, or a slab of a tensor."""

    entry: Entry
    extent: Extent | None


def _chosen(entries: list[Entry], patterns: tuple[str, ...]) -> list[Entry]:
    wanted = set(chosen([entry.key for entry in entries], patterns))
    return [entry for entry in entries if entry.key in wanted]


def _files(checkpoint: Checkpoint, entries: list[Entry], slab_bytes: int, file_bytes: int) -> Iterator[list[_Item]]:
    """The items of each file, about `file_bytes` in total."""
    items: list[_Item] = []
    held = 0
    for item in _items(checkpoint, entries, slab_bytes):
        if items and held >= file_bytes:
            yield items
            items, held = [], 0
        items.append(item)
        held += _data_bytes(checkpoint, item)
    if items:
        yield items


def _items(checkpoint: Checkpoint, entries: list[Entry], slab_bytes: int) -> Iterator[_Item]:
    for entry in entries:
        if isinstance(entry, ValueEntry) or entry.as_number:
            yield _Item(entry, None)
            continue
        info = checkpoint.manifest.tensors[entry.name]
        for extent in cut(info.shape, info.item_bytes, slab_bytes):
            yield _Item(entry, extent)


def _data_bytes(checkpoint: Checkpoint, item: _Item) -> int:
    if item.extent is None or isinstance(item.entry, ValueEntry):
        return 0
    return math.prod(item.extent[1]) * checkpoint.manifest.tensors[item.entry.name].item_bytes


@dataclass(frozen=True, slots=True)
class _Place:
    """Position of an item in its file."""

    item: _Item
    start: int
    length: int


@dataclass(slots=True)
class _File:
    """A data file as parts that are made during the write.

    The last complete pass fills `places`.
    """

    checkpoint: Checkpoint
    path: str
    items: list[_Item]
    slab_bytes: int
    progress: Progress
    places: list[_Place] = field(default_factory=list)

    def __iter__(self) -> Iterator[bytes]:
        wanted = [
            (item.entry.name, item.extent)
            for item in self.items
            if isinstance(item.entry, TensorEntry) and item.extent is not None
        ]
        slabs = read_slabs(self.checkpoint, wanted, self.slab_bytes)
        places: list[_Place] = []
        at = 0
        for item in self.items:
            slab = None if item.extent is None else next(slabs)
            data = saved(value_of(self.checkpoint, item.entry) if slab is None else _tensor(slab))
            places.append(_Place(item, at, len(data)))
            at += len(data)
            self.progress(0 if slab is None else len(slab.data))
            yield data
        self.places = places


def _tensor(slab: Slab) -> torch.Tensor:
    return tensor_of(slab.data, slab.info.dtype, slab.sizes)


def _metadata(checkpoint: Checkpoint, entries: list[Entry], files: list[_File]) -> Metadata:
    found: dict[str, Any] = {entry.key: _described(checkpoint, entry) for entry in entries}
    storage_data: dict[MetadataIndex, _StorageInfo] = {}
    for file in files:
        for place in file.places:
            key = place.item.entry.key
            index = MetadataIndex(key)
            if place.item.extent is not None:
                offsets, sizes = map(torch.Size, place.item.extent)
                index = MetadataIndex(key, offsets, len(found[key].chunks))
                found[key].chunks.append(ChunkStorageMetadata(offsets=offsets, sizes=sizes))
            storage_data[index] = _StorageInfo(file.path, place.start, place.length)
    return Metadata(
        state_dict_metadata=found,
        planner_data={entry.key: entry.path for entry in entries},
        storage_data=storage_data,
        version="1.0.0",
    )


def _described(checkpoint: Checkpoint, entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(entry, ValueEntry) or entry.as_number:
        return BytesStorageMetadata()
    info = checkpoint.manifest.tensors[entry.name]
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(info.dtype)), torch.Size(info.shape), [])
