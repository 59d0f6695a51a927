"""A run's progress, read from the end of its journal: a few segments, however many there are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from raysharded.checkpoint import NoSuchKey, Storage
from raysharded.checkpoint.storage import NotAFile
from raysharded.journal import log

_MOST_SEGMENTS = 64
"""Segments to read from the end: a driver that waits for machines writes no steps."""
_FROM_START = 16
"""Segments of a driver to search for its entry `started`."""
_HEAD_BYTES = 1024
"""An upper bound of the size of a segment's head."""

Ending = Literal["finished", "stopped", "failed"]
_ENDINGS: dict[str, Ending] = {
    "finished": "finished",
    "stopped": "stopped",
    "failed": "failed",
    "orphaned": "stopped",  # as in the report
}
_AT_WORK = ("started", "generation", "formed", "step")
STANDS_STILL: dict[str, bool] = {
    "paused": True,
    **dict.fromkeys(("resume", "pause_refused", "started", "step", "finished", "stopped", "failed"), False),
}
"""Kind of an entry -> whether the run is paused after it; other entries do not change that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tail:
    """The content of the newest entries; None for values that are not in them."""

    num_segments: int
    writer: str = ""
    """The driver that wrote the newest entry."""
    ending: Ending | None = None
    """The end of that driver's work, if it has ended."""
    error: str = ""
    interrupted: bool = False
    """Whether Ctrl-C ended that driver's work."""
    name: str | None = None
    step: int | None = None
    """The newest step that counts: one that was done, or from which the run continued since."""
    max_steps: int | None = None
    loss: float | None = None
    """Loss of the newest finished step."""
    workers: int | None = None
    """Number of workers that did the newest step, or that have met since; not those of an earlier driver."""
    paused: bool = False
    """True while the workers are paused."""
    keeps_best: bool = False
    """Whether the newest driver began with `CheckpointConfig.keep_best`."""
    at: float | None = None
    """Wall clock of the newest entry."""


def read_tail(storage: Storage) -> Tail:
    """The end of the run's journal. Raises StorageError; an error of `log.DAMAGE` for a damaged journal.

    Reads the newest segment, older ones only for missing values, and some heads, by bisection, for `max_steps`.
    """
    keys = log.segment_keys(storage)
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
    """The values found while entries are read from the newest back: the first value of each kind is the newest."""

    def __init__(self) -> None:
        self.writer = ""
        self.started: dict[str, Any] | None = None
        self._at: float | None = None
        self._ending: tuple[Ending | None, str] | None = None
        self._interrupted = False
        self._step: int | None = None
        self._done: dict[str, Any] | None = None
        self._members: int | None = None
        self._paused: bool | None = None
        self._has_begun = False
        """Whether the newest driver has begun, and neither a generation nor a step of it was found."""

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
            self._interrupted = entry.get("interrupted") is True
        elif self._ending is None and kind in _AT_WORK:
            self._ending = (None, "")
        if self._paused is None:
            self._paused = STANDS_STILL.get(kind)
        match kind:
            case "step":
                self._done = self._done or entry
                self._goes_on_after(entry["step"])
            case "stopped":  # Ctrl-C may have come between a step and its entry
                self._goes_on_after(entry["step"])
            case "generation":
                if self._members is None and self._done is None:
                    self._members = len(entry["members"])
                self._goes_on_after(entry["step"])
            case "started":
                self.started = self.started or entry
                self._has_begun = self._has_begun or (self._members is None and self._done is None)
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
            interrupted=self._interrupted,
            name=_name(started.get("run")),
            step=self._step,
            max_steps=None if started.get("max_steps") is None else int(started["max_steps"]),
            loss=float(done["loss"]) if done else None,  # "nan" and "inf" are written as text
            workers=None if self._has_begun else self._members or (int(done["workers"]) if done else None),
            paused=bool(self._paused),
            keeps_best="keep_best" in started,
            at=self._at,
        )


def _name(told: object) -> str | None:
    if told is not None and not isinstance(told, str):
        raise TypeError(f"run={told!r:.80} is not a name")
    return told


def _segment(storage: Storage, key: str) -> tuple[str, list[dict[str, Any]]]:
    """A segment's writer and entries, oldest first, without a torn last line."""
    *lines, _torn = log.read_segment(storage, key).decode().split("\n")
    entries: list[dict[str, Any]] = [json.loads(line) for line in lines]
    heads = [entry for entry in entries if entry["kind"] == "segment"]
    writer = str(heads[0].get("writer", "")) if heads else ""
    return writer, [entry for entry in entries if entry["kind"] != "segment"]


def _from_the_start(storage: Storage, keys: list[str], writer: str) -> Iterator[dict[str, Any]]:
    """The first entries of the newest driver that wrote any. Its segments are the last ones, so bisection finds them.

    A late write of an older driver, unaware of its end, may lead to a later segment: then there is no `started`.
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
    except (NoSuchKey, NotAFile, ValueError, AttributeError, RecursionError):
        return ""
