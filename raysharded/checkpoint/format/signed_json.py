"""Small JSON objects that begin with their digest: a claim, a pin, a tombstone, a fork's reference. Pure.

Like a manifest, each is canonical JSON (ASCII, sorted keys, no spaces). It begins with `{"digest":"` and the BLAKE3 of
all bytes from byte 75 on. `format` names the kind of object, and `version` its version. The objects are not signed.

Law: unseal(seal(body, format), format) == body, and `unseal` detects every accidental change of a sealed object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from raysharded.checkpoint.format.limits import MAX_NUMBER, MAX_TEXT
from raysharded.checkpoint.format.manifest import shown
from raysharded.checkpoint.format.paths import is_below
from raysharded.errors import CorruptCheckpoint

VERSION = 1
MAX_BYTES = 1 << 20
"""Maximum size of any of these objects."""

MAX_SECONDS = 253_402_300_799
"""Time in seconds since the Unix epoch at the end of the year 9999: later ones have no date."""

_HEXADECIMAL = re.compile(r"[0-9a-f]{64}")
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
    if type(value) is not str or len(value) > MAX_TEXT:
        raise _wrong(where, field, value, f"text of at most {MAX_TEXT} characters")
    return value


def folder(body: Mapping[str, Any], field: str, where: str) -> str:
    """A field that is a folder below the run's storage. Raises CorruptCheckpoint."""
    value = text(body, field, where)
    if not is_below(value):
        raise _wrong(where, field, value, "a folder below the run's")
    return value


def name(body: Mapping[str, Any], field: str, where: str) -> str:
    """A field that is a name without `/`, as of a file. Raises CorruptCheckpoint."""
    value = folder(body, field, where)
    if "/" in value:
        raise _wrong(where, field, value, "a name without /")
    return value


def digest(body: Mapping[str, Any], field: str, where: str) -> str:
    """A field that is a BLAKE3 digest in hexadecimal digits. Raises CorruptCheckpoint."""
    value = text(body, field, where)
    if _HEXADECIMAL.fullmatch(value) is None:
        raise _wrong(where, field, value, "a digest of 64 lower-case hexadecimal digits")
    return value


def whole(body: Mapping[str, Any], field: str, where: str) -> int:
    """A field that is a whole number from 0 to MAX_NUMBER. Raises CorruptCheckpoint."""
    value = body.get(field)
    if type(value) is not int or not 0 <= value <= MAX_NUMBER:
        raise _wrong(where, field, value, "a whole number of 0 or more")
    return value


def seconds(body: Mapping[str, Any], field: str, where: str) -> float:
    """A time field, in seconds, from 0 to MAX_SECONDS. Raises CorruptCheckpoint."""
    value = body.get(field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_SECONDS:
        raise _wrong(where, field, value, "a number of seconds until the year 9999")
    return float(value)


def _wrong(where: str, field: str, value: object, wanted: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{where}: {field}={shown(value)} is not {wanted}. Its writer does not follow the format.")


def _parsed(data: bytes) -> dict[str, Any] | None:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return body if isinstance(body, dict) else None
