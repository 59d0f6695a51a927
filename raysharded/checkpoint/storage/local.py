"""Storage in a folder of this machine or of a mounted file system.

A file is written under a temporary name in its own folder and flushed to the disk. Then it gets its name in one step:
by a rename (replacing), or by a hard link (which fails if the name is taken). No reader sees half a file.

The operating system retries most of what fails on a network file system. Of what it passes on, ESTALE is retried, and
the error of a rename or link that was done, though its reply was lost, is none.
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from raysharded.checkpoint.storage import (
    BytesLike,
    Keys,
    NoSuchKey,
    Storage,
    Traits,
    Unfinished,
    check_key,
    storage_error,
)
from raysharded.checkpoint.storage.local_files import (
    TemporaryFile,
    again_if_stale,
    discard,
    files_below,
    folders_in,
    link,
    open_locked,
    raise_unless_missing,
    read_into,
    read_part,
    rename,
    size_of,
    sync_folder,
    unlink,
    write_temporary,
    written_at,
)
from raysharded.checkpoint.storage.optional_operations import is_called
from raysharded.checkpoint.storage.retry import retries_of
from raysharded.errors import StorageError

_TEMPORARY = re.compile(r"(.+)\.tmp-[0-9a-f]{12}")


_REMOVED = "Someone removed the file while it was written: let no clean-up run while a writer is alive."


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """Storage of keys as paths below the folder `root` (absolute), which the first write makes."""

    root: str

    @property
    def url(self) -> str:
        return self.root.rstrip("/") or "/"

    @property
    def traits(self) -> Traits:
        return Traits(span_bytes=1 << 20, num_readers=2, partitioned=False)  # read bytes stay in a core's cache

    @property
    def retries(self) -> int:
        return retries_of(self.url)

    def missing_folders(self) -> Keys:
        """The folders that the first write makes, innermost first."""
        folder, missing = self.root, []
        while not os.path.exists(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        return missing

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        with self._explained("write", key):
            self._replace("write", key, parts)

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        path = self._path(key)
        with self._explained("read", key):
            return again_if_stale(lambda: read_part(path, offset, size), self.url)

    def read_into(self, key: str, offset: int, outs: Sequence[memoryview]) -> int:
        path = self._path(key)
        with self._explained("read", key):
            return again_if_stale(lambda: read_into(path, offset, outs), self.url)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """True if `data` is now under `key`, as in Storage. Atomic wherever hard links exist.

        Elsewhere it uses O_EXCL: a writer killed in the middle leaves a torn file that keeps the name.
        """
        path = self._path(key)
        with self._explained("put_if_absent", key):
            temporary = self._write_temporary(path, [data])
            try:
                with self._still_there("put_if_absent", key, temporary):
                    won = again_if_stale(lambda: link(temporary, path, data), self.url)
            finally:
                discard(temporary.path)
            sync_folder(os.path.dirname(path))
            return won

    def swaps(self) -> bool:
        """True: where files cannot be locked, `swap` raises StorageError."""
        return True

    def swap(self, key: str, expected: bytes, data: bytes) -> bool:
        """True if the file was replaced, as in `swap`.

        A writer replaces the file under a lock on it. The operating system releases the lock when its holder dies. The
        lock is void once the name belongs to another file.
        """
        path = self._path(key)
        with self._explained("swap", key):
            older = again_if_stale(lambda: open_locked(path, expected), self.url)
            if older is None:
                return False
            with older:
                self._replace("swap", key, [data])
            return True

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the keys, as in Storage. A key that is a link is removed, and its target stays.

        Raises StorageError, having removed nothing, for a key behind a link to a folder: that folder may be another's.
        """
        for key in keys:
            path = self._path(key)
            with self._explained("delete", key):
                again_if_stale(partial(self._unlink, path), self.url)
                self._remove_empty_folders(os.path.dirname(path))

    def _unlink(self, file: str) -> None:
        """Remove a file, each of whose folders below the root is opened without following links. It may be missing."""
        *folders, name = file[len(self.root) :].strip("/").split("/")
        handle, path = -1, self.root
        try:
            handle = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
            for folder in folders:
                path = os.path.join(path, folder)
                below = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=handle)
                os.close(handle)
                handle = below
            os.unlink(name, dir_fd=handle)
        except FileNotFoundError:
            return
        except NotADirectoryError as error:
            if os.path.islink(path):
                raise OSError(errno.ELOOP, "it is behind a link to a folder, where nothing is deleted", path) from error
            raise
        finally:
            if handle != -1:
                os.close(handle)

    def size(self, key: str) -> int:
        path = self._path(key)
        with self._explained("size", key):
            return again_if_stale(lambda: size_of(path), self.url)

    def list(self, prefix: str = "") -> Keys:
        return [key for key in self._walk(prefix) if _TEMPORARY.fullmatch(key) is None]

    def times(self, name: str | None, prefix: str = "") -> dict[str, float | None]:
        """Write times as in `list_times`."""
        return {key: written_at(self._path(key)) for key in self._walk(prefix) if is_called(key, name)}

    def folders(self) -> Keys:
        """Names of the top-level folders, sorted."""
        with self._explained("list", ""):
            return again_if_stale(lambda: folders_in(self.root), self.url)

    def links(self, prefix: str = "") -> Keys:
        """Links to folders directly in the folder `prefix`, sorted."""
        top = self._path(prefix) if prefix else self.root
        with self._explained("list", prefix):
            names = again_if_stale(lambda: folders_in(top, links_alone=True), self.url)
        return [f"{prefix}/{name}" if prefix else name for name in names]

    def remove_folders(self, prefix: str) -> Keys:
        """Remove folders without files, as in `remove_folders`."""
        top, links = self._path(prefix) if prefix else self.root, []
        with self._explained("delete", prefix):
            if os.path.islink(top):
                return []
            if not prefix:
                with suppress(OSError):
                    os.rmdir(top)
                return []
            for folder, names, _ in os.walk(top, topdown=False, onerror=raise_unless_missing):
                inside = [path for path in (os.path.join(folder, name) for name in names) if os.path.islink(path)]
                for path in inside:
                    unlink(path)
                links += inside
                with suppress(OSError):
                    os.rmdir(folder)
        return sorted(os.path.relpath(path, self.root).replace(os.sep, "/") for path in links)

    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        found = ((key, _TEMPORARY.fullmatch(key)) for key in self._walk(prefix))
        return [Unfinished(key=match[1], token=key) for key, match in found if match]

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        self.delete(write.token for write in unfinished)

    def _replace(self, operation: str, key: str, parts: Iterable[BytesLike]) -> None:
        """Replace the key's file by a new one that holds `parts`, in one step."""
        path = self._path(key)
        temporary = self._write_temporary(path, parts)
        try:
            with self._still_there(operation, key, temporary):
                again_if_stale(lambda: rename(temporary, path), self.url)
        except BaseException:
            discard(temporary.path)
            raise
        sync_folder(os.path.dirname(path))

    def _write_temporary(self, path: str, parts: Iterable[BytesLike]) -> TemporaryFile:
        try:
            return again_if_stale(lambda: write_temporary(path, parts), self.url)
        except OSError:  # a full disk takes folders, and no files
            self._remove_empty_folders(os.path.dirname(path))
            raise

    def _walk(self, prefix: str) -> Keys:
        """Every file, sorted, including those in progress."""
        top = self._path(prefix) if prefix else self.root
        with self._explained("list", prefix):
            return sorted(again_if_stale(lambda: files_below(top, self.root), self.url))

    def _path(self, key: str) -> str:
        check_key(self.url, key)
        return os.path.join(self.root, *key.split("/"))

    def _remove_empty_folders(self, folder: str) -> None:
        """Remove empty folders above a removed file, up to the root; a folder in use stays."""
        with suppress(OSError):
            while len(folder) > len(self.root):
                os.rmdir(folder)
                folder = os.path.dirname(folder)

    @contextmanager
    def _explained(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except OSError as error:
            raise storage_error(self.url, operation, key, error) from error

    @contextmanager
    def _still_there(self, operation: str, key: str, temporary: TemporaryFile) -> Iterator[None]:
        """Report that someone removed the temporary file, if so: its writer does not."""
        try:
            yield
        except FileNotFoundError as error:
            if os.path.lexists(temporary.path):
                raise
            raise storage_error(self.url, operation, key, error, remedy=_REMOVED) from error


def size_of_listed(storage: Storage, key: str, listed: int | None) -> int | None:
    """Bytes of a file, as listed or from a disk; None if that needs a request. Raises StorageError."""
    if listed is not None or not isinstance(storage, LocalStorage):
        return listed
    try:
        return storage.size(key)
    except NoSuchKey:
        return None
