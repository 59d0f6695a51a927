"""The run's one append-only record: numbered segments of JSON lines on its storage.

Pure, except for the given storage. Segments are written once (put-if-absent). A second driver of the same run therefore
finds its number taken, and is noticed. The journal has everything that a report needs: generations, steps, recoveries,
checkpoints. With a signing key the segments are signed (`signed_segments`).
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raysharded.checkpoint import SigningKey, Storage
from raysharded.checkpoint.format.signing import place_of
from raysharded.checkpoint.storage.small_objects import read_small
from raysharded.clock import Clock
from raysharded.display.plain_text import masked
from raysharded.errors import CorruptCheckpoint, RayshardedError, RunOwnedElsewhere, StorageError
from raysharded.journal.backlog import MOST_BYTES, Backlog
from raysharded.journal.signed_segments import Link, encode_signed, head_of, link_after
from raysharded.locations import join_url

_log = logging.getLogger("raysharded.driver")
FOLDER = "journal"
MAX_SEGMENT_BYTES = 1 << 26
"""Maximum size of a segment that is read."""
DAMAGE = (ValueError, KeyError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError)
"""Errors caused by entries that no driver wrote."""
_NEW_SEGMENT_BYTES = 1 << 24
"""Size from which buffered entries are written as several segments, unless one entry is longer."""
_SEGMENT = re.compile(rf"{FOLDER}/([0-9]{{8,12}})\.jsonl")
_AT_ONCE = 32
_SLOWER_BY = 500
"""Number of segments per additional second for which entries are buffered.

A run of weeks then has tens of thousands of segments, not hundreds of thousands. A new driver reads all of them.
"""
_LONGEST_S = 30.0
"""Longest buffering time. Workers keep more step reports than are made in it, and send them to a new driver."""
_READ_AHEAD = 512
"""Number of segments held in memory, of an ordinary size."""


class DamagedJournal(StorageError):
    """A journal has something that no driver wrote; the message names the segment."""


def segment_key(number: int) -> str:
    """The key of a segment, below the run's folder."""
    return f"{FOLDER}/{number:08d}.jsonl"


def plain(value: Any) -> Any:
    """The value as stored in an entry: floats that JSON cannot express become strings, URLs have no passwords."""
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


class Journal:
    """Writer of entries, one per run.

    Buffered entries are flushed every `flush_interval_s` (less often in a long run), and when one is durable. While
    they cannot be written, the newest are kept, up to `most_bytes`; durable ones in any case.
    """

    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        writer: str,
        *,
        flush_interval_s: float = 2.0,
        most_bytes: int = MOST_BYTES,
        still_owns: Callable[[], bool] = lambda: False,
        key: SigningKey | None = None,
    ) -> None:
        """`still_owns` is called when another driver has written. It returns whether this driver still owns the run.

        `key` signs every segment with entries; call `follow` before the first.
        """
        self._key, self._link = key, Link()
        self._storage = storage
        self._still_owns = still_owns
        self._clock = clock
        self._writer = writer
        self._interval = flush_interval_s
        self._lines = Backlog(most_bytes)
        self._tried = 0
        """Number of lines of the segment whose write failed. It may have arrived all the same."""
        self._next = next_segment(storage)
        self._flushed_at = clock.monotonic()

    def append(self, kind: str, fields: Mapping[str, Any], *, durable: bool = False) -> None:
        """Add an entry. Raises RunOwnedElsewhere if another driver has written to the run meanwhile."""
        self.add(kind, fields, at=self._clock.wall(), durable=durable)
        if durable or self.is_due:
            self.flush()

    def add(self, kind: str, fields: Mapping[str, Any], *, at: float, durable: bool = False) -> None:
        """Add an entry that was made at `at`, for a later flush."""
        self._lines.add({"kind": kind, "at": at, **plain(fields)}, durable=durable, held=self._tried)

    @property
    def num_dropped(self) -> int:
        """Number of entries that were dropped since the last write: they were too many."""
        return self._lines.num_dropped

    @property
    def is_due(self) -> bool:
        """Whether entries have been buffered long enough."""
        return self._until_due_s <= 0

    @property
    def due_in_s(self) -> float | None:
        """Seconds until the buffered entries are due; None if there are none."""
        return max(0.0, self._until_due_s) if self._lines else None

    @property
    def _until_due_s(self) -> float:
        longer = min(self._next / _SLOWER_BY, _LONGEST_S)
        return max(self._interval, longer) - (self._clock.monotonic() - self._flushed_at)

    def fence(self) -> None:
        """Write a segment without entries, as a fence against earlier drivers.

        Their pending writes either are in the journal by then, to be read, or will never be.
        """
        self._put([], signed=False)
        self._next += 1

    def follow(self, link: Link) -> None:
        """Let the next signed segment follow what was read of the journal."""
        self._link = link

    def flush(self) -> None:
        """Write the buffered entries as the next segment. After a failure the same bytes come first, then the rest."""
        while self._lines:
            self._tried = self._tried or self._lines.first(_NEW_SEGMENT_BYTES)
            self._put(self._lines.oldest(self._tried), signed=True)
            self._lines.written(self._tried)
            self._next, self._tried = self._next + 1, 0
        self._flushed_at = self._clock.monotonic()

    def _segment(self, lines: Sequence[str], key: SigningKey | None) -> bytes:
        head = {"kind": "segment", "writer": self._writer}
        if key is not None:
            return encode_signed(head, lines, key, self._place, self._link)
        return "\n".join([json.dumps(head, separators=(",", ":")), *lines, ""]).encode()

    @property
    def _place(self) -> str:
        return place_of(self._storage.url, segment_key(self._next))

    def _there(self, at: str) -> bytes:
        return self._storage.read(at, 0, MAX_SEGMENT_BYTES + 1)

    def _put(self, lines: Sequence[str], *, signed: bool) -> None:
        """Write a segment under the next free number.

        Segments that a superseded driver wrote meanwhile are skipped.
        """
        key = self._key if signed else None
        while True:
            at, data = segment_key(self._next), self._segment(lines, key)
            there = data if self._storage.put_if_absent(at, data) else self._there(at)
            if there == data:  # also after a lost reply
                self._link = self._link if key is None else link_after(data)
                return
            if self._still_owns():
                if key is not None and head_of(there, key, self._place) is not None:
                    self._link = link_after(there)
                self._next += 1
                continue
            raise RunOwnedElsewhere(
                f"another driver wrote {at} under {self._storage.url}: this one ({self._writer}) no longer owns the "
                "run and ends. Start each run name from one place at a time."
            )


