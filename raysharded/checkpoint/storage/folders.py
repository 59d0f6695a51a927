"""What folders there are right in a storage, without listing what is in them."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from raysharded.checkpoint.storage import Keys, Storage


@runtime_checkable
class HasFolders(Protocol):
    """A storage that can tell its folders at a price that does not depend on what they hold. All of ours can."""

    def folders(self) -> Keys: ...


def list_folders(storage: Storage) -> Keys:
    """The names of the folders right in it, sorted; [] if there are none. Raises StorageError."""
    if isinstance(storage, HasFolders):
        return storage.folders()
    return sorted({key.partition("/")[0] for key in storage.list() if "/" in key})
