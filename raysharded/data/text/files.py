"""Files behind paths and fsspec URLs: naming, listing and opening them, with errors that name the file."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import fsspec

from raysharded.display.plain_text import masked
from raysharded.errors import ConfigError, DataError, StorageError, UnreadableData
from raysharded.locations import (
    THROUGH_FSSPEC,
    join_url,
    local_path,
    refuse_password,
    require_file,
    scheme_of,
    with_home,
)

PathLike: TypeAlias = str | os.PathLike[str]
_OF_CONTENTS = (ValueError, TypeError, LookupError, NotImplementedError, EOFError)
"""Errors of what a file has in it, of pyarrow's and Python's decoders; not of storage."""
_S3 = re.compile(r"[sS]3://(?P<bucket>[^/?]+)(?P<key>/.*?)?(?P<options>\?[a-z_]+=[^/]?.*)?")


@dataclass(frozen=True, slots=True, order=True)
class File:
    """One file on one file system."""

    name: str
    """Name for display: a local path, or a URL."""
    path: str
    """Path within `fs`."""
    fs: Any  # an fsspec file system, which has no types

    @property
    def suffix(self) -> str:
        """The lower-case suffix with its dot, or ''."""
        return os.path.splitext(self.path)[1].lower()


def as_paths(paths: PathLike | Sequence[PathLike], what: str) -> tuple[str, ...]:
    """The paths as strings that mean the same in any process: local ones become absolute.

    Raises ConfigError for none and for values that are not paths, and as `local_path`. `what` names the argument.
    """
    many = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not many or not all(isinstance(path, (str, os.PathLike)) and os.fspath(path) != "" for path in many):
        raise ConfigError(f"{what}={paths!r}: give a path, a folder, a glob or a URL, or a list of them.")
    return tuple(_absolute(os.fspath(path)) for path in many)


def _absolute(path: str) -> str:
    local = local_path(path)
    return path if local is None else local


def file_system(path: str) -> tuple[Any, str]:
    """The fsspec file system of a path or URL, and the path within it.

    Raises DataError for an unknown protocol, for one whose package is not installed, and for keys in an `s3://` URL;
    and as `with_home`.
    """
    if scheme_of(path) == "s3":
        refuse_password(path, "s3fs would take it for a part of the bucket's name, and show it.", DataError)
    try:
        fs, within = fsspec.core.url_to_fs(with_home(path))
    except ConfigError:
        raise
    except Exception as error:  # the boundary to the packages of the protocols
        raise DataError(
            f"{path}: cannot open this kind of storage: {error}. Use a local path or a URL that fsspec knows, "
            "and install the package of its protocol (s3fs for s3://, gcsfs for gs://)."
        ) from error
    return fs, within


def readable_system(path: str) -> tuple[Any, str]:
    """As `file_system`, for reading. An `s3://` URL is read by boto3 where that is installed, with our URLs' options.

    `?` is a wildcard in a glob, and begins the options where `=` follows.
    """
    if path.startswith(THROUGH_FSSPEC):
        return file_system(path.removeprefix(THROUGH_FSSPEC))
    if scheme_of(path) != "s3" or importlib.util.find_spec("boto3") is None:
        return file_system(path)
    from raysharded.data.text.s3_files import S3Files

    found = _S3.fullmatch(path)
    if found is None:
        raise DataError(
            f"{masked(path)}: not a URL of S3. Give s3://bucket/key, with options as in s3://bucket/key?a=b."
        )
    bucket, key, options = found["bucket"], found["key"] or "", found["options"] or ""
    try:
        return S3Files(f"s3://{bucket}{options}"), f"{bucket}{key}".rstrip("/")
    except StorageError as error:
        raise DataError(f"{masked(path)}: {masked(str(error))}") from error


def join_path(path: str, name: str) -> str:
    """A path or URL of a file in the folder at `path`."""
    return join_url(path, name) if scheme_of(path) == "s3" else f"{path.rstrip('/')}/{name}"


def is_local(fs: Any) -> bool:
    """Whether the files are on this machine's file system."""
    return "file" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)


def is_hidden(below: str) -> bool:
    """True if a name on a path below a folder begins with '.' or '_', as Parquet tools hide files."""
    return any(part.startswith((".", "_")) for part in below.split("/"))


def find_files(
    pattern: str, *, suffix: str = "", recursive: bool = False, hides: Callable[[str], bool] = is_hidden
) -> list[File]:
    """The files that a path, a folder or a glob stands for, sorted by name.

    In a folder these are the files that end with `suffix`, also in its folders if `recursive`, without those that
    `hides`. Raises DataError if there is none.
    """
    fs, path = readable_system(pattern)
    with reading(pattern, "list"):
        if fs.isfile(path):
            return [File(_name(fs, path), path, fs)]
        folder = fs.isdir(path)
        if folder:
            found = fs.find(path, maxdepth=None if recursive else 1)
            paths = [p for p in found if p.endswith(suffix) and not hides(p[len(path.rstrip("/")) + 1 :])]
        else:
            paths = [p for p, info in fs.glob(path, detail=True).items() if info["type"] != "directory"]
    if not paths:
        empty = f"the folder has neither a token store nor a file that ends with {suffix!r}"
        if not suffix:
            empty = "the folder has no file, apart from hidden ones"
        what = empty if folder else "no such file, and no file matches it"
        pack = " `raysharded data pack` makes tokens of texts." if suffix else ""
        raise DataError(f"{pattern}: {what}. Check the path, and that this machine can see it.{pack}")
    return sorted(File(_name(fs, p), p, fs) for p in paths)


def require_files(paths: Sequence[str], *, suffix: str = "") -> None:
    """Raise DataError if a path of this machine stands for no file, as `find_files`; URLs are ignored."""
    for path in paths:
        if local_path(path) is not None:
            find_files(path, suffix=suffix)


def _name(fs: Any, path: str) -> str:
    return path if is_local(fs) else str(fs.unstrip_protocol(path))


def refuse_no_file(fs: Any, path: str, name: str) -> None:
    """Raise DataError for a pipe, a device or a folder of this machine, in place of a file. `name`: for display."""
    if not is_local(fs):
        return
    try:
        require_file(path)
    except FileNotFoundError:
        return  # opening it reports that
    except OSError as error:
        raise DataError(f"{name}: {error}. Put a file there, or correct the path.") from error


def open_file(file: File) -> Any:
    """The file, opened for random reads of bytes. Raises DataError if that is impossible."""
    refuse_no_file(file.fs, file.path, file.name)
    with reading(file.name, "open"):
        # Without a cache a remote read fetches the requested bytes, not megabytes around them.
        return file.fs.open(file.path, "rb", cache_type="none")


@contextmanager
def reading(name: str, verb: str) -> Iterator[None]:
    """Turn any error inside the block into a DataError that names the file: for one of storage an UnreadableData."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"{name}: the file is missing. Restore it, or correct the path.") from error
    except Exception as error:  # the boundary to storage: every protocol has its own errors
        cause = f"{type(error).__name__}: {error}".rstrip(".")
        kind = DataError if isinstance(error, _OF_CONTENTS) else UnreadableData
        raise kind(f"{name}: cannot {verb}: {cause}. Check access to it.") from error
