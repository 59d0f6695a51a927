"""The seam to storage: a few methods over keys ("a/b/c") below one URL.

A storage promises:
* `write` is durable when it returns; what a writer that died in it leaves under the key is undefined.
* `put_if_absent` lets exactly one of many racing writers win (see FsspecStorage for where that is best effort).
* Every failure is a StorageError that names the URL, the operation, the cause and what to do.
* It can be pickled and sent to workers, and used from several threads at once.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Protocol
from urllib.parse import unquote

from raysharded.checkpoint.paths import is_inside
from raysharded.errors import StorageError

BytesLike = bytes | bytearray | memoryview
Keys = list[str]  # an alias, because inside a class with a method `list` the built-in cannot be named

TEMPORARY_MARK = ".tmp-"
"""In the name of a file that is being written, or that a killed writer left behind."""


class NoSuchKey(StorageError):
    """There is nothing under the key."""


class Storage(Protocol):
    """Bytes under keys. Keys are relative, with `/` between parts, and never leave the storage's URL."""

    @property
    def url(self) -> str:
        """Where the keys live; absolute, without a trailing `/`."""
        ...

    def write(self, key: str, parts: Sequence[BytesLike]) -> None:
        """The concatenation of `parts` under `key`, replacing what was there; durable on return."""
        ...

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        """Up to `size` bytes from `offset` on (None: to the end); fewer at the end. Raises NoSuchKey."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """True if `data` is now under `key`, False if something was there first; durable on return.

        `data` should name its writer: after a failure in the middle, who wins is told by comparing.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the keys, in order; those that do not exist are passed over."""
        ...

    def size(self, key: str) -> int:
        """Bytes under `key`. Raises NoSuchKey."""
        ...

    def list(self, prefix: str = "") -> Keys:
        """Every key below the folder `prefix`, at any depth, sorted; [] if there is none.

        Includes files of killed writers, with TEMPORARY_MARK in their names.
        """
        ...


def open_storage(url: str) -> Storage:
    """The storage at a folder, a file:// URL or any other fsspec URL. Touches nothing yet."""
    from raysharded.checkpoint.storage_fsspec import FsspecStorage
    from raysharded.checkpoint.storage_local import LocalStorage

    match = re.match(r"([A-Za-z][A-Za-z0-9+.-]+)(://|::)", url)
    if match is None:
        return LocalStorage(os.path.abspath(os.path.expanduser(url)))
    if match[1] in ("file", "local") and match[2] == "://":
        return LocalStorage(os.path.abspath(unquote(url[match.end() :])))
    return FsspecStorage(url.rstrip("/"))


def check_writable(storage: Storage) -> None:
    """Writes, reads and removes a small file; raises StorageError with the remedy if that fails."""
    key, data = f".raysharded-probe-{secrets.token_hex(6)}", b"raysharded"
    try:
        storage.write(key, [data])
        found = storage.read(key)
        storage.delete([key])
    except StorageError as error:
        raise StorageError(f"the storage path {storage.url} cannot be written to: {error}") from error
    if found != data:
        raise StorageError(
            f"the storage path {storage.url} does not give back what was written to it ({found!r} instead of "
            f"{data!r}). Choose another storage_path."
        )


def check_key(url: str, key: str) -> None:
    """Raises StorageError unless `key` is relative and stays below the storage."""
    if not is_inside(key):
        raise StorageError(
            f"{key!r} is not a key below {url}: use non-empty parts between single '/', none of them '.' or '..'."
        )


def storage_error(url: str, operation: str, key: str, cause: Exception) -> StorageError:
    """The StorageError for a failed operation: what, where, why and what to do. NoSuchKey if nothing was there."""
    where = f"{url}/{key}" if key else url
    said = f"{operation} {where} failed: {type(cause).__name__}: {cause}"
    if isinstance(cause, FileNotFoundError) and operation in ("read", "size"):
        return NoSuchKey(f"{operation} {where} failed: there is no such file.")
    return StorageError(f"{said}. {_remedy(cause)}")


def _remedy(cause: Exception) -> str:
    if isinstance(cause, ImportError):
        return "Install the package it names on the driver and on every worker."
    if isinstance(cause, PermissionError):
        return "Give this user write access to it, or choose another storage_path."
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space, lower keep_last, or choose another storage_path."
    if isinstance(cause, OSError) and cause.errno == errno.EROFS:
        return "The file system is read-only: choose another storage_path."
    if isinstance(cause, (NotADirectoryError, FileExistsError, IsADirectoryError)):
        return "A file and a folder have the same path there: move one away, or choose another storage_path."
    return "Check that the URL is right and that it can be reached from this machine with these credentials."
