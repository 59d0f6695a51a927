"""Compare and swap: a file is replaced only if it still is what the writer saw."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from raysharded.checkpoint.storage import Storage
from raysharded.errors import StorageError


@runtime_checkable
class CanSwap(Protocol):
    """A storage that can do it: folders, and servers of S3 that honour `If-Match`."""

    def swaps(self) -> bool: ...

    def swap(self, key: str, expected: bytes, data: bytes) -> bool: ...


def require_swaps(storage: Storage) -> CanSwap:
    """The storage. Raises StorageError if it cannot do it."""
    if isinstance(storage, CanSwap) and storage.swaps():
        return storage
    raise StorageError(
        f"{storage.url}: nothing can be overwritten safely there, as this storage cannot compare and swap. Save to a "
        "uri of its own, or to a folder or a server of S3 that honours If-Match."
    )


def swap(storage: Storage, key: str, expected: bytes, data: bytes) -> bool:
    """True if `data` is now under `key`, where `expected` was; False if something else was, or nothing.

    Of writers that expect the same, exactly one wins. Whoever reads gets one of the two whole, at any moment. `data`
    should name its writer: after a failure in the middle, who won is told by comparing. Raises StorageError, also as
    `require_swaps`.
    """
    return require_swaps(storage).swap(key, expected, data)
