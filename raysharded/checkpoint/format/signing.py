"""Signatures: HMAC-SHA256 (RFC 2104) with a key that only permitted writers of checkpoints have.

A signed object begins with its digest, and its signature follows: `{"digest":"<64>","hmac":"<64>",...`. The signature
covers all bytes from byte 149 on. The digest covers all bytes from byte 75 on, so that a reader without the key can
check it too.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from dataclasses import dataclass, field
from functools import cache

from raysharded.errors import CheckpointError, ConfigError, RefusedCheckpoint
from raysharded.locations import name_of, require_file, with_home

ENVIRONMENT_KEY = "RAYSHARDED_CHECKPOINT_KEY"
ENVIRONMENT_KEY_FILE = "RAYSHARDED_CHECKPOINT_KEY_FILE"
ENVIRONMENT_REQUIRE = "RAYSHARDED_REQUIRE_SIGNED"
MIN_KEY_BYTES = 16
_log = logging.getLogger("raysharded.checkpoint")
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
        """The key in a file, without surrounding white space.

        Raises CheckpointError if it cannot be read, or if every user of the machine may write to it: then anybody may
        choose the key. A file that others may read, or that the group may write to, is a warning, once per process.
        """
        name = os.fspath(path)
        at = with_home(name)
        try:
            require_file(at)
            with open(at, "rb") as file:
                found, secret = os.fstat(file.fileno()), file.read().strip()
        except OSError as error:
            raise CheckpointError(f"the signing key file {name} cannot be read: {error}.") from error
        if found.st_mode & stat.S_IWOTH:
            raise CheckpointError(
                f"every user of this machine may write to the signing key file {name}, and so choose the key. Make a "
                f"new key, and restrict the file: `chmod 600 {name}`."
            )
        others = [word for word, bits in _EXPOSED if found.st_mode & bits]
        if found.st_uid not in (os.geteuid(), 0):
            others.append("another user owns it")
        if others:
            _warn_of_exposure(name, " and ".join(others))
        return SigningKey(secret)

    @property
    def identity(self) -> str:
        """Name of the key, which does not reveal it: 16 hexadecimal digits."""
        return self.sign(b"raysharded signing key")[:16]

    def sign(self, data: bytes | memoryview) -> str:
        """Signature of the data: 64 hexadecimal digits."""
        return hmac.new(self.secret, data, hashlib.sha256).hexdigest()

    def verifies(self, signature: bytes, data: bytes | memoryview) -> bool:
        """Whether this key made the signature of `data`. Takes the same time for every wrong one."""
        return hmac.compare_digest(self.sign(data).encode("ascii"), signature)


def signing_key_from_environment(*, require_signed: bool = False) -> SigningKey | None:
    """The key in $RAYSHARDED_CHECKPOINT_KEY, or in the file that $RAYSHARDED_CHECKPOINT_KEY_FILE names, or None.

    Raises CheckpointError if a variable is set and blank, as when a secret was not mounted. It raises CheckpointError
    for a missing key too with `require_signed`, or with RAYSHARDED_REQUIRE_SIGNED=1 in the environment.
    """
    text, path = (_value_of(name) for name in (ENVIRONMENT_KEY, ENVIRONMENT_KEY_FILE))
    if text is not None:
        return SigningKey(os.fsencode(text))  # unchanged, even if it is not UTF-8
    if path is not None:
        return SigningKey.from_file(path)
    demanded = _demanded()
    if require_signed or demanded:
        raise CheckpointError(
            f"signed checkpoints are required ({f'${ENVIRONMENT_REQUIRE}' if demanded else 'require_signed'}), and "
            f"there is no key. Set ${ENVIRONMENT_KEY_FILE} or ${ENVIRONMENT_KEY}, or give the key: "
            "SigningKey.from_file(path), CheckpointConfig(signing_key_file=...)."
        )
    return None


_EXPOSED = (
    ("other users may read it", stat.S_IROTH),
    ("its group may read it", stat.S_IRGRP),
    ("its group may write to it", stat.S_IWGRP),
)


def _value_of(name: str) -> str | None:
    """A variable's value without surrounding white space. Raises CheckpointError if nothing is left."""
    value = os.environ.get(name)
    if value is not None and not value.strip():
        raise CheckpointError(
            f"${name} is set and empty: was the secret mounted? Set it to the key, or unset it to work without "
            "signatures."
        )
    return None if value is None else value.strip()


def _demanded() -> bool:
    """Whether the environment requires signed checkpoints. Raises CheckpointError for a value that is not 0 or 1."""
    value = os.environ.get(ENVIRONMENT_REQUIRE, "0").strip()
    if value not in ("0", "1"):
        raise CheckpointError(f"${ENVIRONMENT_REQUIRE} is {value!r}: set it to 1, or to 0.")
    return value == "1"


@cache
def _warn_of_exposure(name: str, others: str) -> None:
    _log.warning("signing key file %s: %s. Who can read it can sign checkpoints: `chmod 600 %s`.", name, others, name)


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
