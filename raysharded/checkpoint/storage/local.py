"""Storage in a folder of this machine or of a mounted file system.

A file is written under a temporary name in its own folder and flushed to the disk. Then it gets its name in one step:
by a rename (replacing), or by a hard link (which fails if the name is taken). No reader sees half a file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedWriter
from typing import IO

from raysharded.checkpoint.storage import BytesLike, Keys, Traits, Unfinished, check_key, storage_error
from raysharded.checkpoint.storage.folders import is_called
from raysharded.errors import StorageError

_TEMPORARY = re.compile(r"(.+)\.tmp-[0-9a-f]{12}")
_MOST_VIEWS = 512  # Linux takes 1,024 in one call
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

_LOCK_S = 60.0
_LOCK_PAUSE_S = 0.01

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
        return 0  # the operating system retries

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
        with self._explained("read", key), _open_file(self._path(key), -1) as file:
            file.seek(offset)
            return file.read(-1 if size is None else size)

    def read_into(self, key: str, offset: int, outs: Sequence[memoryview]) -> int:
        with self._explained("read", key), _open_file(self._path(key), 0) as file:
            done = 0
            for some in _batches(outs):
                count = _read_fully(file.fileno(), offset + done, some)
                done += count
                if count < sum(len(out) for out in some):
                    break
            return done

    def put_if_absent(self, key: str, data: bytes) -> bool:
        """True if `data` is now under `key`, as in Storage. Atomic wherever hard links exist.

        Elsewhere it uses O_EXCL: a writer killed in the middle leaves a torn file that keeps the name.
        """
        path = self._path(key)
        with self._explained("put_if_absent", key):
            temporary = _write_temporary(path, [data])
            try:
                with self._still_there("put_if_absent", key, temporary):
                    won = _link(temporary, path, data)
            finally:
                _unlink(temporary)
            _sync_folder(os.path.dirname(path))
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
            try:
                older = _open_file(path, -1, os.O_RDWR)  # NFS locks no file that is opened for reading alone
            except FileNotFoundError:
                return False
        with self._explained("swap", key), older:
            _lock(older.fileno())
            if not _is_at(path, older) or older.read(len(expected) + 1) != expected:
                return False
            self._replace("swap", key, [data])
            return True

    def delete(self, keys: Iterable[str]) -> None:
        """Remove the keys, as in Storage. A key that is a link is removed, and its target stays.

        Raises StorageError, having removed nothing, for a key behind a link to a folder: that folder may be another's.
        """
        for key in keys:
            *folders, name = self._path(key)[len(self.root) :].strip("/").split("/")
            with self._explained("delete", key):
                if self._unlink_below(folders, name):
                    self._remove_empty_folders(os.path.dirname(self._path(key)))

    def _unlink_below(self, folders: Sequence[str], name: str) -> bool:
        """Remove a file, each of whose folders below the root is opened without following links; False if missing."""
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
            return False
        except NotADirectoryError as error:
            if os.path.islink(path):
                raise OSError(errno.ELOOP, "it is behind a link to a folder, where nothing is deleted", path) from error
            raise
        finally:
            if handle != -1:
                os.close(handle)
        return True

    def size(self, key: str) -> int:
        with self._explained("size", key):
            found = os.stat(self._path(key))
            _require_file(found.st_mode, self._path(key))
            return found.st_size

    def list(self, prefix: str = "") -> Keys:
        return [key for key in self._walk(prefix) if _TEMPORARY.fullmatch(key) is None]

    def times(self, name: str | None, prefix: str = "") -> dict[str, float | None]:
        """Write times as in `list_times`."""
        return {key: _written_at(self._path(key)) for key in self._walk(prefix) if is_called(key, name)}

    def folders(self) -> Keys:
        """Names of the top-level folders, sorted."""
        with self._explained("list", ""):
            try:
                with os.scandir(self.root) as found:
                    return sorted(entry.name for entry in found if entry.is_dir())
            except FileNotFoundError:
                return []

    def links(self, prefix: str = "") -> Keys:
        """Links to folders directly in the folder `prefix`, sorted."""
        top = self._path(prefix) if prefix else self.root
        with self._explained("list", prefix):
            try:
                with os.scandir(top) as found:
                    names = sorted(entry.name for entry in found if entry.is_symlink() and entry.is_dir())
            except FileNotFoundError:
                return []
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
            for folder, names, _ in os.walk(top, topdown=False, onerror=_raise_unless_missing):
                inside = [path for path in (os.path.join(folder, name) for name in names) if os.path.islink(path)]
                for path in inside:
                    _unlink(path)
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
        temporary = _write_temporary(path, parts)
        try:
            with self._still_there(operation, key, temporary):
                os.replace(temporary, path)
        except OSError:
            _unlink(temporary)
            raise
        _sync_folder(os.path.dirname(path))

    def _walk(self, prefix: str) -> Keys:
        """Every file, sorted, including those in progress."""
        top = self._path(prefix) if prefix else self.root
        keys: Keys = []
        with self._explained("list", prefix):
            _require_no_dangling_link(top)
            for folder, _, names in os.walk(top, onerror=_raise_unless_missing):
                inside = os.path.relpath(folder, self.root)
                keys += [name if inside == "." else f"{inside.replace(os.sep, '/')}/{name}" for name in names]
        return sorted(keys)

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
    def _still_there(self, operation: str, key: str, temporary: str) -> Iterator[None]:
        """Report that someone removed the temporary file, if so: its writer does not."""
        try:
            yield
        except FileNotFoundError as error:
            if os.path.lexists(temporary):
                raise
            raise storage_error(self.url, operation, key, error, remedy=_REMOVED) from error


def _batches(outs: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Groups of views, as many as one call to the operating system takes."""
    for at in range(0, len(outs), _MOST_VIEWS):
        yield list(outs[at : at + _MOST_VIEWS])


