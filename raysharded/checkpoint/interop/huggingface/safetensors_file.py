"""Safetensors files: read and check foreign headers, and make new files during the write.

The format: 8 bytes with the header's length, the header as JSON, the tensors' bytes without gaps
(https://github.com/huggingface/safetensors#format).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raysharded.checkpoint.byte_ranges import Bytes
from raysharded.checkpoint.format.manifest import SAFETENSORS_DTYPES, TensorInfo
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint
from raysharded.locations import join_url

MAX_HEADER_BYTES = 100_000_000
"""Maximum header size that the format permits."""

METADATA_NAME = "__metadata__"
"""The header's entry that is no tensor: an object of texts."""

_NAMES = {code: name for name, (code, _) in SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """A tensor, and the place of its first byte in its file."""

    info: TensorInfo
    start: int


def read_header(storage: Storage, key: str) -> dict[str, Stored]:
    """The tensors of a safetensors file, in the order of their bytes.

    Raises CheckpointError for dtypes that the raysharded format lacks, CorruptCheckpoint for an invalid header,
    IncompleteCheckpoint if the file is missing or too short.
    """
    where = join_url(storage.url, key)
    try:
        size_bytes = storage.size(key)
        length = int.from_bytes(storage.read(key, 0, 8), "little")
        if size_bytes < 8 or length > min(MAX_HEADER_BYTES, size_bytes - 8):
            raise CorruptCheckpoint(f"{where}: not a safetensors file ({size_bytes} bytes, header of {length}).")
        header = json.loads(storage.read(key, 8, length).decode())  # of bytes, json guesses the encoding
    except NoSuchKey as error:
        raise IncompleteCheckpoint(f"{where} is missing. Get the whole folder.") from error
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where}: its header is not JSON ({error}). Get the file again.") from error
    return _checked(header, size_bytes - 8 - length, 8 + length, where)


def _checked(header: Any, data_bytes: int, base: int, where: str) -> dict[str, Stored]:
    if type(header) is not dict:
        raise CorruptCheckpoint(f"{where}: its header is not a JSON object. Get the file again.")
    more = header.pop(METADATA_NAME, None)
    if more is not None and (type(more) is not dict or any(type(value) is not str for value in more.values())):
        raise CorruptCheckpoint(f"{where}: the {METADATA_NAME} of its header is not an object of texts.")
    found = [_entry(name, entry, base, where) for name, entry in header.items()]
    found.sort(key=lambda row: row[:2])
    at = 0
    for begin, end, name, _ in found:
        if begin != at:
            raise CorruptCheckpoint(f"{where}: tensor {name!r} begins at byte {begin} of the data instead of {at}.")
        at = end
    if at > data_bytes:
        raise IncompleteCheckpoint(f"{where} is cut off: {data_bytes} of {at} bytes of data. Get the file again.")
    if at < data_bytes:
        raise CorruptCheckpoint(
            f"{where}: {data_bytes - at} bytes follow the {at} bytes of its tensors. Get the file again."
        )
    return {name: stored for _, _, name, stored in found}


def _entry(name: str, entry: Any, base: int, where: str) -> tuple[int, int, str, Stored]:
    fields = entry if type(entry) is dict else {}
    code, shape, offsets = fields.get("dtype"), _numbers(fields.get("shape")), _numbers(fields.get("data_offsets"))
    if type(code) is not str or shape is None or offsets is None or len(offsets) != 2:
        raise CorruptCheckpoint(f"{where}: tensor {name!r} is not described as the format requires.")
    if code not in _NAMES:
        raise CheckpointError(
            f"{where}: tensor {name!r} has dtype {code}, which is not supported (supported: {', '.join(_NAMES)})."
        )
    info = TensorInfo(dtype=_NAMES[code], shape=shape)
    begin, end = offsets
    if end - begin != info.size_bytes:
        raise CorruptCheckpoint(f"{where}: tensor {name!r} of {code} and shape {shape} has {end - begin} bytes.")
    return begin, end, name, Stored(info=info, start=base + begin)


def _numbers(value: Any) -> tuple[int, ...] | None:
    if type(value) is not list or not all(type(n) is int and 0 <= n < 1 << 60 for n in value):
        return None
    return tuple(value)


def require_storable(names: Iterable[str]) -> None:
    """Raise CheckpointError for a tensor's name that a header cannot hold."""
    for name in names:
        if name == METADATA_NAME or not _is_unicode(name):
            raise CheckpointError(
                f"no tensor of a safetensors file can be called {name!r}. Rename it, or leave it out, by a name map."
            )


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        return False
    return True


def header_of(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that holds the tensors one after the other, in the order of the mapping."""
    entries: dict[str, Any] = {METADATA_NAME: dict(metadata)}
    at = 0
    for name, info in tensors.items():
        end = at + info.size_bytes
        entries[name] = {"dtype": SAFETENSORS_DTYPES[info.dtype][0], "shape": info.shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def in_order(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """The tensors with wider element types first, so that each is aligned; otherwise in their order."""
    return dict(sorted(tensors.items(), key=lambda entry: -entry[1].item_bytes))


def share_out(tensors: Mapping[str, TensorInfo], max_bytes: int) -> list[dict[str, TensorInfo]]:
    """The tensors in files of at most `max_bytes` (or one tensor), in their order."""
    files: list[dict[str, TensorInfo]] = [{}]
    room = max_bytes
    for name, info in tensors.items():
        if files[-1] and info.size_bytes > room:
            files.append({})
            room = max_bytes
        files[-1][name] = info
        room -= info.size_bytes
    return files


@dataclass(frozen=True, slots=True)
class FileParts:
    """A safetensors file as parts that are made during the write. It can be iterated repeatedly."""

    tensors: Mapping[str, TensorInfo]
    data: Callable[[Sequence[str]], Iterable[Bytes]]
    """Function that yields the bytes of the named tensors, one after the other."""

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield header_of(self.tensors, {"format": "pt"})
        for part in self.data(list(self.tensors)):
            yield part.data
