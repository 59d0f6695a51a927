"""Segments of a journal as entries, exactly as strict as Python's own JSON and several times as fast. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import orjson


def parse_line(line: bytes) -> Any:  # any JSON value
    """One line as JSON. Raises ValueError as `json.loads` does, for the same lines with the same words.

    What orjson refuses is asked of `json`: it takes a few things that a journal may have and orjson does not, such as
    halves of surrogate pairs.
    """
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line.decode())


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
