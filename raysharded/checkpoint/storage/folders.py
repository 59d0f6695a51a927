"""What folders there are right in a storage, without listing what is in them; and which are elsewhere, by a link."""

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


@runtime_checkable
class HasLinks(Protocol):
    """A storage whose folders may be links to folders elsewhere. Its listings do not follow those."""

    def links(self, prefix: str = "") -> Keys: ...


def list_links(storage: Storage, prefix: str = "") -> Keys:
    """The links to folders that are right in the folder `prefix`, sorted. To list what is in one, name it as prefix.

    Nothing behind one may be deleted for being in a listing: it may be another's. Raises StorageError.
    """
    return storage.links(prefix) if isinstance(storage, HasLinks) else []
