"""The proof of a secret between a client and the rendezvous store, and the form of their messages.

A client sends `hello`: `MAGIC`, the length of its prefix (2 bytes), the prefix, and a nonce. The store answers with its
own nonce and its proof, the client with its proof, the store with `WELCOME`. Each proof is an HMAC-SHA256 over both
nonces, so none can be sent twice. Then the client sends a request at a time, and the store one reply for each.

A message is its length (4 bytes), and items: each its length (4 bytes) and its bytes. Numbers are big-endian.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Sequence

MAGIC = b"raysharded store 1\n"
NONCE_BYTES = PROOF_BYTES = 32
WELCOME = b"welcome\n"
MAX_PREFIX_BYTES = 1024
MAX_MESSAGE_BYTES = 2 << 20
MAX_REPLY_BYTES = 128 << 20
"""A reply has what all members of a generation have left: of 1,000 members, 8 MB from gloo alone."""
DONE, LATE = b"done", b"late"
"""First item of a reply: the request was carried out, or its time passed before all keys existed."""
LENGTH = struct.Struct("!I")
HELLO = struct.Struct(f"!{len(MAGIC)}sH")
"""The beginning of `hello`, of which the rest follows from the prefix's length."""


class Nonsense(ValueError):
    """Bytes that no client or store of raysharded sends. The text describes them."""


def secret_of(root: bytes, prefix: str) -> bytes:
    """The secret of the members that meet at this prefix, 32 bytes. Nobody can compute another one from it."""
    return hmac.digest(root, b"generation\0" + prefix.encode(), "sha256")


def proof(secret: bytes, side: bytes, nonces: bytes) -> bytes:
    """The proof that `side` (`client` or `store`) has the secret; `nonces`: the client's, then the store's."""
    return hmac.digest(secret, side + b"\0" + nonces, "sha256")


def is_proof(given: bytes, secret: bytes, side: bytes, nonces: bytes) -> bool:
    return hmac.compare_digest(given, proof(secret, side, nonces))


def hello(prefix: str, nonce: bytes) -> bytes:
    name = prefix.encode()
    return HELLO.pack(MAGIC, len(name)) + name + nonce


def pack(items: Sequence[bytes]) -> bytes:
    """A message of these items."""
    body = b"".join(LENGTH.pack(len(item)) + item for item in items)
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> list[bytes]:
    """The items of a message without its length. Raises Nonsense."""
    items, at = [], 0
    while at < len(body):
        begin = at + LENGTH.size
        if begin > len(body):
            raise Nonsense("a message ends within an item's length")
        at = begin + int(LENGTH.unpack_from(body, at)[0])
        if at > len(body):
            raise Nonsense("a message ends within an item")
        items.append(body[begin:at])
    if not items:
        raise Nonsense("an empty message")
    return items


def length_of(header: bytes, at_most: int = MAX_MESSAGE_BYTES) -> int:
    """The bytes of a message, from the first four. Raises Nonsense for more than such a message may have."""
    size = int(LENGTH.unpack(header)[0])
    if size > at_most:
        raise Nonsense(f"a message of {size} bytes")
    return size
