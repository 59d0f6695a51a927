"""JSON into a manifest, without trust: every field must exist, be of its type, and be within its limit. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from blake3 import blake3

from raysharded.checkpoint.format.boxes import BoxTable, FileBox
from raysharded.checkpoint.format.index import BadIndex, decode_index
from raysharded.checkpoint.format.limits import MAX_CELLS, MAX_DIMS, MAX_FILES, MAX_INDEX_BYTES, MAX_NUMBER, MAX_TENSORS
from raysharded.checkpoint.format.manifest import BAD_WRITER, FileRecord, Manifest, TensorInfo, shown
from raysharded.checkpoint.format.paths import is_inside, is_usable
from raysharded.errors import CorruptCheckpoint

_DIGEST = re.compile(r"[0-9a-f]{64}")


def parse(body: dict[str, Any], where: str, read_index: Callable[[str, int], bytes]) -> Manifest:
    """The manifest with its types checked, but not its geometry. Raises CorruptCheckpoint naming the field."""
    try:
        if len(_array(body, "files")) > MAX_FILES or len(_mapping(body, "tensors")) > MAX_TENSORS:
            raise _Wrong(f"there are more than {MAX_FILES} files or {MAX_TENSORS} tensors")
        apart = "index" in body
        tensors = {name: _tensor(name, value) for name, value in body["tensors"].items()}
        files = [_file(value, with_boxes=not apart) for value in body["files"]]
        if apart:
            files = _with_index(files, body["index"], tensors, read_index, where)
        return Manifest(
            run=_text(body, "run"),
            step=_whole(body, "step"),
            generation=_whole(body, "generation"),
            save_id=_text(body, "save_id"),
            writer=_text(body, "writer"),
            created_at=_seconds(body, "created_at"),
            tensors=tensors,
            files=tuple(files),
            tree=body.get("tree"),
            data=_mapping(body, "data") if "data" in body else {},
            metadata=_mapping(body, "metadata"),
            version=_whole(body, "version"),
        )
    except (_Wrong, BadIndex) as wrong:
        raise CorruptCheckpoint(f"{where}: {wrong}. {BAD_WRITER}") from None


class _Wrong(Exception):
    """A missing field, or a field of the wrong type."""


def _get(values: Any, key: str) -> Any:
    if type(values) is not dict or key not in values:
        raise _Wrong(f"field {key!r} is missing")
    return values[key]


def _text(values: Any, key: str) -> str:
    value = _get(values, key)
    if type(value) is not str:
        raise _Wrong(f"{key}={shown(value)} is not text")
    return value


def _whole(values: Any, key: str) -> int:
    value = _get(values, key)
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise _Wrong(f"{key}={shown(value)} is not a whole number of 0 or more")
    return value


def _seconds(values: Any, key: str) -> float:
    value = _get(values, key)
    if type(value) is int and abs(value) <= MAX_NUMBER:
        return float(value)
    if type(value) is not float or not math.isfinite(value):
        raise _Wrong(f"{key}={shown(value)} is not a number")
    return value


def _mapping(values: Any, key: str) -> dict[str, Any]:
    value = _get(values, key)
    if type(value) is not dict:
        raise _Wrong(f"{key} is not an object")
    return value


def _array(values: Any, key: str) -> list[Any]:
    value = _get(values, key)
    if type(value) is not list:
        raise _Wrong(f"{key} is not an array")
    return value


def _numbers(value: Any, name: str) -> tuple[int, ...]:
    if (
        type(value) is not list
        or len(value) > MAX_DIMS
        or any(type(n) is not int or not 0 <= n <= MAX_NUMBER for n in value)
    ):
        raise _Wrong(
            f"tensor {shown(name)}: {shown(value)} is not an array of at most {MAX_DIMS} whole numbers of 0 or more"
        )
    return tuple(value)


def _tensor(name: str, value: Any) -> TensorInfo:
    if type(value) is not list or len(value) != 2 or type(value[0]) is not str:
        raise _Wrong(f"tensor {shown(name)}: {shown(value)} is not [dtype, shape]")
    return TensorInfo(dtype=value[0], shape=_numbers(value[1], name))


def _file(value: Any, *, with_boxes: bool) -> FileRecord:
    path = _text(value, "path")
    table = _hex(_text(value, "digest_table"), path).hex() if "digest_table" in value else ""
    boxes = [_box(box, path) for box in _array(value, "boxes")] if with_boxes else []
    cells = len(boxes) * max((len(box.sizes) for box in boxes), default=0)
    if cells > MAX_CELLS:
        raise _Wrong(f"file {shown(path)} has too many boxes of too many dimensions")
    return FileRecord(
        path=path,
        size_bytes=_whole(value, "size_bytes"),
        chunk_size_bytes=_whole(value, "chunk_size_bytes"),
        digests=b"" if table else b"".join(_hex(text, path) for text in _array(value, "digests")),
        digest_table=table,
        boxes=BoxTable.of(boxes),
    )


def _with_index(
    files: list[FileRecord],
    about: Any,
    tensors: Mapping[str, TensorInfo],
    read_index: Callable[[str, int], bytes],
    where: str,
) -> list[FileRecord]:
    path, size_bytes, expected = _text(about, "path"), _whole(about, "size_bytes"), _text(about, "digest")
    if not is_usable(path) or not is_inside(path) or size_bytes > MAX_INDEX_BYTES:
        raise _Wrong(f"the box index {shown(path)} of {size_bytes} bytes")
    data = read_index(path, size_bytes)
    if len(data) != size_bytes or blake3(data).hexdigest() != expected:
        raise CorruptCheckpoint(
            f"{where}: the box index {path!r} does not match its digest: {len(data)} bytes, expected {size_bytes} with "
            f"digest {shown(expected)}. It was changed or cut off after it was written; use another checkpoint, or "
            "restore it from a copy."
        )
    tables = decode_index(data, [(name, len(info.shape)) for name, info in tensors.items()], len(files))
    return [replace(file, boxes=table) for file, table in zip(files, tables, strict=True)]


def _hex(value: Any, path: str) -> bytes:
    if type(value) is not str or _DIGEST.fullmatch(value) is None:
        raise _Wrong(f"file {shown(path)}: digest {shown(value)} is not 64 lower-case hexadecimal digits")
    return bytes.fromhex(value)


def _box(value: Any, path: str) -> FileBox:
    if type(value) is not list or len(value) != 4 or type(value[0]) is not str or type(value[3]) is not int:
        raise _Wrong(f"file {shown(path)}: box {shown(value)} is not [tensor, offsets, sizes, start]")
    name, offsets, sizes, start = value
    if not 0 <= start <= MAX_NUMBER:
        raise _Wrong(f"file {shown(path)}: box {shown(value)} starts outside the file")
    box = FileBox(name=name, offsets=_numbers(offsets, name), sizes=_numbers(sizes, name), start=start)
    if len(box.offsets) != len(box.sizes):
        raise _Wrong(f"file {shown(path)}: box {shown(value)} does not have as many sizes as offsets")
    return box
