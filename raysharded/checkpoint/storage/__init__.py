"""The storage interface: a few methods over keys ("a/b/c") below one URL.

A storage promises:
* `write` is durable when it returns. A writer that dies in it leaves nothing under the key, or half a file on backends
  that cannot prevent it. `unfinished` finds what it leaves elsewhere.
* `put_if_absent` lets exactly one of many racing writers win (docs/storage.md lists where that is best effort).
* Every failure is a StorageError that names the URL, the operation, the cause and the remedy.
* Transient failures are retried (`retry`) a bounded number of times; `retries` counts them.
* It can be pickled and sent to workers, and used from several threads at once.
"""

from __future__ import annotations

import errno
import os
import resource
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from raysharded.checkpoint.format.paths import is_below
from raysharded.errors import StorageError
from raysharded.locations import join_url, local_path, scheme_of

_NO_FILE = (errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.EINVAL, errno.ENXIO, errno.ENODEV)
"""Errors of the operating system for something else than a file."""

BytesLike = bytes | bytearray | memoryview
Keys = list[str]  # an alias, because inside a class with a method `list` the built-in cannot be named


@dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """A write that is in progress, or whose writer died: a temporary file, a multipart upload."""

    key: str
    """Key of the write."""
    token: str
    """Identity of the write in the storage: the temporary file's name, the upload's id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traits:
    """Performance traits of a storage."""

    span_bytes: int
    """Bytes to request in one read, so that its fixed cost does not matter."""
    num_readers: int
    """Number of concurrent reads that is worthwhile."""
    partitioned: bool
    """Whether keys that begin alike share one server's throughput, as on S3: then those of many writers must not."""


class NoSuchKey(StorageError):
    """Nothing is stored under the key."""


class NotAFile(StorageError):
    """Under the key is no file: a pipe, a device, a folder, or a link that leads nowhere."""


class Storage(Protocol):
    """Bytes under keys. Keys are relative, with `/` between parts, and never leave the storage's URL."""

    @property
    def url(self) -> str:
        """Absolute URL above the keys, without a trailing `/`."""
        ...

    @property
    def traits(self) -> Traits:
        """Performance traits of this storage."""
        ...

    @property
    def retries(self) -> int:
        """Number of retries on this URL in this process."""
        ...

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        """Store the concatenation of `parts` under `key`, replacing any older object; durable on return.

        Every attempt iterates `parts` from its start. They need not fit in memory: beyond the current part, a storage
        holds a bounded number of bytes.
        """
        ...

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        """Up to `size` bytes from `offset` on (None: to the end); fewer at the end. Raises NoSuchKey."""
        ...

    def read_into(self, key: str, offset: int, outs: Sequence[memoryview]) -> int:
        """Read from `offset` on into the `outs`, one after the other; return the number of bytes.

        The `outs` are one or more writable views of bytes. They are filled unless the file ends. Raises NoSuchKey.
        """
        ...

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """True if `data` is now under `key`, False if something was there first; durable on return.

        `data` should name its writer: after a failure in the middle, a comparison shows who won.
        """
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the keys, in any order; missing keys are ignored. Keys that must go first need a separate call."""
        ...

    def size(self, key: str) -> int:
        """Bytes under `key`. Raises NoSuchKey."""
        ...

    def list(self, prefix: str = "") -> Keys:
        """Every key below the folder `prefix`, at any depth, sorted; [] if there is none."""
        ...

    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        """Unfinished writes below the folder `prefix`."""
        ...

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """Remove what unfinished writes left. Their writers, if alive, fail. Writes that have ended are ignored."""
        ...


def open_storage(url: str) -> Storage:
    """The storage at a folder, a file:// URL, an s3:// URL, or any other fsspec URL. Touches nothing yet.

    fsspec opens `fsspec+s3://...` and the like, although raysharded has an S3 storage. See docs/storage.md.
    Raises as `local_path`, and StorageError for an invalid s3:// URL.
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


@contextmanager
def probing(storage: Storage) -> Iterator[None]:
    """A context for a test of storage, after which nothing of it is left.

    The folders that the storage makes for it are removed at the end; one that somebody uses by then stays.
    """
    made: Sequence[str] = getattr(storage, "missing_folders", list)()
    try:
        yield
    finally:
        with suppress(OSError):
            for folder in made:
                os.rmdir(folder)


