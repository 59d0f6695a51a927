"""Signed manifests: HMAC-SHA256 (RFC 2104) with a key that only permitted writers of checkpoints have."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
from dataclasses import dataclass, field
from functools import cache

from raysharded.errors import CheckpointError, ConfigError

ENVIRONMENT_KEY = "RAYSHARDED_CHECKPOINT_KEY"
ENVIRONMENT_KEY_FILE = "RAYSHARDED_CHECKPOINT_KEY_FILE"
ENVIRONMENT_REQUIRE = "RAYSHARDED_REQUIRE_SIGNED"
MIN_KEY_BYTES = 16

_log = logging.getLogger("raysharded.checkpoint")


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
        try:
            with open(path, "rb") as file:
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
