"""A journal's segments: read as fast as their storage permits, and parsed as strictly as by Python's `json`.

Parsing is several times as fast as with `json`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from operator import itemgetter
from typing import Any

import orjson

from raysharded.checkpoint import Storage
from raysharded.checkpoint.format.signed_json import MAX_SECONDS
from raysharded.journal import log

_AT_ONCE = 32
_SOME = 512
"""Number of segments held in memory."""
_FIRST = 8
"""Number of these segments read one by one, to measure the time of a read."""
_MOST_DIGITS = 300
_MOST_DEPTH = 32
"""Levels of arrays and objects in an entry. Drivers write fewer than ten."""
_SOON_S = 0.001
"""Maximum time to read a segment that is on this machine.

A thread for it would take longer than the read: 36,000 segments on a disk took 9 s instead of 0.7 s.
"""


def read_segments(storage: Storage) -> Iterator[tuple[str, bytes]]:
    """Every segment with its key, in order. Raises StorageError."""
    return read_some(storage, log.segment_keys(storage))


def read_some(
    storage: Storage, keys: Sequence[str], *, now: Callable[[], float] = time.perf_counter
) -> Iterator[tuple[str, bytes]]:
    """These segments, in this order. Several are read at once where storage is slow. Raises StorageError."""
    for start in range(0, len(keys), _SOME):
        some = keys[start : start + _SOME]
        begun = now()
        first = [log.read_segment(storage, key) for key in some[:_FIRST]]
        soon = now() - begun <= _FIRST * _SOON_S
        yield from zip(some, first, strict=False)
        yield from _read(storage, some[_FIRST:], at_once=1 if soon else _AT_ONCE)


def _read(storage: Storage, keys: Sequence[str], at_once: int) -> Iterator[tuple[str, bytes]]:
    if at_once == 1:
        yield from ((key, log.read_segment(storage, key)) for key in keys)
        return
    with ThreadPoolExecutor(at_once, "raysharded-journal") as pool:
        found = list(pool.map(lambda key: log.read_segment(storage, key), keys))
    yield from zip(keys, found, strict=True)


_kind: Callable[[Any], Any] = itemgetter("kind")


def parse_line(line: bytes) -> Any:  # any JSON value
    """One line as JSON. Raises ValueError as `json.loads` does, for the same lines with the same message.

    Lines that orjson rejects go to `json`. It accepts a few things that a journal may have and orjson does not, such as
    halves of surrogate pairs. Whole numbers of more digits than any float has are refused too.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            return json.loads(line.decode(), parse_int=_whole)
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:  # a report would fail where it makes a float of it
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)


def steps_of(segment: bytes) -> list[dict[str, Any]] | None:
    """The segment's entries from line 2 on, if all of them are steps, with possible times, and every line is valid.

    Otherwise None.

    Nearly all segments are of that kind. For others, `entries_of` returns the entries one by one.
    """
    if not segment.isascii():
        return None
    *lines, torn = segment.split(b"\n")
    try:
        head, *entries = map(orjson.loads, lines)
        are_steps = head["kind"] == "segment" and list(map(_kind, entries)).count("step") == len(entries)
        return entries if are_steps and not torn and _have_times(entries) else None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):  # the last one for an empty segment
        return None


def _has_time(entry: dict[str, Any]) -> bool:
    """Whether the entry's time, if it has one, has a date. Raises TypeError if it is no number."""
    return bool(0 <= entry.get("at", 0) <= MAX_SECONDS)


def _have_times(entries: Sequence[dict[str, Any]]) -> bool:
    """As `_has_time` of each."""
    times = [entry.get("at", 0) for entry in entries]
    return not times or bool(min(times) >= 0 and max(times) <= MAX_SECONDS)


def entries_of(segment: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """A segment's entries with their line numbers from 1, oldest first, without its head and a truncated last line.

    Raises ValueError at the first line that is not JSON, or at once if any part of the segment is not UTF-8. Raises
    KeyError or TypeError at a line that is not an entry.
    """
    if not segment.isascii():
        segment.decode()
    *lines, _torn = segment.split(b"\n")
    entries: Iterable[dict[str, Any]]
    try:
        entries = list(map(orjson.loads, lines))
    except orjson.JSONDecodeError:
        entries = map(parse_line, lines)  # one by one: it raises at the first invalid line
    for number, entry in enumerate(entries, 1):
        if entry["kind"] != "segment":
            if not _has_time(entry):
                raise ValueError(f"at={entry['at']!r:.40} is no time")
            if entry["kind"] != "step":  # each of its fields is checked
                _require_shallow(entry)
            yield number, entry


def _require_shallow(entry: dict[str, Any]) -> None:
    """Raise ValueError for an entry whose values are nested deeply: a report would fail where it copies them."""
    level: list[Any] = [entry]
    for _ in range(_MOST_DEPTH):
        level = [one for value in level for one in (value.values() if isinstance(value, dict) else value)]
        level = [value for value in level if isinstance(value, (dict, list))]
        if not level:
            return
    raise ValueError(f"values nested in more than {_MOST_DEPTH} levels")
