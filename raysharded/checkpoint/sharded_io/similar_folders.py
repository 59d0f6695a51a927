"""Folders that a mistyped URI may mean."""

from __future__ import annotations

import difflib

from raysharded.checkpoint.sharded_io.checkpoint_uri import split
from raysharded.checkpoint.storage import open_storage
from raysharded.checkpoint.storage.folders import list_folders
from raysharded.errors import RayshardedError
from raysharded.locations import join_url

_NAMES = 3
_DEPTH = 4
"""Mistyped parts of a path, counted from its end, that are looked for at most."""


def similar(uri: str, depth: int = _DEPTH) -> list[str]:
    """At most three existing folders whose paths are similarly spelled, the most similar first. Never raises.

    Each part of the path may be mistyped. Lists only the folders on the way.
    """
    try:
        above, name = split(uri)
        inside = list_folders(open_storage(above))
        if not inside and depth > 1:
            return [found for other in similar(above, depth - 1) for found in _named(other, name)][:_NAMES]
        return _named(above, name)
    except RayshardedError:  # this must not hide the error that it belongs to
        return []


def _named(folder: str, name: str) -> list[str]:
    inside = list_folders(open_storage(folder))
    close = [name] if name in inside else difflib.get_close_matches(name, inside, n=_NAMES, cutoff=0.6)
    return [join_url(folder, other) for other in close]
