"""The mark of a checkpoint whose deletion has begun: <folder>/deleting.json."""

from __future__ import annotations

from raysharded.checkpoint.format import signed_json
from raysharded.checkpoint.format.signing import SigningKey, place_of
from raysharded.checkpoint.storage import Storage
from raysharded.checkpoint.storage.small_objects import read_small
from raysharded.locations import join_url

TOMBSTONE_NAME = "deleting.json"
"""File that marks a checkpoint for deletion. Without a manifest, the checkpoint is retired and its data goes later."""

_FORMAT = "raysharded-tombstone"


def tombstone_key(prefix: str) -> str:
    """Storage key of the tombstone in a save's folder."""
    return f"{prefix}/{TOMBSTONE_NAME}"


def write_tombstone(
    storage: Storage, prefix: str, *, newest_claim: int, created_at: float, key: SigningKey | None
) -> None:
    """Mark a save for deletion, signed if a key is given. `newest_claim`: the newest claim's number."""
    at = tombstone_key(prefix)
    body = {"newest_claim": newest_claim, "created_at": created_at}
    storage.write(at, [signed_json.seal(body, _FORMAT, key=key, place=place_of(storage.url, at))])


def read_tombstone(storage: Storage, prefix: str, *, key: SigningKey | None) -> int:
    """Number of the newest claim when the deletion began.

    Raises NoSuchKey, CorruptCheckpoint if it is damaged, and RefusedCheckpoint if a key is given that did not sign it.
    """
    at = tombstone_key(prefix)
    where = join_url(storage.url, at)
    data = read_small(storage, at)
    body = signed_json.unseal(data, _FORMAT, where, key=key, place=place_of(storage.url, at))
    return signed_json.whole(body, "newest_claim", where)
