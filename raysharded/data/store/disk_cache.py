"""A bounded folder of pages that were read from remote storage, shared by the processes of a node.

Pages lie at their places in files with holes, one for each few MiB of a shard: a new file for each read would take more
time than its bytes. Its name has the id of the shard, so that a replaced shard has other files. The pages have digests,
which the reader checks as it does those of storage: a hole, what is being written, and what is damaged do not fit, and
are read from storage again. Files survive the processes. Those that were not used longest are removed first.

Nothing here raises: a folder that is full, read-only or gone is a cache that keeps nothing.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator

import numpy as np

from raysharded.data.store.layout import Bytes

_log = logging.getLogger("raysharded.data")

FILE_BYTES = 4 << 20
"""Bytes of a shard whose pages are in one file. A read of which a part is in the next ones is in the first."""

_KEPT = 0.9  # of the limit, when files are removed
_SHARE = 16  # the folder is measured whenever this process has written this part of the limit
_LEAST_FREE = 0.05  # of the disk
_BLOCK_BYTES = 512  # the unit of `st_blocks`
_USED_S = 1.0  # a file that was used this long ago is marked anew
_WRITABLE_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_OPEN = os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # it waits for no pipe that somebody put in a file's place


def default_folder() -> str:
    """The folder of this user below the node's folder of temporary files."""
    return os.path.join(tempfile.gettempdir(), f"raysharded-{os.getuid()}", "tokens")


class _Use:
    """The use of one folder by all caches of this process. Thread-safe."""

    def __init__(self) -> None:
        self.limit_bytes = 0
        self._unmeasured = 0
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> bool:
        """Count bytes that were written. True if the folder is to be measured."""
        with self._lock:
            self._unmeasured += num_bytes
            due = self._unmeasured * _SHARE >= self.limit_bytes
            if due:
                self._unmeasured = 0
            return due


_uses: weakref.WeakValueDictionary[str, _Use] = weakref.WeakValueDictionary()
"""Folder -> its use, as long as a cache is there."""


def _use_of(folder: str, limit_bytes: int) -> _Use:
    """The use of a folder, by one more cache."""
    use = _uses.setdefault(os.path.realpath(folder), _Use())
    use.limit_bytes = max(use.limit_bytes, limit_bytes)
    return use


class DiskCache:
    """The cache in one folder. Thread-safe, and safe with other processes in the same folder.

    Several caches of a process in one folder have the largest of their limits together. Several processes may exceed it
    by a sixteenth for each.
    """

    def __init__(self, folder: str, limit_bytes: int) -> None:
        self.folder, self._use = folder, _use_of(folder, limit_bytes)
        self._is_own = self._writes = self._make()
        """Whether nobody else may write there; what others could have written is not read."""
        if self._writes:
            self._remove_oldest()

    @property
    def keeps(self) -> bool:
        """Whether what is put there is kept; False after a failure to write."""
        return self._writes

    def get(self, shard: str, offset: int, size: int) -> Bytes | None:
        """These bytes of a shard, or None. Those that nobody has put there may be any: their digests do not fit."""
        if not self._is_own:
            return None
        path, place = self._place(shard, offset)
        try:
            with _opened(path, os.O_RDONLY) as (file, used_at):
                if _is_hole(file, place + size // 2):
                    return None
                found = np.empty(size, dtype=np.uint8)
                if os.preadv(file, [found.data], place) < size:
                    return None
                if used_at < time.time() - _USED_S:
                    os.utime(file)
        except OSError:
            return None
        return found

    def put(self, shard: str, offset: int, data: Bytes) -> None:
        """Keep these bytes of a shard, if possible."""
        if not self._writes or len(data) > self._use.limit_bytes:
            return
        path, place = self._place(shard, offset)
        try:
            try:
                self._write(path, place, data)
            except FileNotFoundError:
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                self._write(path, place, data)
        except OSError as error:
            self._stop(error)
            return
        if self._use.add(len(data)):
            self._remove_oldest()

    def _write(self, path: str, place: int, data: Bytes) -> None:
        with _opened(path, os.O_WRONLY | os.O_CREAT) as (file, _):
            if os.pwrite(file, data.data, place) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    def _place(self, shard: str, offset: int) -> tuple[str, int]:
        """(path, place in the file) of the bytes of a shard from `offset` on."""
        number, place = divmod(offset, FILE_BYTES)
        return os.path.join(self.folder, shard[:2], f"{shard}-{number}"), place

    def _make(self) -> bool:
        try:
            _make_private(self.folder)
            if self.folder == default_folder():
                _close_to_others(os.path.dirname(self.folder))
            about, above = os.stat(self.folder), os.stat(os.path.dirname(os.path.realpath(self.folder)))
            if about.st_uid != os.getuid() or about.st_mode & _WRITABLE_FOR_OTHERS:
                raise PermissionError(f"{self.folder} belongs to another user, or others may write to it")
            if above.st_uid not in (os.getuid(), 0) or (
                above.st_mode & _WRITABLE_FOR_OTHERS and not above.st_mode & stat.S_ISVTX
            ):
                raise PermissionError(f"the folder above {self.folder} lets other users replace it")
        except OSError as error:
            self._stop(error)
            return False
        return True

    def _stop(self, error: OSError) -> None:
        self._writes = False
        _log.warning("data read from storage is not kept on this node's disk any more: %s", error)

    def _remove_oldest(self) -> None:
        """Remove files until the folder is within its limit, and the disk has some free space."""
        try:
            with self._alone():
                files = sorted(self._files())
                total = sum(size for _, size, _ in files)
                disk = os.statvfs(self.folder)
                missing = int(disk.f_blocks * disk.f_frsize * _LEAST_FREE) - disk.f_bavail * disk.f_frsize
                allowed = min(self._use.limit_bytes, total - missing)
                if total <= allowed:
                    return
                for _, size, path in files:
                    if total <= _KEPT * allowed:
                        break
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                    total -= size
                if missing > 0 and total <= 0:
                    raise OSError(f"the disk of {self.folder} is nearly full")
        except OSError as error:
            self._stop(error)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time removes files."""
        with open(os.path.join(self.folder, ".lock"), "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """(time of last use, bytes on the disk, path) of every file."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    about = os.lstat(path)
                    if name != ".lock":
                        yield about.st_mtime, about.st_blocks * _BLOCK_BYTES, path


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[tuple[int, float]]:
    """A plain file of this user, and the time of its last use."""
    file = os.open(path, flags | _OPEN, 0o600)
    try:
        about = os.fstat(file)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.getuid():
            raise OSError(f"{path} is no file of this cache")
        yield file, about.st_mtime
    finally:
        os.close(file)


def _is_hole(file: int, place: int) -> bool:
    """Whether nothing was written there, as far as the file system knows."""
    try:
        return os.lseek(file, place, os.SEEK_DATA) > place
    except OSError as error:
        return error.errno == errno.ENXIO  # the file ends before


def _make_private(folder: str) -> None:
    """Make the folder, and those above it that are missing, for this user alone."""
    missing, above = list[str](), os.path.abspath(folder)
    while not os.path.isdir(above):
        missing.append(above)
        above = os.path.dirname(above)
    for path in reversed(missing):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def _close_to_others(folder: str) -> None:
    """Let nobody else write to a folder of this user's: earlier versions made it as the umask has it."""
    about = os.stat(folder)
    if about.st_uid == os.getuid() and about.st_mode & _WRITABLE_FOR_OTHERS:
        os.chmod(folder, 0o700)
