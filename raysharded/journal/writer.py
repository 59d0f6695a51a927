"""Journal writing in a separate thread: hanging storage delays neither training nor the end of the run."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from raysharded.clock import Clock
from raysharded.errors import StorageError
from raysharded.journal.log import Journal

_log = logging.getLogger("raysharded.driver")
BACK_OFF_S = 5.0
"""Seconds without writes after a failure, whichever entries arrive meanwhile."""
_LAST_WORDS_EVERY_S = 0.5
"""Interval at which the write of the last entries is repeated."""

_LOOK_UP_S = 0.25
_LEAST_WAIT_S = 0.05
"""Shortest wait for the time at which buffered entries are due."""

Fields: TypeAlias = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
"""Fields of an entry, or a function that returns them, called in the journal's thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Writes of the journal have been failing."""

    since: float
    """Time of the first of these failures, by the monotonic clock."""
    error: StorageError
    """The newest one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    kind: str
    fields: Fields
    at: float
    durable: bool
    written: Callable[[], None] | None = None
    """Called when the entry is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Flush:
    """A request to write all earlier entries, unless storage has just failed."""

    last: bool = False
    """Write them in any case, and end."""
    until: float = -math.inf
    """The time, by the monotonic clock, until which a failed write is retried."""
    done: threading.Event = field(default_factory=threading.Event)


class Recorder:
    """Recorder of entries, in the order of `record`. After a failure the same entries come first, then the rest."""

    def __init__(self, journal: Journal, clock: Clock) -> None:
        self._journal, self._clock = journal, clock
        self._inbox: SimpleQueue[_Entry | _Flush] = SimpleQueue()
        self._durable_waits = False
        self._to_tell: list[Callable[[], None]] = []
        """Callbacks to run when the journal is written next."""
        self.failure: Failure | None = None
        """The failure of the newest write; None after a success."""
        self._resume_at = float("-inf")
        self._error: Exception | None = None
        self._closed = threading.Event()
        self._abandoned = False
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def record(
        self, kind: str, fields: Fields, *, durable: bool = False, written: Callable[[], None] | None = None
    ) -> None:
        """Add an entry, made now. Returns at once. Another thread calls `written` when it is in the journal."""
        self._put(_Entry(kind=kind, fields=fields, at=self._clock.wall(), durable=durable, written=written))

    @property
    def num_dropped(self) -> int:
        """Number of entries that were dropped while storage took none."""
        return self._journal.num_dropped

    def raise_error(self) -> None:
        """Raise the error that ended the journal, such as RunOwnedElsewhere."""
        if self._error is not None:
            raise self._error

    def mark(self) -> Callable[[], None]:
        """A function that waits, in any thread, until all entries so far are written, or cannot be now."""
        flush = _Flush()
        self._put(flush)

        def wait() -> None:
            while not (flush.done.wait(_LOOK_UP_S) or self._closed.is_set()):
                pass

        return wait

    def flush(self) -> None:
        """Return when all entries so far are written, or cannot be now. Thread-safe."""
        self.mark()()

    def close(self, timeout_s: float, repeat_s: float = math.inf) -> None:
        """Write the remaining entries and end. A failed write is repeated within the time, at most for `repeat_s`.

        Raises the error that ended the journal, or StorageError if the entries cannot be written within the time. They
        may then still be written, or not.
        """
        flush = _Flush(last=True, until=self._clock.monotonic() + min(timeout_s, repeat_s))
        self._put(flush)
        written = flush.done.wait(timeout_s)
        self.raise_error()
        if self.failure is not None:
            raise self.failure.error
        if not written:
            raise StorageError(f"the last entries of the journal could not be written within {timeout_s:.0f} s")

    def abandon(self) -> None:
        """End without writing the rest: the journal is another driver's. Returns at once."""
        self._abandoned = True
        self._put(_Flush(last=True))

    def _put(self, item: _Entry | _Flush) -> None:
        self._inbox.put(item)
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, daemon=True, name="journal")
                self._thread.start()

    # -- in the thread --

    def _run(self) -> None:
        while not self._closed.is_set():
            items = self._next()
            flushes = [item for item in items if isinstance(item, _Flush)]
            last = any(flush.last for flush in flushes)
            try:
                if self._error is None and not self._abandoned:
                    self._take([item for item in items if isinstance(item, _Entry)], bool(flushes), last)
                    self._repeat(max((flush.until for flush in flushes), default=-math.inf))
            except Exception as error:  # noqa: BLE001 - the boundary of the thread: raised in the driver's
                self._error = error
            for flush in flushes:
                flush.done.set()
            if last:
                self._closed.set()

    def _next(self) -> list[_Entry | _Flush]:
        """All items that have arrived: one segment suffices for them, however slow storage is.

        Waits for the first one, but not longer than until buffered entries are due: a run that pauses makes no others.
        """
        items = list[_Entry | _Flush]()
        with contextlib.suppress(Empty):
            items.append(self._inbox.get(timeout=self._longest_wait_s()))
            while True:
                items.append(self._inbox.get_nowait())
        return items

    def _longest_wait_s(self) -> float | None:
        due_in_s = self._journal.due_in_s
        if due_in_s is None or self._error is not None or self._abandoned:
            return None
        return max(due_in_s, self._resume_at - self._clock.monotonic(), _LEAST_WAIT_S)

    def _take(self, entries: Sequence[_Entry], wanted: bool, last: bool) -> None:
        for entry in entries:
            fields = entry.fields() if callable(entry.fields) else entry.fields
            self._journal.add(entry.kind, fields, at=entry.at, durable=entry.durable)
            self._durable_waits = self._durable_waits or entry.durable
            if entry.written is not None:
                self._to_tell.append(entry.written)
        due = wanted or self._durable_waits or self._journal.is_due
        if due and (last or self._clock.monotonic() >= self._resume_at):
            self._write()

    def _repeat(self, until: float) -> None:
        """Repeat a failed write of the last entries, up to this time."""
        while self.failure is not None and not self._abandoned and self._clock.monotonic() < until:
            time.sleep(_LAST_WORDS_EVERY_S)
            self._write()

    def _write(self) -> None:
        try:
            self._journal.flush()
        except StorageError as error:  # the entries are kept, and written with the next
            now = self._clock.monotonic()
            self.failure = Failure(since=now if self.failure is None else self.failure.since, error=error)
            self._resume_at = now + BACK_OFF_S
            _log.info("the journal could not be written; retrying: %s", error)
        else:
            self._durable_waits, self.failure = False, None
            told, self._to_tell = self._to_tell, []
            for tell in told:
                tell()
