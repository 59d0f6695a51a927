"""A bounded folder of pages that were read from remote storage, shared by the processes of a node.

An entry is one file. It gets its name when it is whole, so that readers see all of it or nothing. Its name has the id
of its shard, so that a replaced shard has other entries; its pages have digests, which the reader checks as it does
those of storage. Entries survive the processes. Those that were not used longest are removed first.

Nothing here raises: a folder that is full, read-only or gone is a cache that keeps nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import stat
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator

_log = logging.getLogger("raysharded.data")

_KEPT = 0.9  # of the limit, when entries are removed
_SHARE = 16  # the folder is measured whenever this process has written this part of the limit
_LEAST_FREE = 0.05  # of the disk
_TEMPORARY = ".incomplete-"
_WRITING_S = 60.0  # an older temporary file is left from a process that was killed
_WRITABLE_FOR_OTHERS = stat.S_IWGRP | stat.S_IWOTH


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
        """Whether new entries are kept; False after a failure to write one."""
        return self._writes

    def get(self, name: str) -> bytes | None:
        """The entry, or None."""
        if not self._is_own:
            return None
        path = self._path(name)
        try:
            data = self._read(path)
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return data

    def _read(self, path: str) -> bytes:
        """The bytes of this user's plain file within the limit. It waits for no pipe that somebody put in its place."""
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
            about = os.fstat(file.fileno())
            is_own = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid()
            if not is_own or about.st_size > self._use.limit_bytes:
                raise OSError(f"{path} is no entry")
            return file.read()

    def put(self, name: str, data: memoryview | bytes) -> None:
        """Keep an entry, if possible."""
        if not self._writes or len(data) > self._use.limit_bytes:
            return
        path = self._path(name)
        temporary = os.path.join(self.folder, f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
            try:
                with open(temporary, "wb") as file:
                    file.write(data)
                os.replace(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
        except OSError as error:
            self._stop(error)
            return
        if self._use.add(len(data)):
            self._remove_oldest()

    def drop(self, name: str) -> None:
        """Remove an entry, which is damaged."""
        with contextlib.suppress(OSError):
            os.unlink(self._path(name))

    def _path(self, name: str) -> str:
        return os.path.join(self.folder, name[:2], name)

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
        """Remove entries until the folder is within its limit, and the disk has some free space."""
        try:
            with self._alone():
                entries = sorted(self._entries())
                total = sum(size for _, size, _ in entries)
                disk = os.statvfs(self.folder)
                missing = int(disk.f_blocks * disk.f_frsize * _LEAST_FREE) - disk.f_bavail * disk.f_frsize
                allowed = min(self._use.limit_bytes, total - missing)
                if total <= allowed:
                    return
                for _, size, path in entries:
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
        """One process at a time removes entries."""
        with open(os.path.join(self.folder, ".lock"), "w", encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """(time of last use, bytes, path) of every file, but those that a process writes."""
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(folder, name)
                with contextlib.suppress(OSError):
                    about = os.lstat(path)
                    is_being_written = name.startswith(_TEMPORARY) and about.st_mtime > time.time() - _WRITING_S
                    if name != ".lock" and not is_being_written:
                        yield about.st_mtime, about.st_size, path


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
