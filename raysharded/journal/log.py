"""The run's one append-only record: numbered segments of JSON lines on its storage.

Pure, except for the given storage. Segments are written once (put-if-absent). A second driver of the same run therefore
finds its number taken, and is noticed. The journal has everything that a report needs: generations, steps, recoveries,
checkpoints.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raysharded.checkpoint import Storage
from raysharded.clock import Clock
from raysharded.errors import RunOwnedElsewhere
from raysharded.plain_text import masked

FOLDER = "journal"
_AT_ONCE = 32
_SLOWER_BY = 500
"""Number of segments per additional second for which entries are buffered.

A run of weeks then has tens of thousands of segments, not hundreds of thousands. A new driver reads all of them.
"""
_LONGEST_S = 30.0
"""Longest buffering time. Workers keep more step reports than are made in it, and send them to a new driver."""
_READ_AHEAD = 512
"""Number of segments held in memory."""


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

    Buffered entries are flushed every `flush_interval_s` (less often in a long run), and when one is durable.
    """

    def __init__(
        self,
        storage: Storage,
        clock: Clock,
        writer: str,
        *,
        flush_interval_s: float = 2.0,
        still_owns: Callable[[], bool] = lambda: False,
    ) -> None:
        """`still_owns` is called when another driver has written. It returns whether this driver still owns the run."""
        self._storage = storage
        self._still_owns = still_owns
        self._clock = clock
        self._writer = writer
        self._interval = flush_interval_s
        self._lines: list[str] = []
        self._tried: tuple[bytes, int] | None = None
        """The segment whose write failed, and its number of lines. It may have arrived all the same."""
        self._next = next_segment(storage)
        self._flushed_at = clock.monotonic()

    def append(self, kind: str, fields: Mapping[str, Any], *, durable: bool = False) -> None:
        """Add an entry. Raises RunOwnedElsewhere if another driver has written to the run meanwhile."""
        self.add(kind, fields, at=self._clock.wall())
        if durable or self.is_due:
            self.flush()

    def add(self, kind: str, fields: Mapping[str, Any], *, at: float) -> None:
        """Add an entry that was made at `at`, for a later flush."""
        entry = {"kind": kind, "at": at, **plain(fields)}
        self._lines.append(json.dumps(entry, separators=(",", ":"), allow_nan=False))

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
        self._put(self._segment())
        self._next += 1

    def flush(self) -> None:
        """Write the buffered entries as the next segment. After a failure the same bytes come first, then the rest."""
        while self._lines:
            self._tried = self._tried or (self._segment(), len(self._lines))
            data, count = self._tried
            self._put(data)
            self._next, self._lines, self._tried = self._next + 1, self._lines[count:], None
        self._flushed_at = self._clock.monotonic()

    def _segment(self) -> bytes:
        head = json.dumps({"kind": "segment", "writer": self._writer}, separators=(",", ":"))
        return "\n".join([head, *self._lines, ""]).encode()

    def _put(self, data: bytes) -> None:
        """Write a segment under the next free number.

        Segments that a superseded driver wrote meanwhile are skipped.
        """
        while True:
            key = segment_key(self._next)
            if self._storage.put_if_absent(key, data) or self._storage.read(key) == data:  # equal: a lost reply
                return
            if self._still_owns():
                self._next += 1
                continue
            raise RunOwnedElsewhere(
                f"another driver wrote {key} under {self._storage.url}: this one ({self._writer}) no longer owns the "
                "run and ends. Start each run name from one place at a time."
            )


def next_segment(storage: Storage) -> int:
    """The number after the newest segment."""
    numbers = [int(key.rsplit("/", 1)[1].split(".")[0]) for key in storage.list(FOLDER) if key.endswith(".jsonl")]
    return max(numbers, default=0) + 1


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
    """Every entry of a run with its place, as in `read`."""
    for key, segment in _segments(storage):
        *lines, _torn = segment.decode().split("\n")
        writer = ""
        for number, line in enumerate(lines, 1):
            entry: dict[str, Any] = json.loads(line)
            if entry["kind"] == "segment":
                writer = str(entry.get("writer", ""))
            else:
                yield Placed(entry=entry, writer=writer, key=key, line=number)


def _segments(storage: Storage) -> Iterator[tuple[str, bytes]]:
    """Every segment with its key, in order.

    A long run has tens of thousands. Several are read at once, because workers wait for a new driver.
    """
    keys = sorted(key for key in storage.list(FOLDER) if key.endswith(".jsonl"))
    for start in range(0, len(keys), _READ_AHEAD):
        some = keys[start : start + _READ_AHEAD]
        with ThreadPoolExecutor(min(len(some), _AT_ONCE), "raysharded-journal") as pool:
            yield from zip(some, pool.map(storage.read, some), strict=True)


def newest_generation(entries: Iterable[Mapping[str, Any]]) -> int:
    """The newest generation that the run has had; 0 before the first. A resumed run counts from it."""
    return max((int(entry["generation"]) for entry in entries if entry["kind"] == "generation"), default=0)
