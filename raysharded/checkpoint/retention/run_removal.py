"""Deletion of a run's files, so that what is left at any moment is not taken for a run.

1. The mark `claims/removal.json` is put; from now on everyone rejects the run. Pins and other claims are checked once
   more: a pin or a driver that was faster keeps the run, and the mark goes. Otherwise the mark is rewritten as begun.
2. A fork's pins in its parent are removed.
3. The manifests are deleted, then all other files, then the claims, and last the mark.

An interrupted removal leaves the mark, and the next one continues. A removal that finds another's mark in place of its
mark ends: a process that stood still for long deletes nothing of a later run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from raysharded.checkpoint.format.paths import CHECKPOINTS_FOLDER, MANIFEST_NAME, save_folder_of
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.removal_mark import REMOVAL_KEY, RemovalMark, encode_mark, new_mark, read_mark
from raysharded.checkpoint.retention.fork_reference import REFERENCE_NAME, read_reference
from raysharded.checkpoint.retention.forks.fork import remove_own_pin
from raysharded.checkpoint.retention.pins import PINS_FOLDER, list_pins
from raysharded.checkpoint.storage import Storage
from raysharded.checkpoint.storage.optional_operations import list_links, remove_folders
from raysharded.checkpoint.stored_claims import CLAIMS_FOLDER
from raysharded.errors import CheckpointError, ConfigError, RayshardedError, RunOwnedElsewhere, StorageError

_AT_ONCE = 1000
"""Files that are deleted between two checks of the mark."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Deleted:
    """The files of a run that were deleted."""

    num_files: int = 0
    links: tuple[str, ...] = ()
    """Links to folders that were removed; what they lead to is still there."""
    left: tuple[str, ...] = ()
    """Files in the run's folder `checkpoints` that raysharded did not write, and that stay."""


