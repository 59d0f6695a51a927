"""The `.metadata` of a `torch.distributed.checkpoint` folder, read without torch and without trust.

The file is a pickle. It is read with stand-ins for the classes that torch 2.4 to 2.13 write there. Every value is
checked before use.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysharded.checkpoint.format.manifest import SAFETENSORS_DTYPES
from raysharded.checkpoint.format.paths import is_inside
from raysharded.checkpoint.interop.dcp.pickles import Refused, fields_of, load, record
from raysharded.checkpoint.state_dict.tree import Path
from raysharded.errors import CheckpointError, CorruptCheckpoint

METADATA_NAME = ".metadata"

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = (
    "Metadata",
    "TensorStorageMetadata",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "TensorProperties",
    "MetadataIndex",
    "StorageMeta",
)
_OTHER_DTYPES = (
    "complex32",
    "complex128",
    "float8_e4m3fnuz",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
    "qint8",
    "quint8",
    "qint32",
)
"""Dtypes that the raysharded format lacks, known so that errors can name them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """Bytes `start` to `start + length` of a file, which hold one tensor or value as `torch.save` writes it."""

    path: str
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A box of a tensor, and the item that holds it."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item


@dataclass(frozen=True, kw_only=True, slots=True)
class Tensor:
    """A tensor and the boxes that make it up, none of them empty."""

    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Metadata:
    """A DCP checkpoint's table of contents."""

    keys: tuple[str, ...]
    """All keys, in order."""
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Item]
    """Values other than tensors (numbers, lists, ...), pickled by `torch.save`."""
    paths: Mapping[str, Path] | None
    """Path of each key in the nested state; None if paths were not written."""


class _Wrong(Exception):
    """A field is missing or invalid."""


def parse(data: bytes, where: str) -> Metadata:
    """The table of contents in the bytes of a `.metadata` file. `where` names the file in errors.

    Raises CheckpointError for names that do not belong there and for dtypes that the raysharded format lacks. Raises
    CorruptCheckpoint for anything that differs from what torch writes.
    """
    found = fields_of(load(data, _stand_ins(), where))
    try:
        return _metadata(found)
    except _Wrong as wrong:
        raise CorruptCheckpoint(f"{where}: {wrong}. It is damaged, or was not written by torch 2.4 or newer.") from None


