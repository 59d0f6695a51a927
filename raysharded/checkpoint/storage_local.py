"""Storage in a folder of this machine or of a mounted file system.

A file is written under a temporary name in its own folder, flushed to the disk, and then given its name in one
step: by a rename (replacing), or by a hard link (which fails if the name is taken). A reader never sees half a file.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedWriter

from raysharded.checkpoint.storage import TEMPORARY_MARK, BytesLike, Keys, check_key, storage_error
from raysharded.errors import StorageError

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


@dataclass(frozen=True, slots=True)
class LocalStorage:
    """Keys are paths below the folder `root` (absolute). The folder is made by the first write."""

    root: str

    @property
    def url(self) -> str:
        return self.root.rstrip("/") or "/"

    def write(self, key: str, parts: Sequence[BytesLike]) -> None:
        path = self._path(key)
        with self._explained("write", key):
            temporary = _write_temporary(path, parts)
            try:
                os.replace(temporary, path)
            except OSError:
                _unlink(temporary)
                raise
            _sync_folder(os.path.dirname(path))

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        with self._explained("read", key), open(self._path(key), "rb") as file:
            file.seek(offset)
            return file.read(-1 if size is None else size)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """As Storage says. Atomic wherever hard links exist; elsewhere by O_EXCL, where a writer that is killed in
        the middle leaves a torn file that keeps the name."""
        path = self._path(key)
        with self._explained("put_if_absent", key):
            temporary = _write_temporary(path, [data])
            try:
                won = _link(temporary, path, data)
            finally:
                _unlink(temporary)
            _sync_folder(os.path.dirname(path))
            return won

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            path = self._path(key)
            with self._explained("delete", key):
                _unlink(path)
                self._remove_empty_folders(os.path.dirname(path))

    def size(self, key: str) -> int:
        with self._explained("size", key):
            return os.stat(self._path(key)).st_size

    def list(self, prefix: str = "") -> Keys:
        top = self._path(prefix) if prefix else self.root
        keys: Keys = []
        with self._explained("list", prefix):
            for folder, _, names in os.walk(top, onerror=_raise_unless_missing):
                inside = os.path.relpath(folder, self.root)
                keys += [name if inside == "." else f"{inside.replace(os.sep, '/')}/{name}" for name in names]
        return sorted(keys)

    def _path(self, key: str) -> str:
        check_key(self.url, key)
        return os.path.join(self.root, *key.split("/"))

    def _remove_empty_folders(self, folder: str) -> None:
        """Empty folders above a removed file go too, up to the root; a folder that is in use stays."""
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


def _write_temporary(path: str, parts: Sequence[BytesLike]) -> str:
    """The name of a new file beside `path` that holds `parts` and is on the disk."""
    temporary = f"{path}{TEMPORARY_MARK}{secrets.token_hex(6)}"
    try:
        with _create(temporary) as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        _unlink(temporary)
        raise
    return temporary


def _create(path: str) -> BufferedWriter:
    """A new file, opened; its folder is made as often as a concurrent clean-up removes it again."""
    for _ in range(8):
        try:
            return open(path, "xb")
        except FileNotFoundError:
            _make_folder(os.path.dirname(path))
    return open(path, "xb")


def _make_folder(folder: str) -> None:
    """The folder and those above it, each durable in the one above it."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    _make_folder(above)
    with suppress(FileExistsError):
        os.mkdir(folder)
        _sync_folder(above)
    if not os.path.isdir(folder):
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of the folder", folder)


def _link(temporary: str, path: str, data: bytes) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # On NFS a link whose reply was lost is tried again and finds itself: then the file has two names.
        return os.stat(temporary).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _create_exclusively(path, data)
    return True


def _create_exclusively(path: str, data: bytes) -> bool:
    try:
        with open(path, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    return True


def _sync_folder(folder: str) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return  # removed since: nothing is left to make durable
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
            raise
    finally:
        os.close(handle)


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