def _read_fully(handle: int, offset: int, outs: list[memoryview]) -> int:
    """Bytes read into `outs`. A call may return before they are full; the next continues there."""
    done = 0
    while outs and (count := os.preadv(handle, outs, offset + done)):
        done += count
        while outs and count >= len(outs[0]):
            count -= len(outs.pop(0))
        if count:
            outs[0] = outs[0][count:]
    return done


def _open_file(path: str, buffering: int, flags: int = os.O_RDONLY) -> IO[bytes]:
    """A file opened for reading. Raises OSError for anything else: opening a pipe would wait for its writer."""
    mode = "rb" if flags == os.O_RDONLY else "r+b"
    file = open(path, mode, buffering, opener=lambda path, _: os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))  # noqa: SIM115
    try:
        _require_file(os.fstat(file.fileno()).st_mode, path)
    except BaseException:
        file.close()
        raise
    return file


def _require_file(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file", path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file: put the file back", path)


def _require_no_dangling_link(folder: str) -> None:
    if os.path.islink(folder) and not os.path.exists(folder):
        raise NotADirectoryError(errno.ENOTDIR, f"it is a link to {os.readlink(folder)!r}, which is not there", folder)


def _write_temporary(path: str, parts: Iterable[BytesLike]) -> str:
    """Name of a new file beside `path` that holds `parts` and is on the disk."""
    temporary = f"{path}.tmp-{secrets.token_hex(6)}"
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
    """A new open file. Its folder is made again when a concurrent clean-up removes it."""
    for _ in range(8):
        try:
            return open(path, "xb")
        except FileNotFoundError:
            _make_folder(os.path.dirname(path))
    return open(path, "xb")


def _make_folder(folder: str) -> None:
    """Make the folder and those above it, each durable in the one above it."""
    if os.path.isdir(folder):
        return
    above = os.path.dirname(folder)
    _make_folder(above)
    with suppress(FileExistsError):
        os.mkdir(folder)
        _sync_folder(above)
    if not os.path.isdir(folder):
        _require_no_dangling_link(folder)
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of the folder", folder)


def _link(temporary: str, path: str, data: bytes) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        # On NFS a link whose reply was lost is retried and finds itself: then the file has two names.
        return os.stat(temporary).st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _create_exclusively(path, data)
    return True


def _lock(handle: int) -> None:
    """Lock a file. Every holder writes one small file."""
    deadline = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_LOCK_PAUSE_S)


def _is_at(path: str, file: IO[bytes]) -> bool:
    """Whether the path still names this file."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _create_exclusively(path: str, data: bytes) -> bool:
    try:
        file = open(path, "xb")  # noqa: SIM115  # errors within `with` must not be taken for errors here
    except FileExistsError:
        return False
    try:
        with file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:  # half a file must not keep the name
        _unlink(path)
        raise
    return True


def _sync_folder(folder: str) -> None:
    try:
        handle = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return  # removed meanwhile: nothing is left to make durable
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
            raise
    finally:
        os.close(handle)


def _written_at(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:  # removed meanwhile or inaccessible: only its existence is known
        return None


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
