"""A manifest as bytes: canonical JSON that begins with the digest of all that follows it, optionally signed. Pure.

Laws: decode(encode(m)) == m, and decode detects every accidental change of encode(m).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from blake3 import blake3

from raysharded.checkpoint.format import signing
from raysharded.checkpoint.format.index import MIN_BOXES, encode_index, index_path
from raysharded.checkpoint.format.limits import MAX_INDEX_BYTES, MAX_MANIFEST_BYTES, MAX_VALUES
from raysharded.checkpoint.format.manifest import (
    BAD_WRITER,
    DIGEST_BYTES,
    READABLE_VERSIONS,
    VERSION,
    FileRecord,
    Manifest,
    check,
    shown,
)
from raysharded.checkpoint.format.parse import parse
from raysharded.checkpoint.format.paths import parse_save_folder
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.errors import CheckpointError, CorruptCheckpoint

FORMAT = "raysharded-checkpoint"


class ForeignManifest(CorruptCheckpoint):
    """A file of another program that has the name of a manifest: a JSON object that is no damaged manifest."""


_OWN_FIELDS = {"digest", "hmac", "format", "run", "generation", "save_id", "writer", "created_at", "tensors", "files"}
_HEAD = b'{"digest":"'
_DIGEST_END = len(_HEAD) + 64
HEAD_BYTES = _DIGEST_END + 16
"""Bytes of an encoded manifest that show whether it is signed."""


def digest(data: bytes | memoryview) -> str:
    """BLAKE3 digest as 64 hexadecimal digits. Releases the GIL for all but tiny inputs."""
    return blake3(data).hexdigest()


@dataclass(frozen=True, slots=True)
class Encoded:
    """The bytes to write: the manifest, and the box index beside it if it is large."""

    manifest: bytes
    index_path: str = ""
    index: bytes = b""

    @property
    def digest(self) -> str:
        """Digest that identifies this manifest: 64 hexadecimal digits."""
        return self.manifest[len(_HEAD) : _DIGEST_END].decode("ascii")


def encode(manifest: Manifest, key: SigningKey | None = None) -> Encoded:
    """The manifest as canonical JSON (ASCII, sorted keys, no spaces), led by the digest of all that follows it.

    Raises CheckpointError if the metadata would not survive JSON, and as `check` does.
    """
    where = f"the manifest of step {manifest.step}"
    state = {
        "tree": _json_only(manifest.tree),
        "data": _json_only(dict(manifest.data)),
        "metadata": _json_only(dict(manifest.metadata)),
    }
    check(manifest, where)
    file, boxes = manifest.boxes()
    apart = len(boxes) >= MIN_BOXES
    index = encode_index(file, boxes) if apart else b""
    path = index_path(digest(index)) if apart else ""
    about = {"index": {"path": path, "size_bytes": len(index), "digest": digest(index)}} if apart else {}
    body = {
        "format": FORMAT,
        "version": VERSION,
        "run": manifest.run,
        "step": manifest.step,
        "generation": manifest.generation,
        "save_id": manifest.save_id,
        "writer": manifest.writer,
        "created_at": manifest.created_at,
        "tensors": {name: [info.dtype, info.shape] for name, info in manifest.tensors.items()},
        "files": [_file_body(record, with_boxes=not apart) for record in manifest.files],
        **state,
        **about,
    }
    try:
        text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{where} cannot be written as JSON: {error}.") from error
    rest = b'",' + text[1:].encode("ascii") + b"\n"
    rest = signing.signed(rest, key)
    if _is_too_large(rest) or len(index) > MAX_INDEX_BYTES:
        raise CheckpointError(
            f"{where} of {len(rest)} bytes with {len(boxes)} boxes is larger than readers take. Save less metadata, "
            "with fewer writers, or fewer and larger tensors."
        )
    return Encoded(_HEAD + digest(rest).encode("ascii") + rest, path, index)


def _is_too_large(data: bytes) -> bool:
    return len(data) > MAX_MANIFEST_BYTES or sum(map(data.count, (b",", b"[", b"{"))) > MAX_VALUES


def _file_body(file: FileRecord, *, with_boxes: bool) -> dict[str, Any]:
    raw = file.digests
    digests = [raw[at : at + DIGEST_BYTES].hex() for at in range(0, len(raw), DIGEST_BYTES)]
    body: dict[str, Any] = {
        "path": file.path,
        "size_bytes": file.size_bytes,
        "chunk_size_bytes": file.chunk_size_bytes,
        **({"digest_table": file.digest_table} if file.digest_table else {"digests": digests}),
    }
    if with_boxes:
        body["boxes"] = [[box.name, box.offsets, box.sizes, box.start] for box in file.boxes]
    return body


def _no_index(path: str, size: int) -> bytes:
    raise CheckpointError(f"the box index {path} of {size} bytes is needed to read this manifest.")


def decode(
    data: bytes,
    where: str = "the manifest",
    *,
    folder: str = "",
    key: SigningKey | None = None,
    read_index: Callable[[str, int], bytes] = _no_index,
) -> Manifest:
    """The manifest in `data`. `where` names it in errors; `read_index(path, size)` returns the box index beside it.

    `folder` is the name of the manifest's folder: if it names a save, it must name this one. With a key, a manifest
    that was not signed with it is rejected. Raises CorruptCheckpoint for bytes that do not match the digest or the
    signature, wrong types, paths that escape, and boxes that overlap or lie outside. Raises IncompleteCheckpoint for
    missing boxes, CheckpointError for another version, ForeignManifest for another program's file.
    """
    _check_digest(data, where)
    signing.check_signature(data[_DIGEST_END:] if key is not None else b"", key, where)
    if _is_too_large(data):
        raise CorruptCheckpoint(f"{where}: {len(data)} bytes with too many values. {BAD_WRITER}")
    try:
        body = json.loads(data.decode("ascii"), object_pairs_hook=_object, parse_constant=_no_number)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CorruptCheckpoint(f"{where}: not JSON ({error}), though its digest is right. {BAD_WRITER}") from error
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        raise CorruptCheckpoint(f"{where}: not a {FORMAT} manifest. {BAD_WRITER}")
    if body.get("version") not in READABLE_VERSIONS:
        raise CheckpointError(
            f"{where}: format version {shown(body.get('version'))}, and this raysharded reads {READABLE_VERSIONS}. "
            "Read it with the raysharded that wrote it, or a newer one."
        )
    _check_folder(body, folder, where)
    try:
        manifest = parse(body, where, read_index)
        check(manifest, where)
    except MemoryError as error:
        raise CheckpointError(f"{where}: this process has too little memory to read it. Give it more.") from error
    return manifest


def _check_folder(body: dict[str, Any], folder: str, where: str) -> None:
    named = parse_save_folder(folder)
    if named is not None and named != (body.get("step"), body.get("save_id")):
        raise CorruptCheckpoint(
            f"{where} is the manifest of step {shown(body.get('step'))}, save {shown(body.get('save_id'))}, not of its "
            "folder's. It was put there by mistake; use another checkpoint."
        )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has two fields of the same name")
    return found


def _no_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a JSON number")


def digest_of(data: bytes) -> str:
    """Digest that an encoded manifest carries."""
    return data[len(_HEAD) : _DIGEST_END].decode("ascii", "replace")


def is_signed(data: bytes) -> bool:
    """Whether an encoded manifest carries a signature, with any key. Its first `HEAD_BYTES` are enough."""
    return signing.is_signed(data[_DIGEST_END:HEAD_BYTES])


def _check_digest(data: bytes, where: str) -> None:
    actual = digest(data[_DIGEST_END:])
    if not data.startswith(_HEAD) or digest_of(data) != actual:
        if is_foreign(data):
            raise ForeignManifest(f"{where} is a file of another program, not the manifest of a checkpoint.")
        raise CorruptCheckpoint(
            f"{where}: {len(data)} bytes do not match their digest (stated {digest_of(data)!r}, is {actual!r}). It was "
            "changed or cut off after it was written; resume from another checkpoint."
        )


def is_foreign(data: bytes) -> bool:
    """Whether the bytes are a whole JSON object, not empty, that has none of a manifest's fields."""
    if data.startswith(_HEAD) or _is_too_large(data):
        return False
    try:
        body = json.loads(data)
    except (ValueError, RecursionError, MemoryError):
        return False
    return isinstance(body, dict) and bool(body) and not body.keys() & _OWN_FIELDS


def _json_only(value: Any) -> Any:
    try:
        same = json.loads(json.dumps(value, allow_nan=False)) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"checkpoint metadata cannot be written as JSON: {error}. Give plain values.") from error
    if not same:
        raise CheckpointError(
            "checkpoint metadata would be read back as something else (JSON turns tuples into lists and keys into "
            "text). Give lists, and text as keys."
        )
    return value
