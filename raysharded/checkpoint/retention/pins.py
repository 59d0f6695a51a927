"""Pins: names for checkpoints that must stay, regardless of the retention rules.

    checkpoints/pins/<tag>.json -> a checkpoint's folder and its manifest's digest

A pin may race with a deletion. A deletion first marks the checkpoint with a tombstone, which stays as long as any of
its files, and then checks for pins. `pin` first puts the pin, and then checks for a tombstone. In any order, one of
them sees the other (Dekker's rule), and the one that does gives way. The mark of a run's removal is such a tombstone.

Law: a checkpoint that `pin` returned for is not deleted before `unpin`.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

from raysharded.checkpoint.format import signed_json
from raysharded.checkpoint.format.paths import CHECKPOINTS_FOLDER, MANIFEST_NAME
from raysharded.checkpoint.format.signing import SigningKey, place_of
from raysharded.checkpoint.removal_mark import is_marked, text_of_removed
from raysharded.checkpoint.retention.catalog import CheckpointRef, open_ref
from raysharded.checkpoint.retention.tombstone import tombstone_key
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.storage.small_objects import read_small
from raysharded.errors import CheckpointError, RefusedCheckpoint
from raysharded.locations import join_url

PINS_FOLDER = f"{CHECKPOINTS_FOLDER}/pins"

_FORMAT = "raysharded-pin"
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KEY = re.compile(rf"{PINS_FOLDER}/({_TAG.pattern})\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class Pin:
    """A name for a checkpoint."""

    tag: str
    """Name of the pin: 1 to 128 letters, digits, '.', '_', '-'."""
    prefix: str
    """Folder of the checkpoint in the storage."""
    step: int
    """Step of the checkpoint."""
    manifest_digest: str
    """Digest of the checkpoint's manifest: no other checkpoint can take its place."""
    id: str
    """Random id that distinguishes the pin from another's of the same tag, when a reply was lost."""
    created_at: float
    """Time in seconds since the Unix epoch, for people."""
    fork: str = ""
    """URL of the fork that needs the checkpoint; empty for other pins, and those of older versions."""


def pin(
    storage: Storage,
    tag: str,
    ref: CheckpointRef,
    *,
    fork: str = "",
    key: SigningKey | None = None,
    wall: Callable[[], float] = time.time,
) -> Pin:
    """Keep a committed checkpoint until `unpin`. The tag may name it already; one caller at a time for a tag.

    Raises CheckpointError if the tag names another or is invalid (valid: 1 to 128 letters, digits, '.', '_', '-').
    Raises it too if the checkpoint is not committed or being deleted.
    """
    at = _key_of(tag)
    if ref.state != "committed":
        what = (
            "the checkpoint of another run: pin it there"
            if ref.state == "reference"
            else f"not committed ({ref.state})"
        )
        raise CheckpointError(f"step {ref.step} under {join_url(storage.url, ref.prefix)} is {what}.")
    digest = ref.digest or open_ref(storage, ref, key=key).digest
    wanted = Pin(
        tag=tag,
        prefix=ref.prefix,
        step=ref.step,
        manifest_digest=digest,
        id=secrets.token_hex(8),
        created_at=wall(),
        fork=fork,
    )
    body = {name: value for name, value in asdict(wanted).items() if name != "fork" or value}
    put = storage.put_if_absent(at, signed_json.seal(body, _FORMAT, key=key, place=place_of(storage.url, at)))
    found = wanted if put else read_pin(storage, tag)
    if (found.prefix, found.manifest_digest) != (ref.prefix, digest):
        raise CheckpointError(
            f"the tag {tag!r} in {storage.url} names step {found.step} ({found.prefix}) already. Unpin it, or choose "
            "another tag."
        )
    _give_way_to_deletion(storage, tag, ref, mine=found.id == wanted.id)
    return found


def unpin(storage: Storage, tag: str) -> None:
    """Remove the pin; its checkpoint may be deleted from now on. Raises CheckpointError for an unknown tag."""
    tags = _tags(storage)
    if tag not in tags:
        raise CheckpointError(f"there is no tag {tag!r} in {storage.url}; there are: {', '.join(tags) or 'none'}.")
    storage.delete([_key_of(tag)])


def list_pins(storage: Storage, *, key: SigningKey | None = None) -> list[Pin]:
    """All pins, by tag. Raises CorruptCheckpoint if one is damaged: then nothing may be deleted.

    A pin that the key did not sign keeps its checkpoint too, since that deletes nothing. But no fork is looked for at
    the URL in it.
    """
    pins = []
    for tag in _tags(storage):
        try:
            pins.append(_kept(storage, tag, key))
        except NoSuchKey:
            continue  # unpinned meanwhile
    return pins


def _kept(storage: Storage, tag: str, key: SigningKey | None) -> Pin:
    try:
        return read_pin(storage, tag, key=key)
    except RefusedCheckpoint:
        return replace(read_pin(storage, tag), fork="")


def read_pin(storage: Storage, tag: str, *, key: SigningKey | None = None) -> Pin:
    """The pin of a tag. Raises NoSuchKey if it does not exist, CorruptCheckpoint if it is damaged.

    With a key, raises RefusedCheckpoint if the key did not sign it for this run and tag.
    """
    at = _key_of(tag)
    where = join_url(storage.url, at)
    data = read_small(storage, at)
    body = signed_json.unseal(data, _FORMAT, where, key=key, place=place_of(storage.url, at))
    return Pin(
        tag=tag,
        prefix=signed_json.folder(body, "prefix", where),
        step=signed_json.whole(body, "step", where),
        manifest_digest=signed_json.digest(body, "manifest_digest", where),
        id=signed_json.text(body, "id", where),
        created_at=signed_json.seconds(body, "created_at", where),
        fork=signed_json.text(body, "fork", where) if "fork" in body else "",
    )


def _give_way_to_deletion(storage: Storage, tag: str, ref: CheckpointRef, *, mine: bool) -> None:
    if is_marked(storage):
        storage.delete([_key_of(tag)] if mine else [])
        raise CheckpointError(text_of_removed(storage.url))
    files = storage.list(ref.prefix)
    marked, there = tombstone_key(ref.prefix) in files, f"{ref.prefix}/{MANIFEST_NAME}" in files
    where = f"step {ref.step} under {join_url(storage.url, ref.prefix)}"
    if marked and there and not mine:  # the pin existed before this call: the deletion may have given way to it
        raise CheckpointError(
            f"{where} has the tag {tag!r} already, and is marked for deletion: it stays as long as the tag does. "
            "(Unless both came at this very moment: see whether it is still listed.) No other tag can be given to it."
        )
    if marked or not there:
        storage.delete([_key_of(tag)] if mine else [])
        raise CheckpointError(
            f"{where} cannot be pinned any more: {'it is being deleted' if there else 'it has been deleted'}. Pin a "
            "newer one."
        )


def _tags(storage: Storage) -> list[str]:
    matches = (_KEY.fullmatch(key) for key in storage.list(PINS_FOLDER))
    return [match[1] for match in matches if match]


def _key_of(tag: str) -> str:
    if _TAG.fullmatch(tag) is None:
        raise CheckpointError(
            f"{tag!r} cannot be a tag: give 1 to 128 letters, digits, '.', '_' or '-', a letter or digit first."
        )
    return f"{PINS_FOLDER}/{tag}.json"
