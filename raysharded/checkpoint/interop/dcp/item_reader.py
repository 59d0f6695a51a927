"""One tensor as `torch.save` writes it (a zip archive with a small pickle and the raw bytes), read in slabs.

No code of the archive is run: stand-ins in the pickle only record dtype, shape, strides and lazy conjugation or
negation, which is applied to the elements. The bytes are checked against the archive's CRC-32.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch

from raysharded.checkpoint.byte_ranges import Bytes
from raysharded.checkpoint.format.manifest import SAFETENSORS_DTYPES
from raysharded.checkpoint.format.paths import key_of
from raysharded.checkpoint.interop.dcp.metadata import Item
from raysharded.checkpoint.interop.dcp.pickles import load
from raysharded.checkpoint.interop.slabs import SLAB_BYTES, Extent, cut
from raysharded.checkpoint.state_dict.staging import bytes_of, torch_dtype
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, RayshardedError
from raysharded.locations import join_url

_STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
}
_CONJUGATED, _NEGATED = "conj", "neg"
_MAX_PICKLE_BYTES = 1 << 20
_BUFFER_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class _Saved:
    """Description of a tensor in the archive's pickle."""

    dtype: str
    entry: str
    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    lazy: frozenset[str]
    """Operations that torch applies whenever it reads an element: any of "conj" and "neg"."""

    @property
    def is_contiguous(self) -> bool:
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return False
            expected *= size
        return True

    @property
    def last(self) -> int:
        """Index of the last element in the storage."""
        return self.offset + sum((n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True))


def read_item(storage: Storage, prefix: str, item: Item) -> bytes:
    """An item's bytes. Raises IncompleteCheckpoint if its file is missing or too short."""
    window = _Window(storage, key_of(prefix, item.path), item)
    data = bytearray(item.length)
    window.fill(0, memoryview(data))
    return bytes(data)


def tensor_slabs(
    storage: Storage, prefix: str, item: Item, dtype: str, sizes: tuple[int, ...], max_bytes: int = SLAB_BYTES
) -> Iterator[tuple[Extent, Bytes]]:
    """The tensor in `item` as ((offsets, sizes), bytes) of at most `max_bytes`, in order.

    A tensor that is not contiguous in the file is held in memory as a whole. Raises CorruptCheckpoint if dtype, sizes
    or CRC do not match, IncompleteCheckpoint if the file is missing or cut off, CheckpointError for pickles that
    request more than a tensor needs.
    """
    where = f"{join_url(storage.url, key_of(prefix, item.path))}, bytes {item.start} to {item.start + item.length}"
    try:
        with _opened(storage, prefix, item, max_bytes) as file, zipfile.ZipFile(file) as archive:
            saved = _describe(archive, where)
            if (saved.dtype, saved.sizes) != (dtype, sizes):
                raise CorruptCheckpoint(
                    f"{where}: a {saved.dtype} tensor of {saved.sizes} where the metadata has {dtype} of {sizes}. "
                    "The folder is a mixture of two checkpoints; import another."
                )
            for extent, data in _read(archive, saved, item, where, max_bytes):
                yield extent, _resolved(data, saved, where)
    except RayshardedError:
        raise
    except Exception as error:  # a broken archive may raise anything
        raise CorruptCheckpoint(
            f"{where}: not a tensor as torch.save writes it ({error}). The folder is damaged, or was written with "
            "another serialization; import another."
        ) from error


def _opened(storage: Storage, prefix: str, item: Item, max_bytes: int) -> IO[bytes]:
    """The item as a file: in memory if it is small, else read on demand."""
    if item.length <= max_bytes:
        return io.BytesIO(read_item(storage, prefix, item))
    return io.BufferedReader(_Window(storage, key_of(prefix, item.path), item), _BUFFER_BYTES)


