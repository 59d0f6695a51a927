"""Forks: a new run that begins with another run's checkpoint, and shares its files until it has its own."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress

from raysharded.checkpoint.retention.catalog import CheckpointRef, list_checkpoints, open_ref
from raysharded.checkpoint.retention.fork_reference import (
    REFERENCE_NAME,
    Reference,
    encode_reference,
    read_reference,
    refuse_chain,
)
from raysharded.checkpoint.retention.pins import pin, unpin
from raysharded.checkpoint.storage import Storage, open_storage
from raysharded.errors import CheckpointError
from raysharded.locations import join_url, refuse_password

FORK_PIN = "fork-"
"""Beginning of the tags of forks' pins."""


def fork(parent: Storage, ref: CheckpointRef, run: Storage, *, wall: Callable[[], float] = time.time) -> Reference:
    """Make `run`, which has no checkpoint yet, begin with the checkpoint `ref` of the run at `parent`.

    Nothing is copied: the run gets a reference, the parent a pin `fork-...` that keeps the checkpoint until the run has
    its own. A repeated call after a failure completes the fork. Raises CheckpointError if `ref` is not the parent's own
    checkpoint, or the run has checkpoints; as `open_ref` if the checkpoint cannot be used.
    """
    _check_fork(parent, ref, run)
    for url in (parent.url, run.url):
        refuse_password(url, "A fork and its parent name each other in files.", CheckpointError)
    digest = open_ref(parent, ref).digest
    wanted = Reference(
        parent=parent.url,
        prefix=ref.prefix,
        step=ref.step,
        manifest_digest=digest,
        pin=tag_of(run.url),
        created_at=wall(),
    )
    _check_empty(run, wanted)
    pin(parent, wanted.pin, ref, fork=run.url, wall=wall)
    if not run.put_if_absent(f"{wanted.folder}/{REFERENCE_NAME}", encode_reference(wanted)):
        found = read_reference(run, wanted.folder)
        if not found.is_same(wanted):
            raise CheckpointError(
                f"{join_url(run.url, wanted.folder)} refers to {found.prefix} of {found.parent} already."
            )
    return wanted


def drop_reference(run: Storage, ref: CheckpointRef) -> None:
    """Remove the pin in the parent, then the fork's reference: the fork has its own checkpoint.

    Raises StorageError if the parent's storage fails, CorruptCheckpoint if the reference is damaged.
    """
    reference = read_reference(run, ref.prefix)
    with suppress(CheckpointError):  # already unpinned
        unpin(open_storage(reference.parent), reference.pin)
    run.delete(ref.keys)


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
