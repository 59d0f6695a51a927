"""File sizes without further requests: from listings of some storages, or from a disk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.storage.local import LocalStorage


@runtime_checkable
class HasSizes(Protocol):
    """A storage whose listings can include sizes without more requests."""

    def sizes(self, prefix: str = "") -> Mapping[str, int | None]: ...


def list_sizes(storage: Storage, prefix: str) -> Mapping[str, int | None]:
    """Map from every key below the folder `prefix`, at any depth, sorted, to its bytes; None if not listed.

    Raises StorageError.
    """
    return storage.sizes(prefix) if isinstance(storage, HasSizes) else dict.fromkeys(storage.list(prefix))


def size_of_listed(storage: Storage, key: str, listed: int | None) -> int | None:
    """Bytes of a file, as listed or from a disk; None if that needs a request. Raises StorageError."""
    if listed is not None or not isinstance(storage, LocalStorage):
        return listed
    try:
        return storage.size(key)
    except NoSuchKey:
        return None