def _read(
    archive: zipfile.ZipFile, saved: _Saved, item: Item, where: str, max_bytes: int
) -> Iterator[tuple[Extent, Bytes]]:
    item_bytes = SAFETENSORS_DTYPES[saved.dtype][1]
    entry = _entry(archive, f"data/{saved.entry}", where)
    if 0 in saved.sizes:
        return
    if (saved.last + 1) * item_bytes > entry.file_size or min(saved.strides, default=1) < 0:
        raise CorruptCheckpoint(f"{where}: the tensor reaches beyond its {entry.file_size} bytes.")
    if entry.file_size > item.length:
        raise CorruptCheckpoint(f"{where}: the archive claims to hold {entry.file_size} bytes.")
    with archive.open(entry) as file:
        if saved.is_contiguous:
            _skip(file, saved.offset * item_bytes)
            for extent in cut(saved.sizes, item_bytes, max_bytes):
                yield extent, _take(file, math.prod(extent[1]) * item_bytes)
            _skip(file, entry.file_size - (saved.last + 1) * item_bytes)  # the CRC is of all of it
            return
        whole = _take(file, entry.file_size)
    dense = _densified(saved, whole, item_bytes, where)
    at = 0
    for extent in cut(saved.sizes, item_bytes, max_bytes):
        num_bytes = math.prod(extent[1]) * item_bytes
        yield extent, dense[at : at + num_bytes]
        at += num_bytes


def _densified(saved: _Saved, whole: Bytes, item_bytes: int, where: str) -> Bytes:
    if math.prod(saved.sizes) * item_bytes > len(whole):
        raise CorruptCheckpoint(f"{where}: the tensor has more elements than its storage.")
    strides = tuple(stride * item_bytes for stride in saved.strides)
    view = np.ndarray(saved.sizes, f"V{item_bytes}", buffer=whole, offset=saved.offset * item_bytes, strides=strides)
    return np.ascontiguousarray(view).reshape(-1).view(np.uint8)


def _resolved(data: Bytes, saved: _Saved, where: str) -> Bytes:
    """Elements as their reader in torch gets them: conjugated and negated, if the tensor is."""
    if not saved.lazy:
        return data
    elements = torch.from_numpy(data).view(torch_dtype(saved.dtype))
    if _CONJUGATED in saved.lazy:
        elements = elements.conj().resolve_conj()
    if _NEGATED in saved.lazy:
        try:
            elements = elements.neg()
        except RuntimeError as error:
            raise CheckpointError(
                f"{where}: a lazily negated tensor of {saved.dtype}, which torch cannot negate. Save another one."
            ) from error
    return bytes_of(elements)


def _take(file: IO[bytes], num_bytes: int) -> Bytes:
    out = np.empty(num_bytes, np.uint8)
    view, at = out.data, 0
    while at < num_bytes:
        data = file.read(min(num_bytes - at, _BUFFER_BYTES))
        if not data:
            raise EOFError("it ends too early")
        view[at : at + len(data)] = data
        at += len(data)
    return out


def _skip(file: IO[bytes], num_bytes: int) -> None:
    while num_bytes > 0:
        data = file.read(min(num_bytes, _BUFFER_BYTES))
        if not data:
            raise EOFError("it ends too early")
        num_bytes -= len(data)


def _entry(archive: zipfile.ZipFile, name: str, where: str) -> zipfile.ZipInfo:
    """The entry `<anything>/<name>`, stored uncompressed."""
    found = [info for info in archive.infolist() if info.filename.partition("/")[2] == name]
    plain = len(found) == 1 and found[0].compress_type == zipfile.ZIP_STORED and not found[0].flag_bits & 1
    if not plain or found[0].file_size != found[0].compress_size:
        raise CorruptCheckpoint(f"{where}: the archive has no plain entry {name!r}.")
    return found[0]


def _describe(archive: zipfile.ZipFile, where: str) -> _Saved:
    entry = _entry(archive, "data.pkl", where)
    if entry.file_size > _MAX_PICKLE_BYTES:
        raise CorruptCheckpoint(f"{where}: {entry.file_size} bytes of pickle are too many for one tensor.")
    byte_order = [info for info in archive.infolist() if info.filename.partition("/")[2] == "byteorder"]
    if byte_order and archive.read(byte_order[0]) != b"little":
        raise CheckpointError(f"{where}: written on a big-endian machine, which is not supported.")
    found = load(archive.read(entry), _stand_ins(), where, _storage)
    if not isinstance(found, _Saved):
        raise CorruptCheckpoint(f"{where}: not a tensor.")
    return found


