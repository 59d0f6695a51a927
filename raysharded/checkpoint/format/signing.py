"""Signatures: HMAC-SHA256 (RFC 2104) with a key that only permitted writers of checkpoints have.

A signed object begins with its digest, and its signature follows: `{"digest":"<64>","hmac":"<64>",...`. The signature
covers all bytes from byte 149 on. The digest covers all bytes from byte 75 on, so that a reader without the key can
check it too.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field

from raysharded.errors import CheckpointError, ConfigError, RefusedCheckpoint
from raysharded.locations import name_of

ENVIRONMENT_KEY = "RAYSHARDED_CHECKPOINT_KEY"
ENVIRONMENT_KEY_FILE = "RAYSHARDED_CHECKPOINT_KEY_FILE"
MIN_KEY_BYTES = 16
_HEAD = b'","hmac":"'
_HEAD_END = len(_HEAD) + 64


class Unsigned(RefusedCheckpoint):
    """An object has no signature, and a signing key is set."""


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A secret of 16 bytes or more. Its holder signs checkpoints, and rejects those that it did not sign."""

    secret: bytes = field(repr=False)
    """Secret bytes, never shown, not even in errors."""

    def __post_init__(self) -> None:
        if not isinstance(self.secret, bytes):
            raise ConfigError(
                f"SigningKey({type(self.secret).__name__}): give the secret as bytes, as in SigningKey(text.encode()), "
                "or the file that holds it: SigningKey.from_file(path)."
            )
        if len(self.secret) < MIN_KEY_BYTES:
            raise CheckpointError(
                f"a signing key of {len(self.secret)} bytes is too short: give {MIN_KEY_BYTES} or more random ones, "
                "for example from `openssl rand -hex 32`."
            )

    @staticmethod
    def from_file(path: str | os.PathLike[str]) -> SigningKey:
        """The key in a file, without surrounding white space. Raises CheckpointError if it cannot be read."""
        try:
            with open(path, "rb") as file:
                return SigningKey(file.read().strip())
        except OSError as error:
            raise CheckpointError(f"the signing key file {os.fspath(path)} cannot be read: {error}.") from error

    def sign(self, data: bytes | memoryview) -> str:
        """Signature of the data: 64 hexadecimal digits."""
        return hmac.new(self.secret, data, hashlib.sha256).hexdigest()

    def verifies(self, signature: bytes, data: bytes | memoryview) -> bool:
        """Whether this key made the signature of `data`. Takes the same time for every wrong one."""
        return hmac.compare_digest(self.sign(data).encode("ascii"), signature)


def signing_key_from_environment() -> SigningKey | None:
    """The key in $RAYSHARDED_CHECKPOINT_KEY, or in the file that $RAYSHARDED_CHECKPOINT_KEY_FILE names, or None."""
    text = os.environ.get(ENVIRONMENT_KEY, "").strip()
    if text:
        return SigningKey(os.fsencode(text))  # unchanged, even if it is not UTF-8
    path = os.environ.get(ENVIRONMENT_KEY_FILE, "")
    return SigningKey.from_file(path) if path else None


def place_of(url: str, key: str) -> str:
    """The place of a run's object as its signature names it: the run's name and the object's storage key.

    `url`: that of the run's storage. A signed object that lies elsewhere, or in another run, is a copy.
    """
    return f"{name_of(url)}/{key}"


def signed(rest: bytes, key: SigningKey | None) -> bytes:
    """All that follows an object's digest, with the signature in front if there is a key."""
    return rest if key is None else _HEAD + key.sign(rest).encode("ascii") + rest


def is_signed(rest: bytes) -> bool:
    """Whether what follows an object's digest begins with a signature, by any key."""
    return rest.startswith(_HEAD)


def check_signature(rest: bytes, key: SigningKey | None, where: str) -> None:
    """Raise RefusedCheckpoint unless the key signed what follows an object's digest: Unsigned if nobody did."""
    if key is None:
        return
    if not is_signed(rest):
        raise Unsigned(
            f"{where} is not signed, and a signing key is set: it is refused. Someone without the key wrote it; to "
            "read it all the same, give no key."
        )
    if not key.verifies(rest[len(_HEAD) : _HEAD_END], rest[_HEAD_END:]):
        raise RefusedCheckpoint(
            f"{where} is signed with another key than the one given: it is refused. Give the key that its writers had."
        )


def check_place(stated: object, place: str, where: str) -> None:
    """Raise RefusedCheckpoint unless a signed object states that it was written for this place."""
    if stated != place:
        raise RefusedCheckpoint(
            f"{where} is signed, but as {stated!r}, not as {place!r}: it is refused. It was copied or moved here from "
            "another place; put back the object that was here, or give the run's folder its name back."
        )
