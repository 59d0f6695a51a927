"""Paths and URLs: told apart, put together, those that name a place on this machine; and where the library is."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

import raysharded
from raysharded.errors import ConfigError

PACKAGE_FOLDER = os.path.join(os.path.dirname(raysharded.__file__), "")
"""The library's own folder, as its frames name it, with a slash at the end."""

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)(?:://|::)")
_FILE = re.compile(r"(?:file|local)://([^/]*)(.*)", re.IGNORECASE | re.DOTALL)
_ONE_SLASH = re.compile(
    r"((?:fsspec\+)?(?:file|local|memory|s3a?|gc?s|abfss?|az|adl|hdfs|webhdfs|https?|s?ftp|ssh|oci|oss|hf)):/(?!/)",
    re.IGNORECASE,
)


def scheme_of(url: str) -> str | None:
    """The part before `://` (or fsspec's `::`) in lower case; None for the path of a folder."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else None


def local_path(url: str) -> str | None:
    """The absolute path that a path or a file:// URL names on this machine; None for any other URL.

    In a file:// URL `%20` and the like are characters, and file://./a is a relative path, as is file://../a. Raises
    ConfigError for one of another machine, for `s3:/` with one slash and the like, and for a path with a NUL.
    """
    match = _FILE.match(url)
    if match is None and scheme_of(url) is not None:
        return None
    if one := _ONE_SLASH.match(url):
        raise ConfigError(
            f"{url!r} is no URL: {one[1]}: needs two slashes after it, as in {one[1]}://. If it is a folder here, give "
            f"{'./' + url!r}."
        )
    path = os.path.expanduser(url) if match is None else _path_of(url, match[1], match[2])
    if "\0" in path:
        raise ConfigError(f"{url!r} has a NUL in it, which no path may have. Give another.")
    return os.path.abspath(path)


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


THROUGH_FSSPEC = "fsspec+"
"""What a URL begins with if fsspec is to open the rest, whatever its scheme."""


def join_url(base: str, *parts: str) -> str:
    """`base` with `parts` appended to its path, single `/` between them; without a trailing `/`.

    An `s3://` URL may end in options (`?endpoint_url=...`), which stay at the end. Everywhere else `?` is a character
    like others. This is the one way to append to a storage's URL: `f"{url}/{key}"` is wrong where there are options.
    """
    path, mark, options = base.partition("?") if scheme_of(base) == "s3" else (base, "", "")
    head = path if path.endswith("://") else path.rstrip("/")
    joined = head + ("" if head.endswith("://") or not parts else "/") + "/".join(part.strip("/") for part in parts)
    return (joined or "/") + mark + options
