"""Storage at any URL that fsspec can open (memory://, gs://, abfs://, sftp://, ...; s3:// as `fsspec+s3://`).

`put_if_absent` is as strong as the backend's exclusive create (`pipe_file(mode="create")`), which is probed once per
process and URL. If creating over an existing file succeeds or is unsupported, the fallback checks, writes, and reads
back. Of writers that race within that window the last one wins, and an earlier one may have reported success. Within
one process the calls are made one at a time, so that exactly one wins there on every backend.
"""

from __future__ import annotations

import functools
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from typing import Any, TypeVar

from raysharded.checkpoint.storage import BytesLike, Keys, Traits, Unfinished, check_key, storage_error
from raysharded.checkpoint.storage.optional_operations import is_called
from raysharded.checkpoint.storage.retry import is_transient, retries_of, with_retries
from raysharded.display.plain_text import masked
from raysharded.errors import RayshardedError
from raysharded.locations import THROUGH_FSSPEC

T = TypeVar("T")

_SLICE_BYTES = 8 << 20  # fsspec files copy each write into their buffer: this bounds the copy
_STATUS_MAY_PASS = (429, 500, 502, 503, 504)
_put_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class FsspecStorage:
    """Storage of keys as paths below `url` (without a trailing `/`). The backend finds its credentials."""

    url: str

    def __repr__(self) -> str:
        return f"{type(self).__name__}(url={masked(self.url)!r})"

    @property
    def traits(self) -> Traits:
        return Traits(span_bytes=16 << 20, num_readers=4, partitioned=False)

    @property
    def retries(self) -> int:
        return retries_of(self.url)

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        def once(fs: Any, path: str) -> None:
            file = fs.open(path, "wb")
            try:
                for part in parts:
                    view = memoryview(part).cast("B")
                    for start in range(0, len(view), _SLICE_BYTES):
                        file.write(view[start : start + _SLICE_BYTES])
                file.close()
            except BaseException:
                _drop(fs, path, file)
                raise

        self._call("write", key, _making_folders(once))

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        if size == 0:
            return b""

        def once(fs: Any, path: str) -> bytes:
            try:
                return bytes(fs.cat_file(path, start=offset, end=None if size is None else offset + size))
            except OSError as error:
                if _status(error) == 416:  # the file ends before `offset`
                    return b""
                raise

        return self._call("read", key, once)

    def read_into(self, key: str, offset: int, outs: Sequence[memoryview]) -> int:
        data = memoryview(self.read(key, offset, sum(len(out) for out in outs)))
        at = 0
        for out in outs:
            part = data[at : at + len(out)]
            out[: len(part)] = part
            at += len(part)
        return at

    def put_if_absent(self, key: str, data: bytes) -> bool:
        sent = False  # if so, the object there may be this call's, whose reply was lost

        def exclusively(fs: Any, path: str) -> bool:
            nonlocal sent
            again, sent = sent, True
            try:
                _create(fs, path, data)
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

        with _put_lock:
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
        return [*self.sizes(prefix)]

    def sizes(self, prefix: str = "") -> dict[str, int | None]:
        """Keys as in `list`, each with its bytes if the backend provides them."""
        return {key: found.get("size") for key, found in self._find(prefix).items()}

    def times(self, name: str | None, prefix: str = "") -> dict[str, float | None]:
        """Write times as in `list_times`."""
        return {key: _written_at(found) for key, found in self._find(prefix).items() if is_called(key, name)}

    def _find(self, prefix: str) -> dict[str, dict[str, Any]]:
        """Map from every key below the folder, sorted, to the backend's information."""

        def once(fs: Any, path: str) -> dict[str, dict[str, Any]]:
            fs.invalidate_cache()
            try:
                found = fs.find(path, detail=True)
            except FileNotFoundError:
                return {}
            above = f"{prefix}/" if prefix else ""
            names = sorted(name for name in found if name.startswith(f"{path}/"))
            return {above + name[len(path) + 1 :]: found[name] for name in names}

        return self._call("list", prefix, once)

    def puts_atomically(self) -> bool:
        """Whether the backend itself refuses to overwrite; otherwise only this class checks first."""
        return self._call("put_if_absent", "", _creates_exclusively)

    def folders(self) -> Keys:
        """Names of the top-level folders, sorted."""

        def once(fs: Any, path: str) -> Keys:
            fs.invalidate_cache()
            try:
                found = fs.ls(path, detail=True)
            except FileNotFoundError:
                return []
            names = {str(item["name"]).rstrip("/") for item in found if item["type"] == "directory"}
            return sorted(name[len(path) + 1 :] for name in names if name.startswith(f"{path}/"))

        return self._call("list", "", once)

    def remove_folders(self, prefix: str) -> Keys:
        """Remove folders without files, as in `remove_folders`. Object stores have none."""

        def once(fs: Any, path: str) -> None:
            if fs.async_impl:
                return
            with suppress(FileNotFoundError):
                fs.invalidate_cache()
                folders = [folder for folder, _, _ in fs.walk(path)] if prefix else [path]
                for folder in sorted(folders, key=len, reverse=True):
                    with suppress(OSError):
                        fs.rmdir(folder)

        self._call("delete", prefix, once)
        return []

    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        return []  # fsspec does not list them

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        return None

    def _call(self, operation: str, key: str, once: Callable[[Any, str], T]) -> T:
        """Result of `once(file system, path of the key)` with retries; every failure becomes a StorageError.

        Errors of what is written, such as those of a checkpoint that is read meanwhile, pass through.
        """
        if key:
            check_key(self.url, key)
        try:
            fs, root = _open(self.url)
            path = f"{root}/{key}" if key else root
            return with_retries(lambda: once(fs, path), url=self.url, transient=may_pass)
        except RayshardedError:
            raise
        except Exception as error:  # the boundary to the backends, which raise arbitrary errors
            raise storage_error(self.url, operation, key, error) from error


