"""Entries that wait to be written: the newest are kept, up to a number of bytes.

Storage may take no entries for long while the run trains on. Beyond the limit the oldest entries are dropped, but
none of those by which the rest of the journal is read. An entry `entries_dropped` takes their place: `entries` is their
number, `steps` that of steps among them, from `first_step` to `last_step`.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MOST_BYTES = 1 << 28
"""Default limit."""
_KEPT = frozenset({"formed", "recovery", "storage_back", "data", "audit"})
"""Kinds of entries that are never dropped, as durable ones are not."""


@dataclass(frozen=True, slots=True)
class _Line:
    """An entry as JSON."""

    text: str
    step: int | None
    """The step of an entry of kind `step`."""
    kept: bool
    """Whether it is never dropped."""


@dataclass(slots=True)
class _Dropped:
    """Entries that were dropped since the last write."""

    since: float
    entries: int = 0
    steps: int = 0
    first_step: int | None = None
    last_step: int | None = None

    def add(self, line: _Line) -> None:
        self.entries += 1
        if line.step is not None:
            self.steps += 1
            self.first_step = line.step if self.first_step is None else min(self.first_step, line.step)
            self.last_step = line.step if self.last_step is None else max(self.last_step, line.step)

    def line(self) -> _Line:
        """The entry about it."""
        fields: dict[str, int | None] = {"entries": self.entries, "steps": self.steps}
        fields |= {"first_step": self.first_step, "last_step": self.last_step} if self.steps else {}
        return _Line(text_of({"kind": "entries_dropped", "at": self.since, **fields}), None, True)


def text_of(entry: Mapping[str, Any]) -> str:
    """An entry as one line of JSON."""
    return json.dumps(entry, separators=(",", ":"), allow_nan=False)


class Backlog:
    """Lines in the order in which they were added. `held`: how many of the oldest must stay as they are."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lines: list[_Line] = []
        self._size = 0
        self._dropped: _Dropped | None = None

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def num_dropped(self) -> int:
        """Number of entries that were dropped since the last write."""
        return self._dropped.entries if self._dropped is not None else 0

    def add(self, entry: Mapping[str, Any], *, durable: bool, held: int) -> None:
        """Add an entry; if there are too many bytes, drop the oldest, down to a tenth less than the limit."""
        text, kind = text_of(entry), entry["kind"]
        self._lines.append(_Line(text, entry.get("step") if kind == "step" else None, durable or kind in _KEPT))
        self._size += len(text)
        if self._size > self._most:
            self._drop(held, entry["at"])

    def _drop(self, held: int, at: float) -> None:
        rest, dropped = list[_Line](), self._dropped or _Dropped(at)
        for line in self._lines[held:]:
            if line.kept or self._size <= self._most * 9 // 10:
                rest.append(line)
            else:
                self._size -= len(line.text)
                dropped.add(line)
        self._lines = [*self._lines[:held], *rest]
        self._dropped = dropped if dropped.entries else None

    def first(self, most_bytes: int) -> int:
        """Number of the oldest lines with so many bytes together, at least one. The entry about dropped ones is first.

        Call it only when no line has to stay as it is.
        """
        if self._dropped is not None:
            self._lines.insert(0, self._dropped.line())
            self._size, self._dropped = self._size + len(self._lines[0].text), None
        sizes = itertools.accumulate(len(line.text) for line in self._lines)
        return max(1, sum(1 for size in sizes if size <= most_bytes))

    def oldest(self, number: int) -> list[str]:
        """The oldest lines."""
        return [line.text for line in self._lines[:number]]

    def written(self, number: int) -> None:
        """Forget the oldest lines."""
        self._size -= sum(len(line.text) for line in self._lines[:number])
        self._lines = self._lines[number:]
