"""A manifest as bytes: canonical JSON, led by the digest of all that follows it. Pure.

Laws: decode(encode(m)) == m, and no byte of encode(m) can change without decode noticing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from raysharded.checkpoint.manifest import BAD_WRITER, VERSION, FileBox, FileRecord, Manifest, TensorInfo, check
from raysharded.errors import CheckpointError, CorruptCheckpoint

FORMAT = "raysharded-checkpoint"

_HEAD = b'{"digest":"'
_BODY_AT = len(_HEAD) + 64


def digest(data: bytes | memoryview) -> str:
    """BLAKE3 as 64 hexadecimal digits. Releases the GIL for all but tiny inputs."""
    return blake3(data).hexdigest()


def encode(manifest: Manifest) -> bytes:
    """The manifest as canonical JSON (ASCII, sorted keys, no spaces), led by the digest of all that follows it.

    Raises CheckpointError if the metadata would not survive JSON, and as `check` does.
    """
    check(manifest, where=f"the manifest of step {manifest.step}")
    body = {
        "format": FORMAT,
        "version": manifest.version,
        "run": manifest.run,
        "step": manifest.step,
        "generation": manifest.generation,
        "save_id": manifest.save_id,
        "writer": manifest.writer,
        "created_at": manifest.created_at,
        "tensors": {name: [info.dtype, info.shape] for name, info in manifest.tensors.items()},
        "files": [
            {
                "path": file.path,
                "size_bytes": file.size_bytes,
                "chunk_size_bytes": file.chunk_size_bytes,
                "digests": file.digests,
                "boxes": [[box.name, box.offsets, box.sizes, box.start] for box in file.boxes],
            }
            for file in manifest.files
        ],
        "metadata": _json_only(manifest.metadata),
    }
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the manifest of step {manifest.step} cannot be written as JSON: {error}.") from error
    rest = b'",' + text[1:].encode("ascii") + b"\n"
    return _HEAD + digest(rest).encode("ascii") + rest


def decode(data: bytes, where: str = "the manifest") -> Manifest:
    """The manifest in `data`; `where` names it in errors.

    Raises CorruptCheckpoint for bytes that do not match the digest, wrong types, paths that escape and boxes that
    overlap or lie outside; IncompleteCheckpoint for boxes that are missing; CheckpointError for another version.
    """
    found = data[len(_HEAD) : _BODY_AT]
    actual = digest(data[_BODY_AT:]).encode("ascii")
    if not data.startswith(_HEAD) or found != actual:
        raise CorruptCheckpoint(
            f"{where}: {len(data)} bytes do not match their digest (says {found.decode('ascii', 'replace')!r}, "
            f"is {actual.decode()!r}). It was changed or cut off after it was written; resume from another checkpoint."
        )
    try:
        body = json.loads(data)
    except ValueError as error:
        raise CorruptCheckpoint(f"{where}: not JSON ({error}), though its digest is right. {BAD_WRITER}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CorruptCheckpoint(f"{where}: not a {FORMAT} manifest. {BAD_WRITER}")
    if body.get("version") != VERSION:
        raise CheckpointError(
            f"{where}: format version {body.get('version')!r}, and this raysharded reads version {VERSION}. "
            "Read it with the raysharded that wrote it, or a newer one."
        )
    manifest = _parse(body, where)
    check(manifest, where)
    return manifest


def _json_only(metadata: Mapping[str, Any]) -> dict[str, Any]:
    plain = dict(metadata)
    try:
        same = json.loads(json.dumps(plain, allow_nan=False)) == plain
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint metadata cannot be written as JSON: {error}. Give plain values.") from error
    if not same:
        raise CheckpointError(
            "checkpoint metadata would be read back as something else (JSON turns tuples into lists and keys into "
            "text). Give lists, and text as keys."
        )
    return plain


def _parse(body: dict[str, Any], where: str) -> Manifest:
    """The manifest, its types checked but not its geometry. Raises CorruptCheckpoint naming the field."""
    try:
        return Manifest(
            run=_text(body, "run"),
            step=_whole(body, "step"),
            generation=_whole(body, "generation"),
            save_id=_text(body, "save_id"),
            writer=_text(body, "writer"),
            created_at=_seconds(body, "created_at"),
            tensors={name: _tensor(name, value) for name, value in _mapping(body, "tensors").items()},
            files=tuple(_file(value) for value in _array(body, "files")),
            metadata=_mapping(body, "metadata"),
            version=_whole(body, "version"),
        )
    except _Wrong as wrong:
        raise CorruptCheckpoint(f"{where}: {wrong}. {BAD_WRITER}") from None


class _Wrong(Exception):
    """A field is missing or has the wrong type."""


def _get(values: Any, key: str) -> Any:
    if type(values) is not dict or key not in values:
        raise _Wrong(f"field {key!r} is missing")
    return values[key]


def _text(values: Any, key: str) -> str:
    value = _get(values, key)
    if type(value) is not str:
        raise _Wrong(f"{key}={value!r} is not text")
    return value


def _whole(values: Any, key: str) -> int:
    value = _get(values, key)
    if type(value) is not int or value < 0:
        raise _Wrong(f"{key}={value!r} is not a whole number of 0 or more")
    return value


def _seconds(values: Any, key: str) -> float:
    value = _get(values, key)
    if type(value) not in (int, float):
        raise _Wrong(f"{key}={value!r} is not a number")
    return float(value)


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


def _numbers(value: Any, what: str) -> tuple[int, ...]:
    if type(value) is not list or any(type(n) is not int or n < 0 for n in value):
        raise _Wrong(f"{what}: {value!r} is not an array of whole numbers of 0 or more")
    return tuple(value)


def _tensor(name: str, value: Any) -> TensorInfo:
    if type(value) is not list or len(value) != 2 or type(value[0]) is not str:
        raise _Wrong(f"tensor {name!r}: {value!r} is not [dtype, shape]")
    return TensorInfo(dtype=value[0], shape=_numbers(value[1], f"shape of tensor {name!r}"))


def _file(value: Any) -> FileRecord:
    path = _text(value, "path")
    digests = _array(value, "digests")
    if any(type(digest) is not str for digest in digests):
        raise _Wrong(f"digests of file {path!r} are not text")
    return FileRecord(
        path=path,
        size_bytes=_whole(value, "size_bytes"),
        chunk_size_bytes=_whole(value, "chunk_size_bytes"),
        digests=tuple(digests),
        boxes=tuple(_box(box, path) for box in _array(value, "boxes")),
    )


def _box(value: Any, path: str) -> FileBox:
    if type(value) is not list or len(value) != 4 or type(value[0]) is not str or type(value[3]) is not int:
        raise _Wrong(f"file {path!r}: box {value!r} is not [tensor, offsets, sizes, start]")
    name, offsets, sizes, start = value
    if start < 0:
        raise _Wrong(f"file {path!r}: box {value!r} starts before the file")
    return FileBox(name=name, offsets=_numbers(offsets, name), sizes=_numbers(sizes, name), start=start)
