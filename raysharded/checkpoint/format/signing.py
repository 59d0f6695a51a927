"""Signed manifests: HMAC-SHA256 (RFC 2104) with a key that only permitted writers of checkpoints have."""

from __future__ import annotations

import hashlib
import hmac
import os
from dataclasses import dataclass, field

from raysharded.errors import CheckpointError, ConfigError

ENVIRONMENT_KEY = "RAYSHARDED_CHECKPOINT_KEY"
ENVIRONMENT_KEY_FILE = "RAYSHARDED_CHECKPOINT_KEY_FILE"
MIN_KEY_BYTES = 16


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
