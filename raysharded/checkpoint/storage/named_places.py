"""Places that a file of a run names: a fork's parent, a pin's fork, the weights that a run began with.

The author of the file may be a stranger, and opening a place sends this process's credentials there. So a file gives
only a path. The server, its options and the password are those of the run's own URL, or of a place that the user allows
by name in $RAYSHARDED_ALLOWED_PLACES.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from raysharded.errors import ConfigError, RefusedCheckpoint
from raysharded.locations import local_path, scheme_of

ENVIRONMENT_PLACES = "RAYSHARDED_ALLOWED_PLACES"
"""Environment variable: folders and URLs, separated by commas, below which files of a run may name places."""

_NO_AUTHORITY = ("memory",)
"""Schemes whose URLs begin with a path: all places of the scheme are within this process."""
_HERE = ("file", "local")


@dataclass(frozen=True, slots=True)
class _Place:
    """The parts of a URL, or of a folder of this machine, whose scheme is "" here."""

    scheme: str
    authority: str
    """User, password, host, port; or the bucket."""
    path: str
    """As in the URL, without a trailing `/`."""
    options: str = ""
    """Options of an s3:// URL, with the `?`."""

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}{self.path}{self.options}" if self.scheme else self.path

    def is_at(self, other: _Place) -> bool:
        """Whether both have one server."""
        return (self.scheme, _public(self.authority)) == (other.scheme, _public(other.authority))

    def is_below(self, top: _Place) -> bool:
        """Whether the path is that of `top`, or below it."""
        return f"{self.path.strip('/')}/".startswith(f"{top.path.strip('/')}/".lstrip("/"))


def url_named(named: str, own: str, where: str) -> str:
    """The URL under which a place is opened that the file `where` of the run at `own` names.

    Its scheme and server are those of `own`, or of an allowed place that it is below. Options and passwords in `named`
    are ignored. Raises RefusedCheckpoint for all other places, for chains of fsspec (`::`) and for relative paths;
    ConfigError if an allowed place is invalid.
    """
    allowed = _allowed()
    try:
        place = _parsed(named)
    except (ConfigError, ValueError) as error:
        raise RefusedCheckpoint(f"{where} names {named!r}, which is no place for a run: {error}") from None
    for top in allowed:
        if place.is_at(top) and place.is_below(top):
            return replace(top, path=place.path).url
    here = _own(own)
    if here is not None and place.is_at(here):
        return replace(here, path=place.path).url
    raise RefusedCheckpoint(
        f"{where} names {named!r}, which is neither on the storage of the run nor allowed: it was not opened. If "
        f"you trust that place, set {ENVIRONMENT_PLACES} to it, or to a folder above it, and repeat this."
    )


def is_same_place(one: str, other: str) -> bool:
    """Whether two URLs name one folder, regardless of options and passwords. Links are followed on this machine."""
    places = [_own(one), _own(other)]
    if places[0] is None or places[1] is None:
        return one == other
    paths = [place.path.strip("/") if place.scheme else os.path.realpath(place.path) for place in places if place]
    return places[0].is_at(places[1]) and paths[0] == paths[1]


def _allowed() -> list[_Place]:
    found = [text.strip() for text in os.environ.get(ENVIRONMENT_PLACES, "").split(",")]
    try:
        return [_parsed(text if scheme_of(text) else local_path(text) or text) for text in found if text]
    except ValueError as error:  # a ConfigError is one
        raise ConfigError(f"${ENVIRONMENT_PLACES}={','.join(found)!r}: {error}") from None


def _own(url: str) -> _Place | None:
    """The parts of the URL of a run; None if none can be on its server, as for a chain of URLs."""
    try:
        return _parsed(url)
    except ValueError:
        return None


def _public(authority: str) -> str:
    """The authority without user and password, if it has a password."""
    user, _, host = authority.rpartition("@")
    return host if ":" in user else authority


def _parsed(url: str) -> _Place:
    """The parts of a URL or an absolute path. Raises ValueError unless it names one place by itself."""
    scheme = scheme_of(url)
    if scheme is None or scheme in _HERE:
        if not url.startswith("/") and (scheme is None or url.partition("://")[2].startswith(".")):
            raise ValueError("it is a relative path. Give an absolute one.")
        return _Place("", "", local_path(url) or "/")
    whole, mark, options = url.partition("?")
    if "::" in url or not url.isprintable() or (mark and scheme != "s3"):
        raise ValueError("it is a chain of URLs, has options, or cannot be printed. Give one plain URL.")
    rest = whole.partition("://")[2]
    authority = "" if scheme in _NO_AUTHORITY else rest.partition("/")[0]
    path = rest.removeprefix(authority).rstrip("/")
    if {".", ".."} & set(path.split("/")) or "#" in path:
        raise ValueError("'.', '..' and '#' are not part of a place. Give its plain URL.")
    return _Place(scheme, authority, path, mark + options)
