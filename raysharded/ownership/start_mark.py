"""The mark of a requested start of a run: put before the driver has claimed the run, removed when it has. For people:
nothing depends on it.

    lease/start.json    in a lease's format; the process is that of the driver, as soon as there is one

A start that fails before a driver leads the run writes nothing to the journal. Its reason stays in the mark: then the
mark is `ended`, and has `error`, and `num_segments`, the size of the journal at that time. It counts until the next
start, or until a driver has written more. A folder that is no run without the mark does not become one by it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from raysharded.checkpoint import NoSuchKey, Storage
from raysharded.checkpoint.format import signed_json
from raysharded.checkpoint.storage.optional_operations import remove_folders
from raysharded.checkpoint.storage.small_objects import read_small
from raysharded.checkpoint.stored_claims import list_numbers
from raysharded.display.plain_text import masked
from raysharded.errors import CorruptCheckpoint, RunOwnedElsewhere, StorageError
from raysharded.journal.log import segment_numbers
from raysharded.locations import join_url
from raysharded.ownership.lease import FORMAT, Holder, Process, holder_of, lease_key
from raysharded.ownership.process_identity import is_gone, this_process

_KEY = lease_key("start")
_FRESH_S = 120.0
"""Longest time for which a mark counts if its process is unknown, or is one of another machine."""
_MAX_ERROR = 4000
"""Characters of an error that are kept."""
_MAX_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """A start of a run, as its mark shows it."""

    under_way: bool
    """Whether a driver may still be about to claim the run."""
    at: float
    """Time of the request, or of the failure: seconds since 1970."""
    error: str = ""
    """Reason why the start failed before a driver led the run; empty: it did not."""
    num_segments: int = 0
    """Segments that the journal had at the time of the failure."""


class StartMark:
    """The mark of one start, for the process that starts the run or is to drive it."""

    def __init__(self, storage: Storage, *, wall: Callable[[], float] = time.time) -> None:
        self._storage, self._wall = storage, wall
        self._made: Sequence[str] = ()
        """Folders that were made for the mark alone, the innermost first."""

    def put(self, *, driver_is_here: bool) -> None:
        """Put the mark, or replace it. One that cannot be written is left out.

        `driver_is_here`: whether this process is to drive; otherwise one that it starts.
        """
        self._made = getattr(self._storage, "missing_folders", list)()
        with suppress(StorageError):
            self._write(self._holder(this_process() if driver_is_here else Process()))

    def remove(self) -> None:
        """Remove the mark, and the folders that were made for it alone."""
        with suppress(StorageError, OSError):
            self._storage.delete([_KEY])
            remove_folders(self._storage, "")
            for folder in self._made:
                if os.path.isdir(folder):
                    os.rmdir(folder)

    def end(self, error: BaseException | None) -> None:
        """Remove the mark of a start of which no driver came; where there is a run, leave the error in it instead.

        No reason stays of an interruption, nor if another driver leads the run.
        """
        if isinstance(error, Exception) and not isinstance(error, RunOwnedElsewhere) and self._keep(error):
            return
        self.remove()

    def _keep(self, error: Exception) -> bool:
        """Whether the error is in the mark now."""
        kept = masked(f"{type(error).__name__}: {error}")[:_MAX_ERROR]
        try:
            num_segments = len(segment_numbers(self._storage))
            if num_segments or list_numbers(self._storage):
                ended = replace(self._holder(this_process()), ended=True)
                self._write(ended, error=kept, num_segments=num_segments)
                return True
        except StorageError:
            pass
        return False

    def _holder(self, process: Process) -> Holder:
        return Holder(driver="start", host=platform.node(), process=process, since=self._wall(), lease_s=0.0)

    def _write(self, holder: Holder, **more: object) -> None:
        self._storage.write(_KEY, [signed_json.seal({**asdict(holder), **more}, FORMAT)])


def read_start(storage: Storage, *, wall: Callable[[], float] = time.time) -> Start | None:
    """The newest start that is under way or that failed; None if there is none. One small request.

    Raises StorageError. A mark that cannot be decoded is none.
    """
    where = join_url(storage.url, _KEY)
    try:
        body = signed_json.unseal(read_small(storage, _KEY, _MAX_BYTES), FORMAT, where)
        holder = holder_of(body, where)
        if not holder.ended:
            return Start(under_way=_may_claim(holder, wall), at=holder.since)
        return Start(
            under_way=False,
            at=holder.since,
            error=signed_json.text(body, "error", where),
            num_segments=signed_json.whole(body, "num_segments", where),
        )
    except (NoSuchKey, CorruptCheckpoint):
        return None


def is_starting(storage: Storage, *, wall: Callable[[], float] = time.time) -> bool:
    """True if a start of the run is under way. One small request. Raises StorageError."""
    found = read_start(storage, wall=wall)
    return found is not None and found.under_way


def _may_claim(holder: Holder, wall: Callable[[], float]) -> bool:
    process = holder.process
    if process.machine and process.machine == this_process().machine:
        return not is_gone(process)
    return abs(wall() - holder.since) <= _FRESH_S
