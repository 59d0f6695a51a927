"""The mark of a requested start of a run, until the driver has claimed the run or has failed. For people: nothing
depends on it.

    lease/start.json    in a lease's format; the process is that of the driver, as soon as there is one
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from raysharded.checkpoint import NoSuchKey, Storage
from raysharded.checkpoint.storage.optional_operations import remove_folders
from raysharded.errors import StorageError
from raysharded.ownership.lease import Holder, Process, encode, lease_key, read_lease
from raysharded.ownership.process_identity import is_gone, this_process

_KEY = lease_key("start")
_FRESH_S = 120.0
"""Longest time for which a mark counts if its process is unknown, or is one of another machine."""


def mark_start(storage: Storage, *, driver_is_here: bool, wall: Callable[[], float] = time.time) -> Callable[[], None]:
    """Put the mark, or replace it. Returns a function that removes it, and the folders that were made for it alone.

    `driver_is_here`: whether this process is to drive; otherwise one that it starts. A mark that cannot be written is
    left out.
    """
    process = this_process() if driver_is_here else Process()
    holder = Holder(driver="start", host=platform.node(), process=process, since=wall(), lease_s=0.0)
    made: Sequence[str] = getattr(storage, "missing_folders", list)()
    with suppress(StorageError):
        storage.write(_KEY, [encode(holder)])

    def unmark() -> None:
        with suppress(StorageError, OSError):
            storage.delete([_KEY])
            remove_folders(storage, "")
            for folder in made:
                if os.path.isdir(folder):
                    os.rmdir(folder)

    return unmark


def is_starting(storage: Storage, *, wall: Callable[[], float] = time.time) -> bool:
    """True if a start of the run is under way. One small request. Raises StorageError."""
    try:
        seen = read_lease(storage, "start")
    except NoSuchKey:
        return False
    if seen.holder is None:
        return False
    process = seen.holder.process
    if process.machine and process.machine == this_process().machine:
        return not is_gone(process)
    return abs(wall() - seen.holder.since) <= _FRESH_S
