"""When files were written, as far as a listing tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from raysharded.checkpoint.storage import Storage


@runtime_checkable
class HasTimes(Protocol):
    """A storage that can tell with a listing when files were written, in no more requests. All of ours can."""

    def times(self, name: str, prefix: str = "") -> Mapping[str, float | None]: ...


def list_times(storage: Storage, name: str, prefix: str = "") -> Mapping[str, float | None]:
    """Every key below the folder `prefix` whose last part is `name`, sorted -> when it was written, in seconds since
    the Unix epoch, by the storage's clock; None where the storage does not tell. Raises StorageError.
    """
    if isinstance(storage, HasTimes):
        return storage.times(name, prefix)
    return dict.fromkeys(key for key in storage.list(prefix) if last_part(key) == name)


def last_part(key: str) -> str:
    """Of a key: what a file is called."""
    return key.rpartition("/")[2]
