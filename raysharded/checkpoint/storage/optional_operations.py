"""Operations that only some storages have, each with what is done for the others.

Listings: top-level folders without their contents, folders that are links, write times and sizes without further
requests. Compare and swap: a file is replaced only if it still has the contents that its writer saw.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

from raysharded.checkpoint.storage import Keys, Storage
from raysharded.errors import StorageError


@runtime_checkable
class HasFolders(Protocol):
    """A storage that lists its folders at a cost independent of their contents. All of raysharded's can."""

    def folders(self) -> Keys: ...


def list_folders(storage: Storage) -> Keys:
    """Names of the top-level folders, sorted; [] if there are none. Raises StorageError."""
    if isinstance(storage, HasFolders):
        return storage.folders()
    return sorted({key.partition("/")[0] for key in storage.list() if "/" in key})


@runtime_checkable
class HasLinks(Protocol):
    """A storage whose folders may be links to folders elsewhere. Its listings do not follow links."""

    def links(self, prefix: str = "") -> Keys: ...


def list_links(storage: Storage, prefix: str = "") -> Keys:
    """Links to folders directly in the folder `prefix`, sorted. To list a link's contents, pass it as prefix.

    Nothing behind a link may be deleted because it is listed: it may be another's. Raises StorageError.
    """
    return storage.links(prefix) if isinstance(storage, HasLinks) else []


@runtime_checkable
class HasFolderTree(Protocol):
    """A storage in which folders may exist without files."""

    def remove_folders(self, prefix: str) -> Keys: ...


def remove_folders(storage: Storage, prefix: str) -> Keys:
    """Remove the folder `prefix` and those in it as far as they have no files, and the links to folders in them.

    Returns the links; what they lead to stays. For "" only the storage's own folder, if it is empty. Raises
    StorageError.
    """
    return storage.remove_folders(prefix) if isinstance(storage, HasFolderTree) else []


@runtime_checkable
class HasTimes(Protocol):
    """A storage whose listings can include write times without more requests. All of raysharded's can."""

    def times(self, name: str | None, prefix: str = "") -> Mapping[str, float | None]: ...


def list_times(storage: Storage, name: str | None, prefix: str = "") -> Mapping[str, float | None]:
    """Map from every key below the folder `prefix` whose last part is `name` (None: any), sorted, to its write time.

    Times are in seconds since the Unix epoch, by the storage's clock; None where unknown. Raises StorageError.
    """
    if isinstance(storage, HasTimes):
        return storage.times(name, prefix)
    return dict.fromkeys(key for key in storage.list(prefix) if is_called(key, name))


def is_called(key: str, name: str | None) -> bool:
    """Whether the last part of a key is `name`; None matches any."""
    return name is None or last_part(key) == name


def last_part(key: str) -> str:
    """File name of a key."""
    return key.rpartition("/")[2]


@runtime_checkable
class HasSizes(Protocol):
    """A storage whose listings can include sizes without more requests."""

    def sizes(self, prefix: str = "") -> Mapping[str, int | None]: ...


def list_sizes(storage: Storage, prefix: str) -> Mapping[str, int | None]:
    """Map from every key below the folder `prefix`, at any depth, sorted, to its bytes; None if not listed.

    Raises StorageError.
    """
    return storage.sizes(prefix) if isinstance(storage, HasSizes) else dict.fromkeys(storage.list(prefix))


@runtime_checkable
class HasSizesOf(Protocol):
    """A storage that finds the sizes of many known keys faster than it lists a folder."""

    def sizes_of(self, keys: Sequence[str]) -> Mapping[str, int]: ...


def sizes_of(storage: Storage, keys: Sequence[str]) -> Mapping[str, int | None]:
    """Map from those of these keys that exist to their bytes, None if not listed; it may have other keys, too.

    Raises StorageError.
    """
    return storage.sizes_of(keys) if isinstance(storage, HasSizesOf) else list_sizes(storage, "")


@runtime_checkable
class CanSwap(Protocol):
    """A storage that can compare and swap: folders, and S3 servers that honour `If-Match`."""

    def swaps(self) -> bool: ...

    def swap(self, key: str, expected: bytes, data: bytes) -> bool: ...


def require_swaps(storage: Storage) -> CanSwap:
    """The storage. Raises StorageError if it cannot compare and swap."""
    if isinstance(storage, CanSwap) and storage.swaps():
        return storage
    raise StorageError(
        f"{storage.url}: nothing can be overwritten safely there, as this storage cannot compare and swap. Save to a "
        "new uri, or to a folder or an S3 server that honours If-Match."
    )


def swap(storage: Storage, key: str, expected: bytes, data: bytes) -> bool:
    """True if `data` is now under `key`, where `expected` was; False if something else was, or nothing.

    Of writers with the same `expected`, exactly one wins. Readers get one of the two whole, at any moment. `data`
    should name its writer: after a failure in the middle, a comparison shows who won. Raises StorageError, also as
    `require_swaps`.
    """
    return require_swaps(storage).swap(key, expected, data)
