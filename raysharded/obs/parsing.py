"""Segments of a journal as entries, exactly as strict as Python's own JSON and several times as fast. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

import orjson

_kind: Callable[[Any], Any] = itemgetter("kind")


def parse_line(line: bytes) -> Any:  # any JSON value
    """One line as JSON. Raises ValueError as `json.loads` does, for the same lines with the same words.

    What orjson refuses is asked of `json`: it takes a few things that a journal may have and orjson does not, such as
    halves of surrogate pairs.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line.decode())


def steps_of(segment: bytes) -> list[dict[str, Any]] | None:
    """Its entries from line 2 on, if all of them are steps and nothing is wrong with any line: nearly all segments are
    so. None otherwise: `entries_of` has them one by one then."""
    if not segment.isascii():
        return None
    *lines, torn = segment.split(b"\n")
    try:
        head, *entries = map(orjson.loads, lines)
        are_steps = head["kind"] == "segment" and list(map(_kind, entries)).count("step") == len(entries)
        return entries if are_steps and not torn else None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError):  # the last one of an empty segment
        return None


def entries_of(segment: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Its entries with their lines, counted from 1, oldest first; without its head and a last line that was torn off.

    Raises ValueError at the first line that is no JSON, or at once if any of the segment is not UTF-8; KeyError or
    TypeError at a line that is no entry.
    """
    if not segment.isascii():
        segment.decode()
    *lines, _torn = segment.split(b"\n")
    entries: Iterable[dict[str, Any]]
    try:
        entries = list(map(orjson.loads, lines))
    except orjson.JSONDecodeError:
        entries = map(parse_line, lines)  # one by one: it raises at the first that is wrong
    for number, entry in enumerate(entries, 1):
        if entry["kind"] != "segment":
            yield number, entry
