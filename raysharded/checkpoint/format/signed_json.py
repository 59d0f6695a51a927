"""Small JSON objects that begin with their digest: a claim, a pin, a tombstone, a reference, a lease. Pure.

Like a manifest, each is canonical JSON (ASCII, sorted keys, no spaces). It begins with `{"digest":"` and the BLAKE3 of
all bytes from byte 75 on. `format` names the kind of object, and `version` its version. With a key the signature
follows the digest, as in a manifest, and the object states its place: the run's name and its storage key. So neither
another run's object nor one under another name can take its place.

Law: unseal(seal(body, format), format) == body, and `unseal` detects every accidental change of a sealed object. With a
key it accepts only what `seal` returned for the same key, format and place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from blake3 import blake3

from raysharded.checkpoint.format import signing
from raysharded.checkpoint.format.limits import MAX_NUMBER, MAX_TEXT
from raysharded.checkpoint.format.manifest import shown
from raysharded.checkpoint.format.paths import is_below
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.errors import CorruptCheckpoint

VERSION = 1
MAX_BYTES = 1 << 20
"""Maximum size of any of these objects."""

MAX_SECONDS = 253_402_300_799
"""Time in seconds since the Unix epoch at the end of the year 9999: later ones have no date."""

_HEXADECIMAL = re.compile(r"[0-9a-f]{64}")
_HEAD = b'{"digest":"'
_DIGEST_END = len(_HEAD) + 64


def seal(body: Mapping[str, Any], format_name: str, *, key: SigningKey | None = None, place: str = "") -> bytes:
    """The object as bytes, signed if a key is given. Its values must be values that JSON can hold.

    `place`: that of `signing.place_of`; only a signed object states it.
    """
    placed = {"place": place} if key is not None else {}
    whole = {**body, **placed, "format": format_name, "version": VERSION}
    text = json.dumps(whole, sort_keys=True, separators=(",", ":"), allow_nan=False)
    rest = b'",' + text[1:].encode("ascii") + b"\n"
    rest = signing.signed(rest, key)
    return _HEAD + blake3(rest).hexdigest().encode("ascii") + rest


def digest_of(data: bytes) -> str:
    """The digest that a sealed object carries."""
    return data[len(_HEAD) : _DIGEST_END].decode("ascii", "replace")


def unseal(
    data: bytes, format_name: str, where: str, *, key: SigningKey | None = None, place: str = ""
) -> dict[str, Any]:
    """The object in `data`; `where` names it in errors. Raises CorruptCheckpoint unless it is whole.

    With a key it must be signed with it, for this `place`. Raises Unsigned or another RefusedCheckpoint otherwise.
    """
    said, actual = data[len(_HEAD) : _DIGEST_END], blake3(data[_DIGEST_END:]).hexdigest()
    if not data.startswith(_HEAD) or said != actual.encode("ascii"):
        raise CorruptCheckpoint(
            f"{where}: {len(data)} bytes do not match their digest (stated {said.decode('ascii', 'replace')!r}, is "
            f"{actual!r}). It was changed or cut off after it was written; restore it from a copy."
        )
    signing.check_signature(data[_DIGEST_END:], key, where)
    body = _parsed(data)
    if body is None or body.pop("format", None) != format_name or body.pop("version", None) != VERSION:
        raise CorruptCheckpoint(
            f"{where}: not a {format_name} of version {VERSION}, though its digest is right. A newer raysharded may "
            "have written it: use that one."
        )
    stated = body.pop("place", "")
    if key is not None:
        signing.check_place(stated, place, where)
    return {name: value for name, value in body.items() if name not in ("digest", "hmac")}


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
