"""Deletion of a committed checkpoint in two phases, so that nobody reads half of it.

1. Retire: the tombstone `deleting.json` is put beside the manifest, pins are checked once more, and the manifest is
   deleted. From now on no one finds the checkpoint; readers that had opened it can continue.
2. Remove: its data is deleted once a further checkpoint has been committed. Until then, a whole interval between two
   checkpoints, readers have time to finish.

If there is no space for a tombstone, and no reader needs time, the data goes first and the manifest last. An
interruption then leaves a committed checkpoint without files, which is never used and is deleted again.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence

from raysharded.checkpoint.format.paths import MANIFEST_NAME
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.retention.catalog import CheckpointRef
from raysharded.checkpoint.retention.claim_history import History
from raysharded.checkpoint.retention.pins import list_pins
from raysharded.checkpoint.retention.tombstone import read_tombstone, tombstone_key, write_tombstone
from raysharded.checkpoint.storage import NoSuchKey, Storage, Unfinished
from raysharded.errors import CorruptCheckpoint, RefusedCheckpoint, StorageError


def retire(
    storage: Storage,
    ref: CheckpointRef,
    *,
    number: int,
    key: SigningKey | None = None,
    wall: Callable[[], float] = time.time,
) -> bool:
    """True if a checkpoint was made invisible, False if it stays. `number`: the newest claim's.

    It stays if its folder is a link, and then nothing is done, or if it was pinned meanwhile. Then the tombstone stays:
    the deletion is not cancelled, and the checkpoint cannot be pinned again.
    """
    if ref.linked:
        return False
    write_tombstone(storage, ref.prefix, newest_claim=number, created_at=wall(), key=key)
    if any(pin.prefix == ref.prefix for pin in list_pins(storage)):
        return False
    storage.delete([f"{ref.prefix}/{MANIFEST_NAME}"])
    return True


def remove_unmarked(storage: Storage, ref: CheckpointRef) -> bool:
    """True if a committed checkpoint that no one reads was deleted; False if it was pinned meanwhile, and stays.

    Writes nothing.
    """
    if any(pin.prefix == ref.prefix for pin in list_pins(storage)):
        return False
    last = f"{ref.prefix}/{MANIFEST_NAME}"
    storage.delete(key for key in ref.keys if key != last)
    storage.delete([last])
    return True


def is_full(error: StorageError) -> bool:
    """Whether an error means that the storage is full."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)


def why_not_removed(
    storage: Storage, ref: CheckpointRef, history: History, *, key: SigningKey | None = None
) -> str | None:
    """Reason why the data of a retired checkpoint must stay; None if a save was committed since.

    With a key, a checkpoint stays whose tombstone the key did not sign.
    """
    try:
        number = read_tombstone(storage, ref.prefix, key=key)
    except NoSuchKey:
        return "someone else has just removed it"
    except RefusedCheckpoint as error:
        return f"its tombstone proves nothing: {error}"
    except CorruptCheckpoint as error:
        return f"its tombstone is damaged, so that it may still be read: {error}"
    if history.has_commit_after(number):
        return None
    return "it may still be read: nothing was committed since it was deleted"


def remove(storage: Storage, ref: CheckpointRef, unfinished: Sequence[Unfinished] = ()) -> None:
    """Delete all files and unfinished writes of a save that nobody can find or that never was a checkpoint.

    The manifest, if there is one, goes first, and the tombstone last: an interrupted deletion stays invisible, and the
    next call continues it.
    """
    first, last = f"{ref.prefix}/{MANIFEST_NAME}", tombstone_key(ref.prefix)
    storage.discard(unfinished)
    storage.delete([first] if first in ref.keys else [])
    storage.delete(key for key in ref.keys if key not in (first, last))
    storage.delete([last])
