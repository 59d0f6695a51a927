"""Operations on files of this machine of which `local.LocalStorage` consists. They raise OSError."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from io import BufferedWriter
from typing import IO

from raysharded.checkpoint.storage import BytesLike

_MOST_VIEWS = 512  # Linux takes 1,024 in one call
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
_LOCK_S = 60.0
_LOCK_PAUSE_S = 0.01


def batches(outs: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Groups of views, as many as one call to the operating system takes."""
    for at in range(0, len(outs), _MOST_VIEWS):
        yield list(outs[at : at + _MOST_VIEWS])


def read_fully(handle: int, offset: int, outs: list[memoryview]) -> int:
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
    mode = "rb" if flags == os.O_RDONLY else "r+b"
    file = open(path, mode, buffering, opener=lambda path, _: os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC))  # noqa: SIM115
    try:
        require_file(os.fstat(file.fileno()).st_mode, path)
    except BaseException:
        file.close()
        raise
    return file


def require_file(mode: int, path: str) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "it is a folder, not a file", path)
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file: put the file back", path)


def require_no_dangling_link(folder: str) -> None:
    if os.path.islink(folder) and not os.path.exists(folder):
        raise NotADirectoryError(errno.ENOTDIR, f"it is a link to {os.readlink(folder)!r}, which is not there", folder)


def write_temporary(path: str, parts: Iterable[BytesLike]) -> str:
    """Name of a new file beside `path` that holds `parts` and is on the disk."""
    temporary = f"{path}.tmp-{secrets.token_hex(6)}"
    try:
        with _create(temporary) as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        unlink(temporary)
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
        sync_folder(above)
    if not os.path.isdir(folder):
        require_no_dangling_link(folder)
        raise NotADirectoryError(errno.ENOTDIR, "a file is in the way of the folder", folder)


def link(temporary: str, path: str, data: bytes) -> bool:
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


def lock(handle: int) -> None:
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


def is_at(path: str, file: IO[bytes]) -> bool:
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
        unlink(path)
        raise
    return True


def sync_folder(folder: str) -> None:
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


def raise_unless_missing(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
