"""Reads without trust: of a regular file, not more than an object of its kind has, and of a disk that may be broken."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from raysharded.checkpoint.format.signed_json import MAX_BYTES
from raysharded.checkpoint.storage import NotAFile, Storage
from raysharded.errors import CheckpointError, CorruptCheckpoint, StorageError
from raysharded.locations import join_url, scheme_of

_OF_THE_DISK = {getattr(errno, name) for name in ("EIO", "EBADMSG", "EUCLEAN") if hasattr(errno, name)}
"""Errors of the operating system for bytes that a disk or its file system has lost."""


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


@contextmanager
def intact_on_disk(storage: Storage, where: str) -> Iterator[None]:
    """Raise CorruptCheckpoint for bytes that a disk below `storage` has lost: those of another checkpoint may be there.

    `where`: the file, for people. Any other StorageError passes, and so does each of a server: a retry may help.
    """
    try:
        yield
    except StorageError as error:
        cause = error.__cause__
        if scheme_of(storage.url) is not None or not isinstance(cause, OSError) or cause.errno not in _OF_THE_DISK:
            raise
        raise CorruptCheckpoint(
            f"{where} cannot be read from its disk: {cause}. See the kernel's log (`dmesg`). Resume from another "
            "checkpoint, or restore the file from a copy."
        ) from error


def is_lost_on_disk(error: CheckpointError) -> bool:
    """Whether `intact_on_disk` raised it. Later the file may be readable, as on a network file system."""
    cause = error.__cause__.__cause__ if isinstance(error.__cause__, StorageError) else None
    return isinstance(cause, OSError) and cause.errno in _OF_THE_DISK
