"""When files were written, as far as a listing tells it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from raysharded.checkpoint.storage import Storage


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