def next_segment(storage: Storage) -> int:
    """The number after the newest segment."""
    return max(segment_numbers(storage), default=0) + 1


def segment_numbers(storage: Storage) -> list[int]:
    """The numbers of all segments, in order. Files with other names are not the journal's. Raises StorageError."""
    return sorted(int(match[1]) for match in map(_SEGMENT.fullmatch, storage.list(FOLDER)) if match)


def is_segment(key: str) -> bool:
    """Whether a storage key is a segment's."""
    return _SEGMENT.fullmatch(key) is not None


def segment_keys(storage: Storage) -> list[str]:
    """Keys of all segments, in order. Raises StorageError."""
    return [segment_key(number) for number in segment_numbers(storage)]


def read_segment(storage: Storage, key: str) -> bytes:
    """A segment as stored. Raises DamagedJournal for no file, and for one that is too long; StorageError."""
    try:
        return read_small(storage, key, MAX_SEGMENT_BYTES)
    except CorruptCheckpoint as error:
        raise DamagedJournal(str(error)) from error


@contextmanager
def refusing_damage(storage: Storage) -> Iterator[None]:
    """A context in which values of the journal are used: those that no driver wrote raise DamagedJournal."""
    try:
        yield
    except RayshardedError:
        raise
    except DAMAGE as error:
        raise DamagedJournal(
            f"the run at {storage.url} cannot be resumed: its journal, or its newest checkpoint, has a value that no "
            f"driver wrote ({type(error).__name__}: {error}). Restore it from a copy, or give the run another name."
        ) from error


def read(storage: Storage) -> Iterator[dict[str, Any]]:
    """Every entry of a run, oldest first, without the segments' heads and without a truncated last line."""
    return (placed.entry for placed in read_placed(storage))


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """An entry, its place, and the name of the driver that wrote it."""

    entry: dict[str, Any]
    writer: str
    key: str
    line: int
    """Line number, from 1."""


def read_placed(storage: Storage) -> Iterator[Placed]:
    """Every entry of a run with its place, as in `read`. Raises DamagedJournal at the first other line."""
    return placed_of(read_segments(storage), storage.url)


def placed_of(segments: Iterable[tuple[str, bytes]], url: str) -> Iterator[Placed]:
    """Every entry of these segments of the run at `url` with its place, as in `read_placed`."""
    for key, segment in segments:
        *lines, _torn = segment.split(b"\n")
        writer = ""
        for number, line in enumerate(lines, 1):
            entry = entry_of(line, f"line {number} of {join_url(url, key)}")
            if entry["kind"] == "segment":
                writer = str(entry.get("writer", ""))
            else:
                yield Placed(entry=entry, writer=writer, key=key, line=number)


def entry_of(line: bytes, where: str) -> dict[str, Any]:
    """A line's entry. Raises DamagedJournal, which names `where`, if it is none."""
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedJournal(f"{where} is damaged: it is not JSON ({error}). Restore it from a copy.") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("kind"), str):
        raise DamagedJournal(f"{where} is damaged: it is no entry of a journal. Restore it from a copy.")
    return entry


def read_segments(storage: Storage) -> Iterator[tuple[str, bytes]]:
    """Every segment with its key, in order.

    A long run has tens of thousands. Several are read at once, because workers wait for a new driver.
    """
    keys = segment_keys(storage)
    for start in range(0, len(keys), _READ_AHEAD):
        some = keys[start : start + _READ_AHEAD]
        with ThreadPoolExecutor(min(len(some), _AT_ONCE), "raysharded-journal") as pool:
            found = list(pool.map(lambda key: read_segment(storage, key), some))
        yield from zip(some, found, strict=True)


def newest_generation(entries: Iterable[Mapping[str, Any]]) -> int:
    """The newest generation that the run has had; 0 before the first. A resumed run counts from it.

    Raises an error of `DAMAGE` for an entry that no driver wrote.
    """
    return max((int(entry["generation"]) for entry in entries if entry["kind"] == "generation"), default=0)
