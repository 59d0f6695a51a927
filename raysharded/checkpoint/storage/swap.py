"""Compare and swap: a file is replaced only if it still has the contents that the writer saw."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from raysharded.checkpoint.storage import Storage
from raysharded.errors import StorageError


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