def _stand_ins() -> dict[tuple[str, str], Any]:
    def rebuild_v2(
        storage: Any, offset: Any, sizes: Any, strides: Any, _grad: Any, _hooks: Any, properties: Any = None
    ) -> _Saved:
        return _saved(storage, offset, sizes, strides, storage[0], properties)

    def rebuild_v3(
        storage: Any, offset: Any, sizes: Any, strides: Any, _grad: Any, _hooks: Any, dtype: Any, properties: Any = None
    ) -> _Saved:
        return _saved(storage, offset, sizes, strides, dtype, properties)

    def rebuild_parameter(data: Any, _grad: Any, _hooks: Any) -> Any:
        return data

    found: dict[tuple[str, str], Any] = {("torch", name): _Name(dtype) for name, dtype in _STORAGES.items()}
    found |= {("torch", name): _Name(name) for name in SAFETENSORS_DTYPES}
    found["torch.storage", "UntypedStorage"] = _Name("")
    found["torch._utils", "_rebuild_tensor_v2"] = rebuild_v2
    found["torch._utils", "_rebuild_tensor_v3"] = rebuild_v3
    found["torch._utils", "_rebuild_parameter"] = rebuild_parameter
    found["collections", "OrderedDict"] = OrderedDict
    return found


class _Name(str):
    """A dtype's name, as a stand-in for the dtype or for its class of storage."""

    __slots__ = ()


def _storage(pid: Any) -> tuple[_Name, str]:
    """The pair (dtype, archive entry) that a persistent id stands for."""
    kind, dtype, key, _location, _num_elements = pid
    if kind != "storage" or not isinstance(dtype, _Name) or type(key) is not str:
        raise ValueError("a persistent id is not a storage")
    return dtype, key


def _saved(storage: Any, offset: Any, sizes: Any, strides: Any, dtype: Any, properties: Any) -> _Saved:
    numbers = (offset, *sizes, *strides)
    if not all(type(n) is int and 0 <= n < 1 << 60 for n in numbers) or len(sizes) != len(strides):
        raise ValueError("sizes or strides are not whole numbers")
    if dtype not in SAFETENSORS_DTYPES or not isinstance(dtype, _Name):
        raise ValueError("a dtype that is not supported")
    return _Saved(
        dtype=str(dtype),
        entry=storage[1],
        offset=offset,
        sizes=tuple(sizes),
        strides=tuple(strides),
        lazy=_lazy(properties),
    )


def _lazy(properties: Any) -> frozenset[str]:
    """The lazy operations in torch's "tensor metadata": a dict of flags, or None."""
    if properties is None:
        return frozenset()
    if type(properties) is not dict or any(type(is_set) is not bool for is_set in properties.values()):
        raise ValueError("the tensor's properties are not a dict of flags")
    unknown = [name for name in properties if name not in (_CONJUGATED, _NEGATED)]
    if unknown:
        raise ValueError(f"the tensor has unknown properties {unknown[:3]}")
    return frozenset(name for name, is_set in properties.items() if is_set)


class _Window(io.RawIOBase):
    """An item's bytes as a read-only, seekable file."""

    def __init__(self, storage: Storage, key: str, item: Item) -> None:
        self._storage, self._key, self._item = storage, key, item
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._item.length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer).cast("B")
        size = max(0, min(len(out), self._item.length - self._at))
        if size:
            self.fill(self._at, out[:size])
            self._at += size
        return size

    def fill(self, at: int, out: memoryview) -> None:
        """Fill `out` with the item's bytes from byte `at` on."""
        if not len(out):
            return
        where = join_url(self._storage.url, self._key)
        try:
            count = self._storage.read_into(self._key, self._item.start + at, [out])
        except NoSuchKey as error:
            raise IncompleteCheckpoint(f"{where} is missing. Import another checkpoint.") from error
        if count != len(out):
            raise IncompleteCheckpoint(
                f"{where} is cut off: it ends at byte {self._item.start + at + count}, and its metadata names bytes "
                f"up to {self._item.start + self._item.length}. Import another checkpoint."
            )