def _stand_ins() -> dict[tuple[str, str], Any]:
    """Stand-ins for the classes and functions that a `.metadata` names.

    They are new for every file, which might change them.
    """

    def ignored(*_arguments: Any) -> None:
        """Discard what is not needed: the layout, the memory format, the folder's former place."""

    def member(owner: object, _name: object) -> None:
        """A member of the memory format's enumeration, as Python 3.11.0 to 3.11.3 pickles it."""
        if owner is not ignored:
            raise Refused("builtins.getattr")

    found: dict[tuple[str, str], Any] = {(_METADATA, name): record(name) for name in _RECORDS}
    found[_METADATA, "_MEM_FORMAT_ENCODING"] = ignored
    found["builtins", "getattr"] = member
    found["torch.distributed.checkpoint.filesystem", "_StorageInfo"] = record("_StorageInfo")
    found["torch.serialization", "_get_layout"] = ignored
    found["torch", "Size"] = tuple
    found |= {("torch", name): _Dtype(name) for name in (*SAFETENSORS_DTYPES, *_OTHER_DTYPES)}
    found["collections", "OrderedDict"] = OrderedDict
    for module in ("pathlib", "pathlib._local"):
        found |= {(module, name): ignored for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")}
    return found


class _Dtype(str):
    """A dtype's name. A separate class, so that plain text is not mistaken for a dtype."""

    __slots__ = ()


def _metadata(found: dict[str, Any]) -> Metadata:
    entries, places = found.get("state_dict_metadata"), found.get("storage_data")
    if not isinstance(entries, dict) or not isinstance(places, dict):
        raise _Wrong("it has no state_dict_metadata or no storage_data")
    items = dict(_placed(index, info) for index, info in places.items())
    tensors: dict[str, Tensor] = {}
    values: dict[str, Item] = {}
    for key, entry in entries.items():
        if type(key) is not str:
            raise _Wrong("a key is not text")
        if type(entry).__name__ == "TensorStorageMetadata":
            tensors[key] = _tensor(key, fields_of(entry), items)
        elif type(entry).__name__ == "BytesStorageMetadata":
            values[key] = _item_of(items, key, None)
        else:
            raise _Wrong(f"{key!r} is neither a tensor nor a value")
    paths = _paths(found.get("planner_data"), entries)
    return Metadata(keys=tuple(entries), tensors=tensors, values=values, paths=paths)


def _placed(index: Any, info: Any) -> tuple[tuple[str, tuple[int, ...] | None], Item]:
    """One entry of `storage_data` as ((key, offsets), item)."""
    at, place = fields_of(index), fields_of(info)
    key, offsets = at.get("fqn"), at.get("offset")
    path, start, length = place.get("relative_path"), place.get("offset"), place.get("length")
    if type(key) is not str or type(path) is not str:
        raise _Wrong("an entry of storage_data names no key or no file")
    if place.get("transform_descriptors"):
        raise _Wrong(f"{key!r} was written through a transforming extension, which cannot be undone here")
    if not is_inside(path):
        raise _Wrong(f"{key!r} is recorded in {path!r}, outside the folder")
    if start is None or length is None or not _whole(start) or not _whole(length):
        raise _Wrong(f"{key!r} has no valid byte range in {path!r}")
    return (key, None if offsets is None else _numbers(offsets, key)), Item(path=path, start=start, length=length)


def _tensor(key: str, fields: dict[str, Any], items: Mapping[tuple[str, tuple[int, ...] | None], Item]) -> Tensor:
    shape = _numbers(fields.get("size"), key)
    properties = getattr(fields.get("properties"), "state", None)
    dtype = properties[0] if type(properties) is tuple and properties else None
    if not isinstance(dtype, _Dtype):
        raise _Wrong(f"{key!r} has no dtype")
    if dtype not in SAFETENSORS_DTYPES:
        raise CheckpointError(
            f"tensor {key!r} has dtype {dtype}, which is not supported (supported: "
            f"{', '.join(SAFETENSORS_DTYPES)}). Convert it, or leave it out."
        )
    chunks: dict[tuple[int, ...], Chunk] = {}
    listed = fields.get("chunks")
    for chunk in listed if type(listed) is list else []:
        at = fields_of(chunk)
        offsets, sizes = _numbers(at.get("offsets"), key), _numbers(at.get("sizes"), key)
        if len(offsets) != len(shape) or any(o + n > m for o, n, m in zip(offsets, sizes, shape, strict=True)):
            raise _Wrong(f"{key!r} of shape {shape} has a chunk at {offsets} of {sizes}")
        if 0 not in sizes:
            chunks[offsets] = Chunk(offsets=offsets, sizes=sizes, item=_item_of(items, key, offsets))
    if sum(math.prod(chunk.sizes) for chunk in chunks.values()) != math.prod(shape):
        raise _Wrong(f"the {len(chunks)} chunks of {key!r} do not make up its shape {shape}")
    return Tensor(dtype=str(dtype), shape=shape, chunks=tuple(chunks.values()))


def _item_of(
    items: Mapping[tuple[str, tuple[int, ...] | None], Item], key: str, offsets: tuple[int, ...] | None
) -> Item:
    found = items.get((key, offsets))
    if found is None:
        raise _Wrong(f"{key!r}{'' if offsets is None else f' at {offsets}'} has no place in storage_data")
    return found


def _paths(planner_data: Any, keys: Mapping[str, Any]) -> dict[str, Path] | None:
    """The default planner's mapping, if it covers all keys."""
    if not isinstance(planner_data, dict) or any(key not in planner_data for key in keys):
        return None
    found: dict[str, Path] = {}
    for key in keys:
        path = planner_data[key]
        if type(path) is not tuple or not path or any(type(part) is not str and not _whole(part) for part in path):
            return None
        found[key] = path
    return found


def _numbers(value: Any, key: str) -> tuple[int, ...]:
    if type(value) is not tuple or not all(_whole(n) for n in value):
        raise _Wrong(f"{key!r} has an offset or a size that is not made of whole numbers")
    return value


def _whole(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 60
