"""Claims of a run as they are stored: their names, their form, and how the newest is found. `claims` makes them."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from raysharded.checkpoint.format import signed_json
from raysharded.checkpoint.format.signing import SigningKey, place_of
from raysharded.checkpoint.storage import Storage, Unfinished
from raysharded.checkpoint.storage.small_objects import read_small
from raysharded.checkpoint.threads import Threads
from raysharded.errors import CorruptCheckpoint, RefusedCheckpoint
from raysharded.locations import join_url

CLAIMS_FOLDER = "claims"

_log = logging.getLogger("raysharded.checkpoint")
_FORMAT = "raysharded-claim"
_AT_ONCE = 16
_NUMBER = re.compile(rf"{CLAIMS_FOLDER}/([0-9]{{10,}})\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """One claim. A commit sets the last three fields; an owner's claim sets none of them."""

    number: int
    id: str
    """Random id of the claimer: it distinguishes its claims from those of another with the same name."""
    kind: Literal["owner", "commit"]
    generation: int
    writer: str
    """Name of the claimer, which is also the writer in the manifests that it commits."""
    created_at: float
    """Time of the claim in seconds since the Unix epoch, for people; nothing depends on it."""
    step: int = 0
    prefix: str = ""
    digest: str = ""
    """Digest of the manifest."""
    after: tuple[int, str] | None = None
    """Number and digest of the signed claim before this signed one; None for the first."""
    seal: str = ""
    """Digest of the claim as stored, if the key signed it; otherwise empty."""

    def is_same(self, other: Claim) -> bool:
        """Whether both are one claimer's claim of the same thing; number, time and the claim before may differ."""
        return _without_place(self) == _without_place(other)


def _without_place(claim: Claim) -> Claim:
    return replace(claim, number=0, created_at=0.0, after=None, seal="")


def claim_key(number: int) -> str:
    """The storage key of a claim."""
    return f"{CLAIMS_FOLDER}/{number:010d}.json"


def lost_writes(unfinished: Iterable[Unfinished], newest: int) -> Sequence[Unfinished]:
    """Unfinished writes of claims up to `newest`, which is claimed: their writers died or lost."""
    matches = ((write, _NUMBER.fullmatch(write.key)) for write in unfinished)
    return [write for write, match in matches if match is not None and int(match[1]) <= newest]


def list_numbers(storage: Storage) -> list[int]:
    """The numbers of all claims, in order."""
    return numbers_of(storage.list(CLAIMS_FOLDER))


def numbers_of(keys: Iterable[str]) -> list[int]:
    """The numbers of the claims among some keys, in order."""
    matches = map(_NUMBER.fullmatch, keys)
    return sorted(int(match[1]) for match in matches if match)


def find_newest(storage: Storage, *, key: SigningKey | None = None) -> tuple[int, Claim | None]:
    """(the newest number, the newest readable claim); (0, None) if no claim exists.

    With a key it is the newest that the key signed, or, if it signed none, the newest of others.
    """
    numbers = list_numbers(storage)
    newest = numbers[-1] if numbers else 0
    refused: int | None = None
    for number, found in _read_back(storage, numbers, key):
        match found:
            case Claim():
                return newest, found
            case RefusedCheckpoint():
                refused = refused or number
            case _:
                _log.warning("passing over a claim that cannot be read: %s", found)
    return newest, read_claim(storage, refused) if refused is not None else None


def _read_back(
    storage: Storage, numbers: Sequence[int], key: SigningKey | None
) -> Iterator[tuple[int, Claim | CorruptCheckpoint]]:
    """Claims with their numbers, or the errors in them, from the newest back. The first one is read alone."""

    def read(number: int) -> Claim | CorruptCheckpoint:
        try:
            return read_claim(storage, number, key=key)
        except CorruptCheckpoint as error:
            return error

    waiting, at_once = list(numbers), 1
    while waiting:
        some, waiting = waiting[-at_once:][::-1], waiting[:-at_once]
        with Threads(len(some), thread_name_prefix="raysharded-claims") as pool:
            found = list(pool.map(read, some))
        yield from zip(some, found, strict=True)
        at_once = _AT_ONCE


def read_claim(storage: Storage, number: int, *, key: SigningKey | None = None) -> Claim:
    """The claim of a number. Raises CorruptCheckpoint if it is damaged, NoSuchKey if it does not exist.

    With a key, raises Unsigned or another RefusedCheckpoint if the key did not sign it for this run and number.
    """
    at = claim_key(number)
    return decode_claim(
        read_small(storage, at), number, join_url(storage.url, at), key=key, place=place_of(storage.url, at)
    )


def encode_claim(claim: Claim, *, key: SigningKey | None = None, place: str = "") -> bytes:
    """The claim in its stored form, signed if a key is given."""
    body: dict[str, Any] = {
        name: getattr(claim, name) for name in ("number", "id", "kind", "generation", "writer", "created_at")
    }
    if claim.kind == "commit":
        body |= {"step": claim.step, "prefix": claim.prefix, "manifest_digest": claim.digest}
    if claim.after is not None:
        body["after"] = list(claim.after)
    return signed_json.seal(body, _FORMAT, key=key, place=place)


def decode_claim(data: bytes, number: int, where: str, *, key: SigningKey | None = None, place: str = "") -> Claim:
    """The claim in `data`, stored under `number`. Raises CorruptCheckpoint, and as `read_claim` does with a key."""
    body = signed_json.unseal(data, _FORMAT, where, key=key, place=place)
    kind = body.get("kind")
    if (kind != "owner" and kind != "commit") or body.get("number") != number:
        raise CorruptCheckpoint(f"{where}: kind {kind!r} and number {body.get('number')!r} are invalid. Restore it.")
    commits = kind == "commit"
    return Claim(
        number=number,
        id=signed_json.text(body, "id", where),
        kind=kind,
        generation=signed_json.whole(body, "generation", where),
        writer=signed_json.name(body, "writer", where),
        created_at=signed_json.seconds(body, "created_at", where),
        step=signed_json.whole(body, "step", where) if commits else 0,
        prefix=signed_json.folder(body, "prefix", where) if commits else "",
        digest=signed_json.text(body, "manifest_digest", where) if commits else "",
        after=_after(body, where) if key is not None else None,
        seal=signed_json.digest_of(data) if key is not None else "",
    )


def _after(body: Mapping[str, Any], where: str) -> tuple[int, str] | None:
    match body.get("after"):
        case None:
            return None
        case [int(number), str(digest)]:
            return number, digest
        case found:
            raise CorruptCheckpoint(f"{where}: after={found!r} is not a number and a digest. Restore it.")
