"""Folders right in a storage, without listing what is in them; which of them are elsewhere, by a link; and when files
were written, as far as a listing tells it.
"""

from __future__ import annotations

from collections.abc import Mapping
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


@runtime_checkable
class HasTimes(Protocol):
    """A storage that can tell with a listing when files were written, in no more requests. All of ours can."""

    def times(self, name: str | None, prefix: str = "") -> Mapping[str, float | None]: ...


def list_times(storage: Storage, name: str | None, prefix: str = "") -> Mapping[str, float | None]:
    """Every key below the folder `prefix` whose last part is `name` (None: any), sorted -> when it was written, in
    seconds since the Unix epoch, by the storage's clock; None where the storage does not tell. Raises StorageError.
    """
    if isinstance(storage, HasTimes):
        return storage.times(name, prefix)
    return dict.fromkeys(key for key in storage.list(prefix) if is_called(key, name))


def is_called(key: str, name: str | None) -> bool:
    """Whether the last part of a key is the name; None is any."""
    return name is None or last_part(key) == name


def last_part(key: str) -> str:
    """Of a key: what a file is called."""
    return key.rpartition("/")[2]
