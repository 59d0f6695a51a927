"""A run's journal for a new driver: verified, without what decides nothing, and read once.

A run of weeks has a million entries. Nearly all of them are steps, of which a new driver needs the numbers alone, so
each segment is reduced as soon as it is read. The memory needed grows with the run's incidents, not with its steps.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import orjson

from raysharded.checkpoint import SigningKey, Storage
from raysharded.display.quantities import count
from raysharded.journal.log import DamagedJournal, entry_of, segment_keys
from raysharded.journal.reader import read_some
from raysharded.journal.signed_segments import Chain, Link, is_signed
from raysharded.locations import join_url

_log = logging.getLogger("raysharded.driver")
_UNUSED = frozenset({"event", "recording", "segment"})
"""Kinds of entries that no new driver reads: a recording may be longer than the rest of the journal."""
_STEP = re.compile(rb'\n{"kind":"step","at":[0-9.e+]+,"generation":[0-9]+,"step":([0-9]+),')
"""Beginning of a step's line, with its number: nothing before it could be another field of this name."""
Entry: TypeAlias = dict[str, Any]
Reduced: TypeAlias = tuple[Sequence[Entry], DamagedJournal | None]
"""A segment's entries up to the first damaged line, and the error about it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifiedJournal:
    """A run's journal, as far as it counts."""

    entries: list[Entry]
    """The entries, oldest first, as `reduced` leaves them."""
    link: Link = field(default_factory=Link)
    """Predecessor of the next signed segment."""
    is_unsigned: bool = False
    """Whether there is a key, it signed none of the entries, and nobody has accepted them."""
    lacks_key: bool = False
    """Whether there is no key, and segments are signed."""


def reduced(entries: Iterable[Entry]) -> Iterator[Entry]:
    """The entries without those of a recording, and with `kind` and `step` alone of consecutive steps.

    Law: of consecutive steps, the highest number and the last one stay, and nothing else changes. A step without a
    whole number stays as it is.
    """
    highest = last = None
    for entry in entries:
        if entry["kind"] in _UNUSED:
            continue
        step = entry.get("step") if entry["kind"] == "step" else None
        if type(step) is int:
            highest, last = step if highest is None else max(highest, step), step
            continue
        yield from _steps(highest, last)
        highest = last = None
        yield entry
    yield from _steps(highest, last)


def _steps(highest: int | None, last: int | None) -> Iterator[Entry]:
    if highest is not None and highest != last:
        yield {"kind": "step", "step": highest}
    if last is not None:
        yield {"kind": "step", "step": last}


class JournalReader:
    """Reads a run's journal, as far as it counts. Each later `read` reads only the segments written since.

    With a key, entries that it did not sign are left out, with a warning. A journal without any signature counts as a
    whole: then `is_unsigned` is set. With `accept_unsigned` every entry counts.
    """

    def __init__(self, storage: Storage, key: SigningKey | None, *, accept_unsigned: bool = False) -> None:
        self._storage, self._key, self._accept_unsigned = storage, key, accept_unsigned
        self._keys: list[str] = []
        """Keys of the segments read so far."""
        self._chain: Chain[Reduced] | None = None
        self._all: list[tuple[str, Reduced]] = []
        """The segments of a run without a key."""
        self._lacks_key = False

    def read(self) -> VerifiedJournal:
        """The journal as it is now.

        Raises DamagedJournal at the first line that is no entry, of those that count. Raises RefusedCheckpoint if
        signed segments were removed or replaced, or are signed with another key; StorageError.
        """
        keys = segment_keys(self._storage)
        if keys[: len(self._keys)] != self._keys:  # not those that were verified
            self._keys, self._chain, self._all, self._lacks_key = [], None, [], False
        if self._key is not None and self._chain is None:
            self._chain = Chain(key=self._key, url=self._storage.url)
        for at, data in read_some(self._storage, keys[len(self._keys) :]):
            self._keys.append(at)
            self._add(at, data)
        return self._found()

    def _add(self, at: str, data: bytes) -> None:
        url = join_url(self._storage.url, at)
        if self._chain is not None:
            self._chain.add(at, data, lambda is_ours: (is_ours and _steps_of_ours(data)) or _reduced(data, url))
        else:
            self._lacks_key = self._lacks_key or is_signed(data)
            self._all.append((at, _reduced(data, url)))

    def _found(self) -> VerifiedJournal:
        if self._chain is None:
            return VerifiedJournal(entries=_joined(self._all), lacks_key=self._lacks_key)
        found = self._chain.all() if self._accept_unsigned else self._chain.checked()
        if found.ignored:
            _log.warning(
                "%s of the journal of %s, first %s, are not signed with the run's key, and are ignored",
                count(len(found.ignored), "segment"),
                self._storage.url,
                found.ignored[0],
            )
        entries = _joined(found.segments)
        return VerifiedJournal(entries=entries, link=found.link, is_unsigned=found.is_unsigned and bool(entries))


def read_verified(storage: Storage, key: SigningKey | None, *, accept_unsigned: bool = False) -> VerifiedJournal:
    """The journal of a run, as `JournalReader.read` returns it."""
    return JournalReader(storage, key, accept_unsigned=accept_unsigned).read()


def _steps_of_ours(data: bytes) -> Reduced | None:
    """As `_reduced`, for a segment of steps alone that was signed with the run's key; None for any other.

    A driver wrote it, so its lines need not be parsed to find them valid, which would take most of the time.
    """
    numbers = list(map(int, _STEP.findall(data)))
    if not numbers or len(numbers) != data.count(b"\n") - 1 or not data.endswith(b"\n"):
        return None
    return list(_steps(max(numbers), numbers[-1])), None


def _reduced(data: bytes, url: str) -> Reduced:
    """A segment's entries up to the first damaged line."""
    *lines, _torn = data.split(b"\n")
    with suppress(orjson.JSONDecodeError, KeyError, TypeError):  # then `json` decides, line by line
        entries = list(map(orjson.loads, lines))
        kinds = [entry["kind"] for entry in entries]
        numbers = [entry.get("step") for entry in entries[1:]]
        if kinds[:1] == ["segment"] and kinds.count("step") == len(numbers) and set(map(type, numbers)) == {int}:
            return list(_steps(max(numbers), numbers[-1])), None  # nearly all segments: as `reduced`, in less time
    good: list[Entry] = []
    try:
        good.extend(entry_of(line, f"line {number} of {url}") for number, line in enumerate(lines, 1))
    except DamagedJournal as error:
        return list(reduced(good)), error
    return list(reduced(good)), None


def _joined(segments: Iterable[tuple[str, Reduced]]) -> list[Entry]:
    """The entries of all segments. Raises DamagedJournal at the first damaged one."""

    def entries() -> Iterator[Entry]:
        for _, (found, damage) in segments:
            yield from found
            if damage is not None:
                raise damage

    return list(reduced(entries()))
