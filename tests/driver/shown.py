"""Moments of a frozen history for people: the events, the commands, the changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tests.driver.canonical import Value, View
from tests.driver.frozen import WINDOW, Difference, Moment

_WIDTH = 180
_MOST_LINES = 100


def difference_text(found: Sequence[Difference], tried: int) -> str:
    """A test's message about histories that differ from the record."""
    first, history = found[0], found[0].history
    last = min(first.first + WINDOW - 1, first.recorded.events)
    numbers = ", ".join(str(one.history.number) for one in found[:8]) + (", ..." if len(found) > 8 else "")
    if first.moments:
        body = [
            "Today's code there, without events that changed nothing:",
            *_cut(_effects(first.first, first.moments)),
        ]
    else:
        body = ["Today it ends before that."]
    where = f"events {first.first} to {last} of {first.recorded.events}"
    return "\n".join(
        [
            f"{len(found)} of {tried} frozen histories are not as they were recorded: {numbers}.",
            f"The first is history {history.number} ({history.kind}), which differs in {where}.",
            *body,
            "",
            "Both sides, event by event:",
            f"    python -m tests.driver.histories compare {history.number}",
            "If the change is meant, record the digests again, in a commit of its own:",
            "    python -m tests.driver.histories record --digests-only",
        ]
    )


def lines(number: int, moment: Moment) -> Iterator[str]:
    """One moment, with all that changed."""
    yield head(number, moment)
    yield from (f"    orders {view_text(command)}" for command in moment.commands)
    yield from (f"    knows  {path}: {value_text(value)}" for path, value in moment.changes.items())


def head(number: int, moment: Moment) -> str:
    return cut(f"event {number}, {moment.driver or 'simulation'} at {moment.at:.3f} s: {view_text(moment.event)}")


def view_text(view: View) -> str:
    """A command or an event on a line."""
    name, parts = view[0], view[1:]
    if len(parts) % 2:
        return cut(" ".join(map(str, view)))
    pairs = zip(parts[::2], parts[1::2], strict=True)
    return cut(" ".join([str(name), *(f"{path}={value_text(value)}" for path, value in pairs)]))


def value_text(value: Value) -> str:
    """The canonical text itself; of a string, its quotes too if it needs some."""
    return str(value) if value != "" else "''"


def cut(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."


def _effects(first: int, moments: Sequence[Moment]) -> Iterator[str]:
    for number, moment in enumerate(moments, first):
        if moment.commands or moment.changes or moment.event[0] in ("raised", "ended"):
            yield head(number, moment)
            yield from (f"    orders {view_text(command)}" for command in moment.commands)
            if moment.changes and moment.event != ("begin",):
                yield "    knows  " + ", ".join(f"{path}: {value_text(v)}" for path, v in moment.changes.items())


def _cut(shown: Iterator[str]) -> list[str]:
    every = [cut(line) for line in shown]
    left = len(every) - _MOST_LINES
    return every if left <= 0 else [*every[:_MOST_LINES], f"... and {left} more lines"]
