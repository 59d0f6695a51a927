"""What lies in a storage, and how large it is where listing tells that anyway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from raysharded.checkpoint.storage import Storage


@runtime_checkable
class HasSizes(Protocol):
    """A storage that can tell the sizes with the keys, in no more requests. All of ours can."""

    def sizes(self, prefix: str = "") -> Mapping[str, int | None]: ...


def list_sizes(storage: Storage, prefix: str) -> Mapping[str, int | None]:
    """Every key below the folder `prefix`, at any depth, sorted -> its bytes; None where listing does not tell them.

    Raises StorageError.
    """
    return storage.sizes(prefix) if isinstance(storage, HasSizes) else dict.fromkeys(storage.list(prefix))
