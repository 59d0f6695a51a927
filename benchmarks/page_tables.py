"""Results as Markdown tables: the goals, and of each benchmark every figure of every subject."""

from __future__ import annotations

import re
from collections.abc import Sequence

from benchmarks.result import NOT_SEEN, Line, Measured

_NOTHING = "not measured"
_MET = {True: "yes", False: "**no**", None: "not measured"}


def asked_table(lines: Sequence[Line]) -> list[str]:
    """All lines that have a goal."""
    rows = _head(["what", "who", "asked", "measured", "met"])
    for line in lines:
        if line.asked is None:
            continue
        unit = line.against if line.ratio else line.unit
        found = f"{number(Measured(line.judged).median)} {unit}".strip() if line.judged else _NOTHING
        rows.append(_row([line.what, line.subject, line.asked, found, _MET[line.met]]))
    return rows


def tables(lines: Sequence[Line]) -> list[str]:
    """All figures: a row for each thing, and a column for each subject; of several subjects a table for each topic."""
    if len({line.subject for line in lines}) == 1:
        return _beside_each_other(lines, "")
    found: list[str] = []
    topics = {line.what.partition(": ")[0] for line in lines if ": " in line.what}
    by_topic: dict[str, list[Line]] = {}
    for line in lines:
        topic = line.what.partition(": ")[0]
        by_topic.setdefault(topic if topic in topics else "", []).append(line)
    for topic, some in by_topic.items():
        found += [f"### {topic}", ""] if topic else []
        found += [*_beside_each_other(some, topic), ""]
    return found[:-1]


def _beside_each_other(lines: Sequence[Line], topic: str) -> list[str]:
    subjects = list(dict.fromkeys(line.subject for line in lines))
    rows = _head(["", *subjects])
    of: dict[tuple[str, str], dict[str, Line]] = {}
    for line in lines:
        of.setdefault((line.what, line.unit), {})[line.subject] = line
    for (what, unit), found in of.items():
        label = what.removeprefix(f"{topic}: ") if what != topic else "all of it"
        cells = [_cell_of(found[name]) if name in found else "" for name in subjects]
        rows.append(_row([f"{label}, {unit}" if unit else label, *cells]))
    return rows


def _cell_of(line: Line) -> str:
    parts = [_values_of(line)]
    if line.ratio:
        parts.append(f"{spread(line.ratio)} {line.against}".strip())
    if line.asked:
        parts.append(f"asked {line.asked}: {_MET[line.met]}")
    return "<br>".join(parts)


def _values_of(line: Line) -> str:
    """The measured values, or the event that was not seen."""
    if line.values:
        return spread(line.values)
    return line.note.partition(":")[0] if line.note.startswith((NOT_SEEN, ">")) else _NOTHING


def _head(names: Sequence[str]) -> list[str]:
    return [_row(names), "|" + "---|" * len(names)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def spread(values: Sequence[float]) -> str:
    """Median, with the least, the most and their number, if they differ."""
    found = Measured(list(values))
    if len(values) == 1 or found.min == found.max:
        return number(found.median)
    return f"{number(found.median)} ({number(found.min)} to {number(found.max)}; {len(values)})"


def number(value: float) -> str:
    """The number with three significant digits."""
    if value == 0 or 1e-3 <= abs(value) < 1e6:
        text = f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
        return re.sub(r"e\+?(-?)0*", r"e\1", text)
    return f"{value:.2e}"
