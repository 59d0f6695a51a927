"""Reads of small objects without trust: of a regular file, and not more than an object of its kind has."""

from __future__ import annotations

from raysharded.checkpoint.format.signed_json import MAX_BYTES
from raysharded.checkpoint.storage import NotAFile, Storage
from raysharded.errors import CorruptCheckpoint
from raysharded.locations import join_url


def read_small(storage: Storage, key: str, most_bytes: int = MAX_BYTES) -> bytes:
    """The bytes under a key.

    Raises CorruptCheckpoint for something else than a file, and for a file of more than `most_bytes`; NoSuchKey if
    there is nothing; StorageError.
    """
    try:
        data = storage.read(key, 0, most_bytes + 1)
    except NotAFile as error:
        raise CorruptCheckpoint(str(error)) from error
    if len(data) > most_bytes:
        raise CorruptCheckpoint(
            f"{join_url(storage.url, key)} has more than {most_bytes} bytes: no writer of raysharded makes it as long. "
            "Restore it from a copy."
        )
    return data
