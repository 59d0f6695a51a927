"""Forks: a new run that begins with another run's checkpoint, and shares its files until it has its own."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from contextlib import suppress

from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.reader import open_checkpoint
from raysharded.checkpoint.retention.catalog import CheckpointRef, list_checkpoints, open_ref
from raysharded.checkpoint.retention.fork_reference import (
    REFERENCE_NAME,
    Reference,
    encode_reference,
    parent_of,
    read_reference,
    refuse_chain,
)
from raysharded.checkpoint.retention.pins import pin, read_pin, unpin
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.storage.named_places import is_same_place
from raysharded.errors import CheckpointError
from raysharded.locations import join_url, refuse_password

_log = logging.getLogger("raysharded.checkpoint")

FORK_PIN = "fork-"
"""Beginning of the tags of forks' pins."""


def fork(
    parent: Storage,
    ref: CheckpointRef,
    run: Storage,
    *,
    key: SigningKey | None = None,
    wall: Callable[[], float] = time.time,
) -> Reference:
    """Make `run`, which has no checkpoint yet, begin with the checkpoint `ref` of the run at `parent`.

    Nothing is copied: the run gets a reference, the parent a pin `fork-...` that keeps the checkpoint until the run has
    its own. A repeated call after a failure completes the fork. A `key` signs both: a fork of a signed checkpoint needs
    it.

    Raises CheckpointError if `ref` is not the parent's own checkpoint, or the run has checkpoints; RefusedCheckpoint if
    the fork would not find its parent, which is on another storage and not allowed; as `open_ref` if the checkpoint
    cannot be used.
    """
    _check_fork(parent, ref, run)
    for url in (parent.url, run.url):
        refuse_password(url, "A fork and its parent name each other in files.", CheckpointError)
    digest = open_ref(parent, ref, key=key).digest
    wanted = Reference(
        parent=parent.url,
        prefix=ref.prefix,
        step=ref.step,
        manifest_digest=digest,
        pin=tag_of(run.url),
        created_at=wall(),
    )
    _check_empty(run, wanted)
    _check_findable(parent, run, wanted)
    pin(parent, wanted.pin, ref, fork=run.url, key=key, wall=wall)
    at, data = f"{wanted.folder}/{REFERENCE_NAME}", encode_reference(wanted, key=key, url=run.url)
    if not run.put_if_absent(at, data):
        found = read_reference(run, wanted.folder)
        if not found.is_same(wanted):
            raise CheckpointError(
                f"{join_url(run.url, wanted.folder)} refers to {found.prefix} of {found.parent} already."
            )
        if key is not None:  # it may have been made without the key
            run.write(at, [data])
    return wanted


def drop_reference(run: Storage, ref: CheckpointRef, *, key: SigningKey | None = None) -> None:
    """Remove the fork's own pin in the parent, then the fork's reference: the fork has its own checkpoint.

    Raises as `remove_own_pin`; RefusedCheckpoint if the key did not sign the reference.
    """
    remove_own_pin(run, read_reference(run, ref.prefix, key=key))
    run.delete(ref.keys)


def remove_own_pin(run: Storage, reference: Reference) -> None:
    """Remove the pin that keeps the parent's checkpoint for the fork at `run`, if it still exists.

    A reference that names another pin, of the parent's user or of another fork, removes none. Raises StorageError if
    the parent's storage fails, RefusedCheckpoint if the parent's place is not allowed.
    """
    parent = parent_of(run, reference)
    if not _is_own_pin(parent, reference.pin, run):
        _log.warning("the pin %r in %s stays: it is not that of the fork %s", reference.pin, parent.url, run.url)
        return
    with suppress(CheckpointError):  # already unpinned
        unpin(parent, reference.pin)


def _is_own_pin(parent: Storage, tag: str, run: Storage) -> bool:
    """Whether the tag is the fork's; or whether the pin names this fork by another URL."""
    if tag == tag_of(run.url):
        return True
    try:
        kept_for = read_pin(parent, tag).fork
    except (NoSuchKey, CheckpointError):
        return False
    return tag == tag_of(kept_for) and is_same_place(kept_for, run.url)


def _check_findable(parent: Storage, run: Storage, wanted: Reference) -> None:
    found = parent_of(run, wanted)
    if found.url != parent.url:  # by another server, password or option than the parent's URL has here
        open_checkpoint(found, wanted.prefix, digest=wanted.manifest_digest)


def _check_fork(parent: Storage, ref: CheckpointRef, run: Storage) -> None:
    where = join_url(parent.url, ref.prefix)
    if parent.url == run.url:
        raise CheckpointError(f"{run.url} cannot be a fork of itself. Give the new run another folder.")
    if ref.state == "reference":
        refuse_chain(parent, ref.prefix, where)
    if ref.state != "committed":
        raise CheckpointError(f"step {ref.step} under {where} is not committed ({ref.state}). {ref.reason}".rstrip())


def _check_empty(run: Storage, wanted: Reference) -> None:
    for ref in list_checkpoints(run):
        if ref.prefix != wanted.folder or ref.state != "reference":
            raise CheckpointError(
                f"{run.url} has checkpoints already, first {ref.prefix} ({ref.state}): a fork is a new run. Give it "
                "another folder."
            )


def tag_of(url: str) -> str:
    """Tag of the pin that keeps a fork's checkpoint, derived from the fork's URL."""
    name = url.partition("?")[0].rstrip("/").rsplit("/", 1)[-1]
    plain = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)[:64]
    return f"{FORK_PIN}{plain}-{hashlib.blake2b(url.encode(), digest_size=4).hexdigest()}"
