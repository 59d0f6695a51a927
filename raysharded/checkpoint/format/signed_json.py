"""Small JSON objects that begin with their digest: a claim, a pin, a tombstone, a fork's reference. Pure.

Like a manifest, each is canonical JSON (ASCII, sorted keys, no spaces). It begins with `{"digest":"` and the BLAKE3 of
all bytes from byte 75 on. `format` names the kind of object, and `version` its version. The objects are not signed.

Law: unseal(seal(body, format), format) == body, and `unseal` detects every accidental change of a sealed object.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from raysharded.errors import CorruptCheckpoint

VERSION = 1
MAX_BYTES = 1 << 20
"""Maximum size of any of these objects."""

_HEAD = b'{"digest":"'
_DIGEST_END = len(_HEAD) + 64


def seal(body: Mapping[str, Any], format_name: str) -> bytes:
    """The object as bytes. Its values must be values that JSON can hold."""
    whole = {**body, "format": format_name, "version": VERSION}
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    rest = b'",' + text[1:].encode("ascii") + b"\n"
    return _HEAD + blake3(rest).hexdigest().encode("ascii") + rest


def unseal(data: bytes, format_name: str, where: str) -> dict[str, Any]:
    """The object in `data`; `where` names it in errors. Raises CorruptCheckpoint unless it is whole."""
    said, actual = data[len(_HEAD) : _DIGEST_END], blake3(data[_DIGEST_END:]).hexdigest()
    if not data.startswith(_HEAD) or said != actual.encode("ascii"):
        raise CorruptCheckpoint(
            f"{where}: {len(data)} bytes do not match their digest (stated {said.decode('ascii', 'replace')!r}, is "
            f"{actual!r}). It was changed or cut off after it was written; restore it from a copy."
        )
    body = _parsed(data)
    if body is None or body.pop("format", None) != format_name or body.pop("version", None) != VERSION:
        raise CorruptCheckpoint(
            f"{where}: not a {format_name} of version {VERSION}, though its digest is right. A newer raysharded may "
            "have written it: use that one."
        )
    del body["digest"]
    return body


def text(body: Mapping[str, Any], field: str, where: str) -> str:
    """A text field of an unsealed object. Raises CorruptCheckpoint."""
    value = body.get(field)
    if type(value) is not str:
        raise CorruptCheckpoint(f"{where}: {field}={value!r} is not text. Its writer does not follow the format.")
    return value


def whole(body: Mapping[str, Any], field: str, where: str) -> int:
    """A field that is a whole number of 0 or more. Raises CorruptCheckpoint."""
    value = body.get(field)
    if type(value) is not int or value < 0:
        raise CorruptCheckpoint(
            f"{where}: {field}={value!r} is not a whole number of 0 or more. Its writer does not follow the format."
        )
    return value


def seconds(body: Mapping[str, Any], field: str, where: str) -> float:
    """A time field, in seconds. Raises CorruptCheckpoint."""
    value = body.get(field)
    if type(value) is not int and type(value) is not float:
        raise CorruptCheckpoint(f"{where}: {field}={value!r} is not a number. Its writer does not follow the format.")
    return float(value)


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
