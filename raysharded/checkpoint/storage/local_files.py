"""Operations on files of this machine of which `local.LocalStorage` consists. They raise OSError."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedWriter
from typing import IO, TypeVar

from raysharded.checkpoint.storage import BytesLike
from raysharded.checkpoint.storage.retry import with_retries

T = TypeVar("T")

_MOST_VIEWS = 512  # Linux takes 1,024 in one call
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_READ_ON = 1 << 20
"""Bytes of each further call that reads a file which grew, or of which a call returned a part."""
_OF_FILE_SYSTEM = "lost+found"
"""Folder at the top of a disk, which the file system makes. Only its administrator may read it."""
_LOCK_S = 60.0
_LOCK_PAUSE_S = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class TemporaryFile:
    """A file that is whole and on the disk, and has no name yet but a temporary one."""

    path: str
    identity: tuple[int, int, int]
    """Device, inode and size in bytes."""

    def is_at(self, path: str) -> bool:
        """Whether the path names this very file."""
        try:
            return _identity(os.stat(path, follow_symlinks=False)) == self.identity
        except OSError:
            return False


def again_if_stale(action: Callable[[], T], url: str) -> T:
    """Result of `action()`, with retries after ESTALE: a server of files no longer knew what the client had looked up.

    The retries are counted for `url`. `action` looks up its files anew in each. Raises as `action`.
    """
    try:
        return action()
    except OSError as error:
        if not _is_stale(error):
            raise
        first = [error]

    def again() -> T:
        if first:
            raise first.pop()
        return action()

    return with_retries(again, url=url, transient=_is_stale)


def _is_stale(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ESTALE


def _identity(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_dev, found.st_ino, found.st_size


def read_part(path: str, offset: int, size: int | None) -> bytes:
    """Up to `size` bytes from `offset` on; None: to the end."""
    with open_file(path, 0) as file:  # without a buffer: a journal has tens of thousands of small files
        if offset:
            file.seek(offset)
        likely = max(0, os.fstat(file.fileno()).st_size - offset) + 1
        part = file.read(likely if size is None else min(size, likely))  # it allocates as much, however little there is
        while more := file.read(_READ_ON if size is None else min(_READ_ON, size - len(part))):
            part += more
        return part


def read_into(path: str, offset: int, outs: Sequence[memoryview]) -> int:
    """Bytes read from `offset` on into the `outs`, which are filled unless the file ends."""
    with open_file(path, 0) as file:
        done = 0
        for some in _batches(outs):
            wanted = sum(len(out) for out in some)
            count = _read_fully(file.fileno(), offset + done, some)
            done += count
            if count < wanted:
                break
        return done


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


def open_file(path: str, buffering: int, flags: int = os.O_RDONLY) -> IO[bytes]:
    """A file opened for reading. Raises OSError for anything else: opening a pipe would wait for its writer."""
    return open(path, "rb" if flags == os.O_RDONLY else "r+b", buffering, opener=lambda path, _: _opened(path, flags))


def _opened(path: str, flags: int) -> int:
    """A handle on a file, which is no pipe: Python could not make a stream for reading and writing of one."""
    handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        require_file(os.fstat(handle).st_mode, path)
    except BaseException:
        os.close(handle)
        raise
    return handle


def require_file(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file", path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file: put the file back", path)


def require_no_dangling_link(folder: str) -> None:
    if os.path.islink(folder) and not os.path.exists(folder):
        raise NotADirectoryError(errno.ENOTDIR, f"it is a link to {os.readlink(folder)!r}, which is not there", folder)


def size_of(path: str) -> int:
    """Bytes of a file."""
    found = os.stat(path)
    require_file(found.st_mode, path)
    return found.st_size


def folders_in(folder: str, *, links_alone: bool = False) -> list[str]:
    """Names of the folders, and of the links to folders, in a folder, sorted; [] if it is missing."""
    try:
        with os.scandir(folder) as found:
            folders = (entry for entry in found if entry.is_dir() and (entry.is_symlink() or not links_alone))
            return sorted(entry.name for entry in folders if entry.name != _OF_FILE_SYSTEM)
    except FileNotFoundError:
        return []


def files_below(top: str, root: str) -> list[str]:
    """Paths, from `root` on and with `/`, of everything below the folder `top` that is no folder.

    Folders of the file system itself are left out.
    """
    require_no_dangling_link(top)
    found: list[str] = []
    for folder, folders, names in os.walk(top, onerror=raise_unless_missing):
        folders[:] = [name for name in folders if name != _OF_FILE_SYSTEM]
        inside = os.path.relpath(folder, root)
        found += [name if inside == "." else f"{inside.replace(os.sep, '/')}/{name}" for name in names]
    return found


def write_temporary(path: str, parts: Iterable[BytesLike]) -> TemporaryFile:
    """A new file beside `path` that holds `parts`. Nothing is left of it after an error."""
    temporary = f"{path}.tmp-{secrets.token_hex(6)}"
    try:
        with _create(temporary) as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
            return TemporaryFile(path=temporary, identity=_identity(os.fstat(file.fileno())))
    except BaseException:
        discard(temporary)
        raise


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
        sync_folder(above)
    if not os.path.isdir(folder):
        require_no_dangling_link(folder)
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of the folder", folder)


def rename(temporary: TemporaryFile, path: str) -> None:
    """Give a file its name, in place of another file's.

    A network file system whose reply was lost sends the request again, and then reports the loss of a name that it took
    away itself. So an error counts only if the name is not this file's.
    """
    try:
        os.replace(temporary.path, path)
    except OSError:
        if not temporary.is_at(path):
            raise


def link(temporary: TemporaryFile, path: str, data: bytes) -> bool:
    """Give a file a further name, unless that is taken: True if it is now this file's. Lost replies as in `rename`."""
    try:
        os.link(temporary.path, path)
    except OSError as error:
        if temporary.is_at(path):
            return True
        if isinstance(error, FileExistsError):
            return False
        if error.errno not in _NO_HARD_LINKS:
            raise
        return _create_exclusively(path, data)
    return True


def open_locked(path: str, expected: bytes) -> IO[bytes] | None:
    """The open file, locked, if it holds `expected` and nothing else; None if not, or if it is missing."""
    try:
        file = open_file(path, -1, os.O_RDWR)  # NFS locks no file that is opened for reading alone
    except FileNotFoundError:
        return None
    try:
        _lock(file.fileno())
        if _is_at(path, file) and file.read(len(expected) + 1) == expected:
            return file
    except BaseException:
        file.close()
        raise
    file.close()
    return None


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
        discard(path)
        raise
    return True


def sync_folder(folder: str) -> None:
    """Make the names in a folder durable."""
    again_if_stale(lambda: _sync_folder(folder), folder)


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


def written_at(path: str) -> float | None:
    try:
        return os.stat(path).st_mtime
    except OSError:  # removed meanwhile or inaccessible: only its existence is known
        return None


def unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def discard(path: str) -> None:
    """Remove a file that is of no use any more, if that is possible: the error that made it so is the one to raise."""
    with suppress(OSError):
        os.unlink(path)


def raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
