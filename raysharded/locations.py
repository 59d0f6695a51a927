"""Paths and URLs: classification, joining, local paths; and the library's folder."""

from __future__ import annotations

import os
import re
import stat
from urllib.parse import unquote

import raysharded
from raysharded.display.plain_text import has_password
from raysharded.errors import ConfigError, RayshardedError

PACKAGE_FOLDER = os.path.join(os.path.dirname(raysharded.__file__), "")
"""The library's folder, as its frames name it, with a trailing slash."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(?:://|::)")
_FILE = re.compile(r"(?:file|local)://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_ONE_SLASH = re.compile(
    r"((?:fsspec\+)?(?:file|local|memory|s3a?|gc?s|abfss?|az|adl|hdfs|webhdfs|https?|s?ftp|ssh|oci|oss|hf)):/(?!/)",
    re.IGNORECASE,
)


_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))


def scheme_of(url: str) -> str | None:
    """The part before `://` (or fsspec's `::`) in lower case; None for the path of a folder."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else None


def local_path(url: str) -> str | None:
    """The absolute path on this machine that a path or a file:// URL names; None for any other URL.

    In a file:// URL `%20` and the like are decoded, and file://./a and file://../a are relative paths. Raises
    ConfigError for a path of another machine, for `s3:/` and the like with one slash, and for a path with a NUL. Raises
    it as `with_home`, too, and for a relative path in a working directory that was removed.
    """
    match = _FILE.match(url)
    if match is None and scheme_of(url) is not None:
        return None
    if one := _ONE_SLASH.match(url):
        raise ConfigError(
            f"{url!r} is an invalid URL: {one[1]}: needs two slashes after it, as in {one[1]}://. For a local "
            f"folder, give {'./' + url!r}."
        )
    path = with_home(url) if match is None else _path_of(url, match[1], match[2])
    if "\0" in path:
        raise ConfigError(f"{url!r} has a NUL in it, which no path may have. Give another.")
    try:
        return os.path.abspath(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{url!r} is a relative path, and the working directory of this process was removed. Give an absolute "
            "path, or start in a folder that exists (`cd`)."
        ) from None


def with_home(path: str) -> str:
    """A path with `~` or `~USER` replaced by that home folder. Raises ConfigError if there is none.

    A folder whose name begins with `~` is `./~name`.
    """
    if not path.startswith("~"):
        return path
    user = path.partition("/")[0]
    expanded = os.path.expanduser(path)
    if expanded == path or (user == "~" and os.environ.get("HOME") == ""):
        none = "HOME is not set to one, and /etc/passwd has none for this user" if user == "~" else "no such user"
        raise ConfigError(f"{path!r}: {user} is no folder here ({none}). Give an absolute path, or set HOME.")
    return expanded


def require_file(path: str | os.PathLike[str]) -> None:
    """Raise OSError unless a file is at a path that a user gave: what reads it next would wait for a pipe's writer.

    The pipe of a shell's `<(command)` passes for a file: it has its writer, and no name in a folder.
    """
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode) and not (stat.S_ISFIFO(mode) and not os.path.exists(os.path.realpath(path))):
        kind = next((kind for is_kind, kind in _KINDS if is_kind(mode)), "a device")
        raise OSError(f"it is {kind}, not a file")


def _path_of(url: str, host: str, path: str) -> str:
    if host in (".", ".."):
        return host + unquote(path)
    if host.lower() not in ("", "localhost"):
        raise ConfigError(
            f"{url!r} does not name a path of this machine: {host} would be another one. Give "
            f"{'./' + unquote(host + path)!r} for the folder below the working directory, file:///... for an absolute "
            "path."
        )
    if not path:
        raise ConfigError(f"{url!r} does not name a path of this machine. Give file:///..., or the path itself.")
    return unquote(path)


def refuse_password(url: str, why: str, kind: type[RayshardedError]) -> None:
    """Raise an error of this kind for a URL with a password. `why`: the sentence about the file that would hold it."""
    if has_password(url):
        raise kind(
            f"{url} has a password in it. {why} Leave it out, and give it to the backend in another way: its "
            "environment variables, or fsspec's configuration in ~/.config/fsspec."
        )


THROUGH_FSSPEC = "fsspec+"
"""Prefix of a URL whose remainder is opened by fsspec, regardless of its scheme."""


def join_url(base: str, *parts: str) -> str:
    """`base` with `parts` appended to its path, separated by single `/`; without a trailing `/`.

    An `s3://` URL may end in options (`?endpoint_url=...`), which stay at the end. In all other URLs `?` is an ordinary
    character. Always append to a storage URL with this function: `f"{url}/{key}"` is wrong if the URL has options.
    """
    path, mark, options = base.partition("?") if scheme_of(base) == "s3" else (base, "", "")
    head = path if path.endswith("://") else path.rstrip("/")
    joined = head + ("" if head.endswith("://") or not parts else "/") + "/".join(part.strip("/") for part in parts)
    return (joined or "/") + mark + options


def split_url(url: str) -> tuple[str, str]:
    """A storage URL without the last part of its path, and that part; `join_url` of both is the URL."""
    path, mark, options = url.partition("?") if scheme_of(url) == "s3" else (url, "", "")
    above, _, name = path.rstrip("/").rpartition("/")
    return (above or "/") + mark + options, name


def name_of(url: str) -> str:
    """The last part of a URL's path, without the options of an `s3://` URL: of a run's storage, the run's name."""
    path = url.partition("?")[0] if scheme_of(url) == "s3" else url
    return path.rstrip("/").rpartition("/")[2]