def check_writable(storage: Storage) -> None:
    """Write, read and remove a small file. Raises StorageError with the remedy if that fails."""
    key, data = f".raysharded-probe-{secrets.token_hex(6)}", b"raysharded"
    with probing(storage):
        try:
            storage.write(key, [data])
            found = storage.read(key)
            storage.delete([key])
        except StorageError as error:
            raise StorageError(f"the storage path {storage.url} cannot be written to: {error}") from error
    if found != data:
        raise StorageError(
            f"the storage path {storage.url} does not give back what was written to it ({found!r} instead of "
            f"{data!r}). Choose another folder or URL."
        )


def check_key(url: str, key: str) -> None:
    """Raise StorageError unless `key` is relative and stays below the storage."""
    if not is_below(key):
        raise StorageError(
            f"{key!r} is not a key below {url}: use non-empty parts between single '/', none of them '.' or '..'."
        )


def storage_error(
    url: str, operation: str, key: str, cause: Exception, *, said: str | None = None, remedy: str | None = None
) -> StorageError:
    """The StorageError for a failed operation: operation, place, cause (or `said`) and remedy.

    Without a `remedy`, the cause determines it. NoSuchKey if there was nothing to read, NotAFile if it is no file.
    """
    where = join_url(url, key) if key else url
    reads = operation in ("read", "size")
    if isinstance(cause, FileNotFoundError) and reads:
        return NoSuchKey(f"{operation} {where} failed: there is no such file.")
    why = (said or f"{type(cause).__name__}: {cause}").rstrip(".")
    is_no_file = isinstance(cause, OSError) and cause.errno in _NO_FILE
    kind = NotAFile if is_no_file and reads else StorageError
    return kind(f"{operation} {where} failed: {why}. {remedy or _remedy(url, operation, cause)}")


def _remedy(url: str, operation: str, cause: Exception) -> str:
    if (number := _too_many_files(cause)) is not None:
        return _open_files(number)
    if isinstance(cause, ImportError):
        return "Install the package it names on the driver and on every worker."
    if isinstance(cause, PermissionError) and operation in ("read", "size", "list"):
        return "Give this user read access to it, and to the folders above it."
    if isinstance(cause, PermissionError):
        return "Give this user write access to it, or choose another folder or URL."
    if isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT):
        return "Free some space, keep fewer checkpoints, or choose another folder or URL."
    if isinstance(cause, OSError) and cause.errno == errno.EROFS:
        return "The file system is read-only: choose another folder or URL."
    if isinstance(cause, (NotADirectoryError, FileExistsError, IsADirectoryError)):
        return "A file and a folder have the same path there: move one away, or choose another folder or URL."
    if isinstance(cause, OSError) and cause.errno == errno.ESTALE:
        return (
            "The file server has forgotten the folder, as after an export of another disk: check that the file system "
            f"is served (`ls {url}`), or mount it again."
        )
    if url.startswith("/"):
        return f"Check the file system that the folder is on: `ls {url}`, `df {url}`, and the kernel's log (`dmesg`)."
    return "Check that the URL is right and that it can be reached from this machine with these credentials."


def _too_many_files(error: BaseException | None) -> int | None:
    """EMFILE or ENFILE, if that is the error or what led to it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            return error.errno
        error = error.__cause__ or error.__context__
    return None


def _open_files(number: int) -> str:
    """The remedy for too many open files, with how many are open and allowed."""
    if number == errno.ENFILE:
        try:
            with open("/proc/sys/fs/file-nr", encoding="ascii") as file:
                used, _, allowed = file.read().split()
        except (OSError, ValueError):  # reading it takes a file, too
            used = allowed = "an unknown number"
        return (
            f"All processes of this machine have {used} files open, of {allowed} allowed: end some, or raise the limit "
            "(`sysctl fs.file-max`)."
        )
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = str(len(os.listdir("/proc/self/fd")) - 1)
    except OSError:  # not one more can be opened
        used = str(limit)
    return (
        f"This process has {used} files open, of {limit} allowed: raise the limit before it starts (`ulimit -n`, on "
        "every node before `ray start`), or close files that your code leaves open."
    )
