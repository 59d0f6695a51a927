"""How large files are, where that costs no further request: some storages tell it in a listing, a disk when asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.storage.local import LocalStorage


@runtime_checkable
class HasSizes(Protocol):
    """A storage that can tell the sizes with the keys, in no more requests."""

    def sizes(self, prefix: str = "") -> Mapping[str, int | None]: ...


def list_sizes(storage: Storage, prefix: str) -> Mapping[str, int | None]:
    """Every key below the folder `prefix`, at any depth, sorted -> its bytes; None where listing does not tell them.

    Raises StorageError.
    """
    return storage.sizes(prefix) if isinstance(storage, HasSizes) else dict.fromkeys(storage.list(prefix))


def size_of_listed(storage: Storage, key: str, listed: int | None) -> int | None:
    """Bytes of a file, as listed or as a disk says; None where it would have to be asked for. Raises StorageError."""
    if listed is not None or not isinstance(storage, LocalStorage):
        return listed
    try:
        return storage.size(key)
    except NoSuchKey:
        return None