class RunRemoval:
    """The removal of one run by this process, which owns it. One thread."""

    def __init__(
        self,
        storage: Storage,
        folders: Sequence[str],
        *,
        key: SigningKey | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`folders`: the run's folders, besides `checkpoints` and `claims`; all files in them are the run's.

        `key` signs the mark; a mark and a fork's reference that it did not sign decide nothing.
        """
        self._storage, self._folders, self._key, self._wall = storage, folders, key, wall
        self._mark: RemovalMark | None = None

    def begin(self, is_rivalled: Callable[[], bool]) -> None:
        """Mark the run, so that from now on it is none.

        `is_rivalled`: whether another driver has claimed the run. Raises CheckpointError if a checkpoint was pinned
        meanwhile, and RunOwnedElsewhere if a driver was faster: then the run stays as it is.
        """
        before = self._put()
        if before is None or not before.begun:
            self._check(is_rivalled, was_torn=before is not None and not before.id)
        assert self._mark is not None
        self._mark = replace(self._mark, begun=True)
        self._storage.write(REMOVAL_KEY, [self._encoded(self._mark)])

    def _put(self) -> RemovalMark | None:
        """Put this removal's mark. Returns the one of an interrupted removal, which it replaces."""
        self._mark = mark = new_mark(self._wall)
        if self._storage.put_if_absent(REMOVAL_KEY, self._encoded(mark)):
            return None
        before = read_mark(self._storage, key=self._key)
        if before is None or before.id == mark.id:  # the run was removed just now, or the reply was lost
            before = None
        self._mark = replace(mark, begun=before is not None and before.begun)
        self._storage.write(REMOVAL_KEY, [self._encoded(self._mark)])
        return before

    def _encoded(self, mark: RemovalMark) -> bytes:
        return encode_mark(mark, key=self._key, url=self._storage.url)

    def _check(self, is_rivalled: Callable[[], bool], *, was_torn: bool) -> None:
        try:
            if is_rivalled():
                raise RunOwnedElsewhere(f"a driver has just claimed the run at {self._storage.url}: it stays.")
            for pin in list_pins(self._storage, key=self._key):
                raise CheckpointError(
                    f"step {pin.step} of the run at {self._storage.url} was pinned just now, as {pin.tag!r}: the run "
                    "stays. Repeat the removal to see by whom."
                )
        except RayshardedError:
            if not was_torn:  # nothing was deleted: the run is as before
                with suppress(StorageError):
                    self._storage.delete([REMOVAL_KEY])
            raise

    def delete(self, end_lease: Callable[[], None]) -> Deleted:
        """Delete the run's files. `end_lease` ends the writer of the lease, before its folder goes.

        Raises ConfigError if another process has taken the removal over, and StorageError; repeat the removal then.
        """
        storage = self._storage
        refuse_linked(storage, [CHECKPOINTS_FOLDER, CLAIMS_FOLDER, *self._folders])
        listed = storage.list(CHECKPOINTS_FOLDER)
        own = [key for key in listed if is_of_run(key)]
        self._give_back_pins(own)
        self._delete([key for key in own if key.endswith(f"/{MANIFEST_NAME}")])
        self._delete(own)
        links = self._clear(CHECKPOINTS_FOLDER)
        end_lease()
        num_files = len(own)
        for folder in self._folders:
            found = storage.list(folder)
            self._delete(found)
            links += self._clear(folder)
            num_files += len(found)
        num_files += self._delete_claims()
        left = tuple(key for key in listed if not is_of_run(key))
        return Deleted(num_files=num_files, links=tuple(links), left=left)

    def _give_back_pins(self, keys: Sequence[str]) -> None:
        """Remove the pins that keep the parents' checkpoints for this run, where this run may remove them."""
        for at in keys:
            if at.endswith(f"/{REFERENCE_NAME}"):
                with suppress(CheckpointError):  # it is damaged, or names a place that is not allowed
                    prefix = at.removesuffix(f"/{REFERENCE_NAME}")
                    remove_own_pin(self._storage, read_reference(self._storage, prefix, key=self._key))

    def _delete_claims(self) -> int:
        """Delete all claims, and last the mark. Returns the number of claims."""
        count = 0
        while claims := [key for key in self._storage.list(CLAIMS_FOLDER) if key != REMOVAL_KEY]:
            self._delete(claims)
            count += len(claims)
        self._clear(CLAIMS_FOLDER)
        self._check_mark()
        self._storage.delete([REMOVAL_KEY])
        remove_folders(self._storage, CLAIMS_FOLDER)
        remove_folders(self._storage, "")
        return count

    def _clear(self, folder: str) -> list[str]:
        """Discard unfinished writes in a folder, and remove the folders and links that are left. Returns the links."""
        is_own = is_of_run if folder == CHECKPOINTS_FOLDER else bool
        writes = [write for write in self._storage.unfinished(folder) if is_own(write.key)]
        if writes:
            self._check_mark()
            self._storage.discard(writes)
        return remove_folders(self._storage, folder)

    def _delete(self, keys: Sequence[str]) -> None:
        for first in range(0, len(keys), _AT_ONCE):
            self._check_mark()
            self._storage.delete(keys[first : first + _AT_ONCE])

    def _check_mark(self) -> None:
        found = read_mark(self._storage, key=self._key)
        if self._mark is None or found is None or found.id != self._mark.id:
            by = f" ({found})" if found else ""
            raise ConfigError(
                f"another process{by} has taken over the removal of the run at {self._storage.url}: this one ends."
            )


def is_of_run(key: str) -> bool:
    """Whether a key below `checkpoints` belongs to a save or is a pin; others belong to the user who put them there."""
    return save_folder_of(key) is not None or key.startswith(f"{PINS_FOLDER}/")


def refuse_linked(storage: Storage, folders: Sequence[str]) -> None:
    """Raise ConfigError if one of the run's folders is a link: nothing behind it may be deleted."""
    linked = [link for link in list_links(storage) if link in folders]
    if linked:
        raise ConfigError(
            f"the run at {storage.url} stays: its folder {linked[0]} is a link to a folder elsewhere, and nothing is "
            "deleted there. Move that folder here in place of the link, or delete both by hand; then repeat this."
        )
