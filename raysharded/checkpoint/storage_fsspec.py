"""Storage at any URL that fsspec can open (memory://, gs://, abfs://, sftp://, ...).

`put_if_absent` is as strong as the backend's exclusive create (`pipe_file(mode="create")`). Whether the backend
has one is found by trying, once per process and URL. Where creating over an existing file succeeds or is refused
outright, the fallback checks, writes, and reads back: of writers that race within that window the last one wins,
and an earlier one may have been told that it won. Within one process the calls are made one at a time, so that
there exactly one wins on every backend.
"""

from __future__ import annotations

import functools
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from raysharded.checkpoint.retry import with_retries
from raysharded.checkpoint.storage import BytesLike, Keys, check_key, storage_error

T = TypeVar("T")

_SLICE_BYTES = 8 << 20  # fsspec files copy each write into their buffer: no more than this at once
_PUT_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True)
class FsspecStorage:
    """Keys are paths below `url` (without a trailing `/`). Credentials are found as the backend finds them."""

    url: str

    def write(self, key: str, parts: Sequence[BytesLike]) -> None:
        def once(fs: Any, path: str) -> None:
            with fs.open(path, "wb") as file:
                for part in parts:
                    view = memoryview(part)
                    for start in range(0, len(view), _SLICE_BYTES):
                        file.write(view[start : start + _SLICE_BYTES])

        self._call("write", key, _making_folders(once))

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        if size == 0:
            return b""

        def once(fs: Any, path: str) -> bytes:
            return bytes(fs.cat_file(path, start=offset, end=None if size is None else offset + size))

        return self._call("read", key, once)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        sent = False  # if so, what is found there may be our own, whose reply was lost

        def exclusively(fs: Any, path: str) -> bool:
            nonlocal sent
            again, sent = sent, True
            try:
                fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return again and bool(fs.cat_file(path) == data)
            return True

        def checking(fs: Any, path: str) -> bool:
            nonlocal sent
            fs.invalidate_cache()
            if not fs.exists(path):
                sent = True
                fs.pipe_file(path, data)
            return sent and bool(fs.cat_file(path) == data)

        with _PUT_LOCK:
            exclusive = self._call("put_if_absent", "", _creates_exclusively)
            return self._call("put_if_absent", key, _making_folders(exclusively if exclusive else checking))

    def delete(self, keys: Iterable[str]) -> None:
        def once(fs: Any, path: str) -> None:
            with suppress(FileNotFoundError):
                fs.rm_file(path)

        for key in keys:
            self._call("delete", key, once)

    def size(self, key: str) -> int:
        def once(fs: Any, path: str) -> int:
            fs.invalidate_cache()
            return int(fs.info(path)["size"])

        return self._call("size", key, once)

    def list(self, prefix: str = "") -> Keys:
        def once(fs: Any, path: str) -> Keys:
            fs.invalidate_cache()
            try:
                found = fs.find(path)
            except FileNotFoundError:
                return []
            above = f"{prefix}/" if prefix else ""
            return sorted(above + name[len(path) + 1 :] for name in found if name.startswith(f"{path}/"))

        return self._call("list", prefix, once)

    def _call(self, operation: str, key: str, once: Callable[[Any, str], T]) -> T:
        """`once(file system, path of the key)` with retries; every failure becomes a StorageError."""
        if key:
            check_key(self.url, key)
        try:
            fs, root = _open(self.url)
            return with_retries(lambda: once(fs, f"{root}/{key}" if key else root))
        except Exception as error:  # the boundary to the backends, which raise whatever they like
            raise storage_error(self.url, operation, key, error) from error


def _open(url: str) -> tuple[Any, str]:
    import fsspec

    fs, root = fsspec.core.url_to_fs(url)
    return fs, str(root).rstrip("/")


def _making_folders(once: Callable[[Any, str], T]) -> Callable[[Any, str], T]:
    """`once`, and again after making the parent folder if that is what was missing.

    Backends with asynchronous cores are the object stores: they have no folders, and making one there could
    create a bucket that was merely misspelled.
    """

    def call(fs: Any, path: str) -> T:
        try:
            return once(fs, path)
        except FileNotFoundError:
            if fs.async_impl:
                raise
            fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            return once(fs, path)

    return call


@functools.lru_cache(maxsize=64)
def _creates_exclusively(fs: Any, root: str) -> bool:
    """Whether the backend refuses to create a file that exists: tried on a probe beside the keys."""
    probe = f"{root}/.raysharded-probe-{secrets.token_hex(6)}"
    create = _making_folders(lambda fs, path: fs.pipe_file(path, b"raysharded", mode="create"))
    try:
        create(fs, probe)
        create(fs, probe)
    except FileExistsError:
        return True
    except (TypeError, ValueError, NotImplementedError):
        return False
    finally:
        with suppress(Exception):  # a probe that stays behind harms nothing
            fs.rm_file(probe)
    return False
