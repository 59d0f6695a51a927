"""The seam to storage: a few methods over keys ("a/b/c") below one URL.

A storage promises:
* `write` is durable when it returns. A writer that died in it leaves nothing under the key, or half a file on backends
  that can no better; what it leaves elsewhere is found by `unfinished`.
* `put_if_absent` lets exactly one of many racing writers win (docs/storage.md says where that is best effort).
* Every failure is a StorageError that names the URL, the operation, the cause and what to do.
* What may pass by itself is tried again (`retry`), a bounded number of times; `retries` counts it.
* It can be pickled and sent to workers, and used from several threads at once.
"""

from __future__ import annotations

import errno
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from raysharded.checkpoint.format.paths import is_below
from raysharded.errors import StorageError
from raysharded.locations import join_url, local_path, scheme_of

BytesLike = bytes | bytearray | memoryview
Keys = list[str]  # an alias, because inside a class with a method `list` the built-in cannot be named


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """A write that has not ended: it is still going on, or its writer died. A temporary file, a multipart upload."""

    key: str
    """What was to be written."""
    token: str
    """How the storage finds it: the temporary file's name, the upload's id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """What a storage is like to use."""

    span_bytes: int
    """Bytes to ask for in one read: so many that its fixed cost does not matter."""
    num_readers: int
    """Reads in flight at once that are worth it."""
    partitioned: bool
    """Whether keys that begin alike share one server's throughput, as on S3: then keys of many writers must not."""


class NoSuchKey(StorageError):
    """There is nothing under the key."""


class Storage(Protocol):
    """Bytes under keys. Keys are relative, with `/` between parts, and never leave the storage's URL."""

    @property
    def url(self) -> str:
        """Where the keys live; absolute, without a trailing `/`."""
        ...

    @property
    def traits(self) -> Traits:
        """How much to read at once, and in how many requests."""
        ...

    @property
    def retries(self) -> int:
        """How many operations of this object were tried again, in this process."""
        ...

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        """The concatenation of `parts` under `key`, replacing what was there; durable on return.

        `parts` is iterated from its start by every attempt, and need not be held in memory as a whole: beyond the
        part at hand, a storage holds a bounded number of bytes.
        """
        ...

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        """Up to `size` bytes from `offset` on (None: to the end); fewer at the end. Raises NoSuchKey."""
        ...

    def read_into(self, key: str, offset: int, outs: Sequence[memoryview]) -> int:
        """The bytes from `offset` on, in one request, straight into the `outs` (writable, of bytes, 1 or more), one
        after the other; how many: fewer than they hold at the end of the file only. Raises NoSuchKey."""
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """True if `data` is now under `key`, False if something was there first; durable on return.

        `data` should name its writer: after a failure in the middle, who wins is told by comparing.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the keys, in any order; those that do not exist are passed over. What must be gone before the rest
        is deleted by a call of its own."""
        ...

    def size(self, key: str) -> int:
        """Bytes under `key`. Raises NoSuchKey."""
        ...

    def list(self, prefix: str = "") -> Keys:
        """Every key below the folder `prefix`, at any depth, sorted; [] if there is none."""
        ...

    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        """The writes below the folder `prefix` that have not ended."""
        ...

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """Remove what unfinished writes left; their writers, if they live, fail. Those that ended are passed over."""
        ...


def open_storage(url: str) -> Storage:
    """The storage at a folder, a file:// URL, an s3:// URL, or any other fsspec URL. Touches nothing yet.

    `fsspec+s3://...` and the like are opened by fsspec although there is a storage of our own. See docs/storage.md.
    Raises as `local_path`, and StorageError for an s3:// URL that means nothing.
    """
    from raysharded.checkpoint.storage.local import LocalStorage

    path = local_path(url)
    if path is not None:
        return LocalStorage(path)
    scheme = scheme_of(url)
    if scheme == "s3" and "::" not in url:
        from raysharded.checkpoint.storage.s3 import S3Storage

        return S3Storage(join_url(url))
    from raysharded.checkpoint.storage.fsspec import FsspecStorage

    return FsspecStorage(join_url(url))


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
    if not is_below(key):
        raise StorageError(
            f"{key!r} is not a key below {url}: use non-empty parts between single '/', none of them '.' or '..'."
        )


def storage_error(
    url: str, operation: str, key: str, cause: Exception, *, said: str | None = None, remedy: str | None = None
) -> StorageError:
    """The StorageError for a failed operation: what, where, why (`said`, or the cause itself) and what to do (by the
    cause, if no `remedy` is known). NoSuchKey if nothing was there."""
    where = join_url(url, key) if key else url
    if isinstance(cause, FileNotFoundError) and operation in ("read", "size"):
        return NoSuchKey(f"{operation} {where} failed: there is no such file.")
    why = (said or f"{type(cause).__name__}: {cause}").rstrip(".")
    return StorageError(f"{operation} {where} failed: {why}. {remedy or _remedy(operation, cause)}")


def _remedy(operation: str, cause: Exception) -> str:
    if isinstance(cause, ImportError):
        return "Install the package it names on the driver and on every worker."
    if isinstance(cause, PermissionError) and operation in ("read", "size", "list"):
        return "Give this user read access to it, and to the folders above it."
    if isinstance(cause, PermissionError):
        return "Give this user write access to it, or choose another storage_path."
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space, lower keep_last, or choose another storage_path."
    if isinstance(cause, OSError) and cause.errno == errno.EROFS:
        return "The file system is read-only: choose another storage_path."
    if isinstance(cause, (NotADirectoryError, FileExistsError, IsADirectoryError)):
        return "A file and a folder have the same path there: move one away, or choose another storage_path."
    return "Check that the URL is right and that it can be reached from this machine with these credentials."
