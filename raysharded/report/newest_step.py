"""How far a run is, read from the end of its journal: a few segments, however many there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from raysharded.checkpoint import NoSuchKey, Storage
from raysharded.journal import log

_MOST_SEGMENTS = 64
"""That are read from the end back: a driver that waits for machines writes no steps."""
_FROM_START = 16
"""Segments of a driver in which its `started` is looked for."""
_HEAD_BYTES = 256
"""The head of a segment is shorter."""

Ending = Literal["finished", "stopped", "failed"]
_ENDINGS: dict[str, Ending] = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "orphaned": "stopped",  # as the report has it
}
_AT_WORK = ("started", "generation", "formed", "step")
STANDS_STILL: dict[str, bool] = {
    "paused": True,
    **dict.fromkeys(("resume", "pause_refused", "started", "step", "finished", "stopped", "failed"), False),
}
"""Kind of an entry -> whether the run is paused after it; other entries do not change that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """What the newest entries say; None where they do not."""

    num_segments: int
    writer: str = ""
    """The driver that wrote the newest entry."""
    ending: Ending | None = None
    """How that driver's work ended, if it did."""
    error: str = ""
    name: str | None = None
    step: int | None = None
    """The newest that counts: one that was done, or that the run went on from since."""
    max_steps: int | None = None
    loss: float | None = None
    """Of the newest step that was done."""
    workers: int | None = None
    """That did it, or that have met since."""
    paused: bool = False
    """True if its workers stand still until somebody resumes it."""
    at: float | None = None
    """Wall clock of the newest entry."""


def read_tail(storage: Storage) -> Tail:
    """The end of the run's journal. Raises StorageError, and ValueError, KeyError or TypeError for one that is damaged.

    Reads the newest segment, older ones only for what it does not tell, and for `max_steps` some heads by bisection.
    """
    keys = sorted(key for key in storage.list(log.FOLDER) if key.endswith(".jsonl"))
    seen = _Seen()
    for key in reversed(keys[-_MOST_SEGMENTS:]):
        writer, entries = _segment(storage, key)
        for entry in reversed(entries):
            seen.add(entry, writer)
        if seen.is_enough:
            break
    if seen.started is None and seen.writer:
        for entry in _from_the_start(storage, keys, seen.writer):
            if entry["kind"] == "started":
                seen.add(entry, seen.writer)
                break
    return seen.tail(len(keys))


class _Seen:
    """What is known while entries are read from the newest back: the first word on anything is the newest."""

    def __init__(self) -> None:
        self.writer = ""
        self.started: dict[str, Any] | None = None
        self._at: float | None = None
        self._ending: tuple[Ending | None, str] | None = None
        self._step: int | None = None
        self._done: dict[str, Any] | None = None
        self._members: int | None = None
        self._paused: bool | None = None

    @property
    def is_enough(self) -> bool:
        if self._ending is None:
            return False
        return self._done is not None or (self.started is not None and not self.started["resumed_after_step"])

    def add(self, entry: dict[str, Any], writer: str) -> None:
        kind = entry["kind"]
        self.writer = self.writer or writer
        if self._at is None:
            self._at = float(entry["at"])
        if self._ending is None and kind in _ENDINGS:
            self._ending = (_ENDINGS[kind], str(entry.get("error") or ""))
        elif self._ending is None and kind in _AT_WORK:
            self._ending = (None, "")
        if self._paused is None:
            self._paused = STANDS_STILL.get(kind)
        match kind:
            case "step":
                self._done = self._done or entry
                self._goes_on_after(entry["step"])
            case "generation":
                if self._members is None and self._done is None:
                    self._members = len(entry["members"])
                self._goes_on_after(entry["step"])
            case "started":
                self.started = self.started or entry
                self._goes_on_after(entry["resumed_after_step"])
            case "rewind":
                self._goes_on_after(entry["to_step"])
            case "corruption":
                self._goes_on_after(entry["verified_step"])

    def _goes_on_after(self, step: int) -> None:
        self._step = int(step) if self._step is None else self._step

    def tail(self, num_segments: int) -> Tail:
        ending, error = self._ending or (None, "")
        started, done = self.started or {}, self._done or {}
        return Tail(
            num_segments=num_segments,
            writer=self.writer,
            ending=ending,
            error=error,
            name=started.get("run"),
            step=self._step,
            max_steps=started.get("max_steps"),
            loss=float(done["loss"]) if done else None,  # "nan" and "inf" are written as text
            workers=self._members or (int(done["workers"]) if done else None),
            paused=bool(self._paused),
            at=self._at,
        )


def _segment(storage: Storage, key: str) -> tuple[str, list[dict[str, Any]]]:
    """Its writer and its entries, oldest first, without a last line that was torn off."""
    *lines, _torn = storage.read(key).decode().split("\n")
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
    heads = [entry for entry in entries if entry["kind"] == "segment"]
    writer = str(heads[0].get("writer", "")) if heads else ""
    return writer, [entry for entry in entries if entry["kind"] != "segment"]


def _from_the_start(storage: Storage, keys: list[str], writer: str) -> Iterator[dict[str, Any]]:
    """The first entries of the newest driver that wrote some: its segments are the last, so that halving finds them.

    What an older driver wrote late, not knowing that it was over, may lead to a later one: then there is no `started`.
    """
    low, high = 0, len(keys) - 1
    while low < high:
        middle = (low + high) // 2
        if _writer_of(storage, keys[middle]) == writer:
            high = middle
        else:
            low = middle + 1
    for key in keys[low : low + _FROM_START]:
        yield from _segment(storage, key)[1]


def _writer_of(storage: Storage, key: str) -> str:
    try:
        first = storage.read(key, 0, _HEAD_BYTES).split(b"\n", 1)[0]
        return str(json.loads(first).get("writer", ""))
    except (NoSuchKey, ValueError, AttributeError):
        return ""