def may_pass(error: BaseException) -> bool:
    """Whether the same call may succeed a little later.

    Backends raise arbitrary errors, or hide them as a cause. The HTTP status shows it, or a class of error that the
    loaded libraries raise for broken connections.
    """
    if isinstance(error, RayshardedError):  # not of the backend
        return False
    if is_transient(error) or _status(error) in _STATUS_MAY_PASS:
        return True
    http_client = sys.modules.get("aiohttp")
    if http_client and isinstance(error, (http_client.ClientConnectionError, http_client.ClientPayloadError)):
        return True
    cause = error.__cause__
    return cause is not None and cause is not error and may_pass(cause)


_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")  # of disks, s3fs, adlfs, gcsfs and memory


def _written_at(found: dict[str, Any]) -> float | None:
    """Write time in seconds since the Unix epoch."""
    at = next((found[name] for name in _TIMES if found.get(name)), None)
    with suppress(ValueError):
        at = datetime.fromisoformat(at) if isinstance(at, str) else at
    if isinstance(at, datetime):
        return at.timestamp()
    return float(at) if isinstance(at, (int, float)) else None


def _status(error: BaseException) -> int:
    """HTTP status of an error or its cause, as gcsfs, adlfs, aiohttp and botocore name it; 0 if there is none."""
    said: Any = getattr(error, "response", None)
    if isinstance(said, dict):
        return int(said.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    found = [getattr(error, name, None) for name in ("status", "status_code", "code")]
    status = next((status for status in found if isinstance(status, int)), 0)
    return status or (_status(error.__cause__) if error.__cause__ is not None else 0)


def _open(url: str) -> tuple[Any, str]:
    import fsspec

    fs, root = fsspec.core.url_to_fs(url.removeprefix(THROUGH_FSSPEC))
    return fs, str(root).rstrip("/")


def _create(fs: Any, path: str, data: bytes) -> None:
    """Create a file. Raises FileExistsError if it exists, also where s3fs does not know the server's wording."""
    try:
        fs.pipe_file(path, data, mode="create")
    except OSError as error:
        if _status(error) == 412:
            raise FileExistsError(path) from error
        raise


def _drop(fs: Any, path: str, file: Any) -> None:
    """End a write that failed. Closing the file would permanently store what was written so far under its name."""
    with suppress(Exception):
        if hasattr(file, "discard") and getattr(file, "autocommit", None) is not None:
            file.discard()
            file.closed = True  # otherwise garbage collection closes it
            return
    with suppress(Exception):
        file.close()
        fs.rm_file(path)


def _making_folders(once: Callable[[Any, str], T]) -> Callable[[Any, str], T]:
    """`once`, repeated after making the parent folder if that is missing.

    Backends with asynchronous cores are object stores. They have no folders, and making one could create a bucket with
    a misspelled name.
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
    """Whether the backend refuses to create a file that exists, tried on a probe beside the keys."""
    probe = f"{root}/.raysharded-probe-{secrets.token_hex(6)}"
    create = _making_folders(lambda fs, path: _create(fs, path, b"raysharded"))
    try:
        create(fs, probe)
        create(fs, probe)
    except FileExistsError:
        return True
    except (TypeError, ValueError, NotImplementedError):
        return False
    finally:
        with suppress(Exception):  # a leftover probe is harmless
            fs.rm_file(probe)
    return False


def _start_anew() -> None:
    """Renew the lock in a forked process: a thread of its parent may hold the old one."""
    global _put_lock
    _put_lock = threading.Lock()


os.register_at_fork(after_in_child=_start_anew)
