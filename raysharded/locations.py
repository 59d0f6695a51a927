"""Paths and URLs: how they are told apart, and which of them name a place on this machine."""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from raysharded.errors import ConfigError

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

    In a file:// URL `%20` and the like are characters. Raises ConfigError for one of another machine, for `s3:/` with
    one slash and the like, and for a path with a NUL.
    """
    match = _FILE.match(url)
    if match is None and scheme_of(url) is not None:
        return None
    if one := _ONE_SLASH.match(url):
        raise ConfigError(
            f"{url!r} is no URL: {one[1]}: needs two slashes after it, as in {one[1]}://. If it is a folder here, give "
            f"{'./' + url!r}."
        )
    path = url if match is None else unquote(match[2])
    if match is not None and (match[1].lower() not in ("", "localhost") or not path):
        raise ConfigError(
            f"{url!r} does not name a path of this machine: between file:// and the path there may be nothing, or "
            "localhost. Give file:///absolute/path, or the path itself."
        )
    if "\0" in path:
        raise ConfigError(f"{url!r} has a NUL in it, which no path may have. Give another.")
    return os.path.abspath(os.path.expanduser(path) if match is None else path)
