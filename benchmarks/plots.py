"""Plots of results, as PNG, by matplotlib."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.result import Line, Measured

matplotlib.use("Agg")

_OURS, _THEIRS = "#1f6feb", "#8b949e"
_COLUMNS = 2
_MAX_PANELS = 12
_PLAN = re.compile(r"planning, (\S+) from (\d+) to \d+ workers$")


def draw(name: str, lines: Sequence[Line], folder: Path) -> list[str]:
    """The plots of one benchmark in `folder`; their file names."""
    folder.mkdir(parents=True, exist_ok=True)
    figure = _plans(lines) if name == "scale" else _comparison(lines)
    if figure is None:
        return []
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=110, metadata={"Software": None})
    return [path.name]


def _comparison(lines: Sequence[Line]) -> Figure | None:
    """A panel for each thing of which several subjects were measured: medians, with the least and the most."""
    by_what: dict[tuple[str, str], list[Line]] = {}
    for line in lines:
        if line.values:
            by_what.setdefault((line.what, line.unit), []).append(line)
    groups = [(what, unit, some) for (what, unit), some in by_what.items() if len(some) > 1 and _differ(some)]
    groups = groups[:_MAX_PANELS]
    if not groups:
        return None
    rows = -(-len(groups) // _COLUMNS)
    tallest = max(len(some) for _, _, some in groups)
    figure = Figure(figsize=(11, rows * (1.0 + 0.32 * tallest)), layout="constrained")
    panels = figure.subplots(rows, _COLUMNS, squeeze=False).ravel()
    for panel, (what, unit, some) in zip(panels, groups, strict=False):
        _bars(panel, what, unit, some)
    for panel in panels[len(groups) :]:
        panel.set_axis_off()
    return figure


def _bars(panel: Axes, what: str, unit: str, lines: Sequence[Line]) -> None:
    found = [Measured(line.values) for line in lines]
    medians = [one.median for one in found]
    spread = [[one.median - one.min for one in found], [one.max - one.median for one in found]]
    colors = [_OURS if line.subject.startswith("raysharded") else _THEIRS for line in lines]
    panel.barh(range(len(lines)), medians, xerr=spread, color=colors, error_kw={"lw": 1, "capsize": 2})
    panel.set_yticks(range(len(lines)), [line.subject for line in lines], fontsize=8)
    panel.invert_yaxis()
    panel.set_title(what, fontsize=9, loc="left")
    panel.set_xlabel(unit, fontsize=8)
    panel.tick_params(axis="x", labelsize=8)
    panel.spines[["top", "right"]].set_visible(False)


def _plans(lines: Sequence[Line]) -> Figure | None:
    """Planning: seconds over workers, by model."""
    by_model: dict[str, list[tuple[int, Measured]]] = {}
    for line in lines:
        found = _PLAN.match(line.what)
        if found and line.values:
            by_model.setdefault(found[1], []).append((int(found[2]), Measured(line.values)))
    if not by_model:
        return None
    figure = Figure(figsize=(6.5, 4), layout="constrained")
    panel = figure.subplots()
    for model, points in by_model.items():
        points.sort(key=lambda point: point[0])
        workers, times = [at for at, _ in points], [one.median for _, one in points]
        spread = [[one.median - one.min for _, one in points], [one.max - one.median for _, one in points]]
        panel.errorbar(workers, times, yerr=spread, marker="o", capsize=2, label=model)
    panel.set(xscale="log", yscale="log", xlabel="workers", ylabel="s", title="Planning the loss of 8 workers")
    panel.legend(title="model", fontsize=8)
    panel.grid(which="major", alpha=0.3)
    return figure


def _differ(lines: Sequence[Line]) -> bool:
    """True if there is something to see."""
    return len({value for line in lines for value in line.values}) > 1
