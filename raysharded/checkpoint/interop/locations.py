"""Locations of checkpoints and foreign folders: a URL as a storage and a prefix in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from raysharded.checkpoint.format.limits import MAX_NUMBER
from raysharded.checkpoint.format.paths import key_of, parse_save_folder
from raysharded.checkpoint.sharded_io.checkpoint_uri import Uri, split, text_of
from raysharded.checkpoint.storage import NoSuchKey, Storage, open_storage
from raysharded.errors import CheckpointError, ConfigError, StorageError
from raysharded.locations import join_url, local_path

Place = tuple[Storage, str]
"""A storage rooted above a folder, and the folder's name in it ("" if there is nothing above)."""


def absolute(uri: Uri) -> str:
    """The URI, with a path made absolute by the present working directory. "" stays: it stands for no folder.

    Raises ConfigError for an invalid path, and for a value that is neither text nor a path.
    """
    text = text_of(uri)
    return text and (local_path(text) or text)


def named_save(prefix: str) -> tuple[int, str] | None:
    """The pair (step, save id) of a folder that is named as a save; None for any other folder.

    Raises CheckpointError for a step that no checkpoint can have.
    """
    found = parse_save_folder(prefix.rpartition("/")[2])
    if found is not None and found[0] > MAX_NUMBER:
        raise CheckpointError(
            f"the folder {prefix!r} is named after step {found[0]}, but steps are at most 2^62. Choose another uri."
        )
    return found


def place_of(uri: Uri) -> Place:
    """The place of a folder or file. Storage is not accessed."""
    try:
        above, name = split(uri)
    except ConfigError:
        return open_storage(os.fspath(uri)), ""
    return open_storage(above), name


def prefix_of(uri: Uri) -> str:
    """Name of a folder or file in its place. No storage is opened."""
    try:
        return split(uri)[1]
    except ConfigError:
        return ""


def url_of(place: Place, *parts: str) -> str:
    """URL of a folder, or of a file below it, for messages."""
    storage, prefix = place
    return join_url(storage.url, *([prefix] if prefix else []), *parts)


def has(place: Place, name: str) -> bool:
    """Whether the folder has a file of that name."""
    storage, prefix = place
    with suppress(NoSuchKey):
        storage.size(key_of(prefix, name))
        return True
    return False


@contextmanager
def undone_on_error(place: Place) -> Iterator[Callable[[str], str]]:
    """Yield a function to call before each file of the folder is written. It returns the file's key.

    If the block fails, those files are removed, the last one first. A file that storage cannot delete stays.
    """
    storage, prefix = place
    keys: list[str] = []

    def begun(name: str) -> str:
        keys.append(key_of(prefix, name))
        return keys[-1]

    try:
        yield begun
    except BaseException:
        for key in reversed(keys):
            with suppress(StorageError):
                storage.delete([key])
        raise


def refuse_existing(place: Place, names: Iterable[str]) -> None:
    """Raise CheckpointError if the folder has a file of one of the names."""
    there = next((name for name in names if has(place, name)), None)
    if there is not None:
        raise CheckpointError(
            f"{url_of(place)} has {there} already, and nothing is overwritten. Choose another folder, or delete what "
            "is there first."
        )
