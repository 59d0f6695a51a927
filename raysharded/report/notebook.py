"""A run for a notebook: one piece of HTML, with an inline drawing, for a cell's output.

It needs no script, no style sheet and no other resource: notebooks drop scripts, and mail drops style sheets. It uses
the colours of its surroundings, and a few of medium lightness that are visible on white and on black. All text from a
journal or a handle passes through `markup.text`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from raysharded.display.plain_text import brief
from raysharded.display.quantities import count, duration, short, span
from raysharded.report.history.incidents import LETTERS, Incident, costliest
from raysharded.report.history.run_summary import RunSummary
from raysharded.report.history.step_table import Floats, Group, Int64s
from raysharded.report.history.summary import summarise
from raysharded.report.history.wall_time import MICRO
from raysharded.report.live.tracker import Standing
from raysharded.report.page.charts import extremes
from raysharded.report.page.markup import text

_BUCKETS = 300
"""Buckets of the curve; a notebook on a screen is hardly wider."""
_MARKS = 30
_ROWS = 8
"""Maximum number of workers, and of incidents, in the lists."""
_LONG = 240
_SHORT = 24
"""Characters up to which a table cell stays on one line."""
_NAMES = 6
"""Maximum number of evaluations, and of metrics, in their lines."""
_NEWEST = 64
"""Number of newest steps from which the speed is computed."""
_LINE, _EVALUATED, _MARK, _GOOD, _BAD = "#3b82f6", "#a855f7", "#d97706", "#16a34a", "#dc2626"
_FAINT = "fill:currentColor;opacity:.12"
_WIDTH, _HEIGHT, _LEFT, _TOP = 640, 150, 56, 14
_CELL = "padding:.1em .8em .1em 0;text-align:left;vertical-align:top;background:transparent;border:0"


def run_html(standing: Standing | None, journal: RunSummary | Iterable[Mapping[str, Any]]) -> str:
    """State, progress, newest evaluation and metrics, loss with marked incidents, workers and the newest incidents, in
    less than 60 KB for a run of any length. `standing`: the status from the run's handle; None if only the journal is
    available. `journal`: its entries from the first on, or their summary.

    Raises KeyError, TypeError or ValueError for entries without the fields of their kind.
    """
    summary = journal if isinstance(journal, RunSummary) else summarise(journal)
    parts = [_head(standing, summary), _progress(standing, summary), _numbers(summary), _curve(summary)]
    parts += [_workers(standing) if standing is not None else "", _incidents(summary.incidents), _saved(summary)]
    return f'<div style="font:13px/1.45 system-ui,sans-serif;max-width:{_WIDTH}px">{"".join(parts)}</div>'


def _head(standing: Standing | None, summary: RunSummary) -> str:
    name = (standing.name if standing is not None else "") or summary.run or "a run"
    phase = standing.phase if standing is not None else summary.status
    colour = _BAD if "failed" in (phase, summary.status) else _GOOD
    about = [part for part in (standing.mesh, standing.driver) if part] if standing is not None else []
    said = f'<span style="opacity:.7">{text(brief(" · ".join(about), _LONG))}</span>' if about else ""
    error = f'<div style="color:{_BAD}">{text(brief(summary.error, _LONG))}</div>' if summary.error else ""
    pill = f'<span style="color:{colour};font-weight:600">● {text(_cut(phase, 40))}</span>'
    return f"<div><strong>{text(_cut(name, 80))}</strong> {pill} {said}</div>{error}"


def _cut(name: str, limit: int) -> str:
    """The beginning of a name, on one line."""
    line = " ".join(name.split())
    return line if len(line) <= limit else f"{line[: limit - 4].rstrip()} ..."


def _progress(standing: Standing | None, summary: RunSummary) -> str:
    step = max(summary.last_step, standing.step if standing is not None else 0)
    of = (standing.max_steps if standing is not None else 0) or summary.max_steps or 0
    words = [f"step {step}" + (f" of {of}" if of else "")]
    if len(summary.steps):
        words.append(f"loss {summary.steps[-1].loss:.5g}")
        words.append(count(summary.steps[-1].workers, "worker"))
    step_s = _step_s(summary)
    if math.isfinite(step_s) and summary.status == "unfinished":
        weight = summary.steps[-1].weight
        words += [f"{span(step_s)} a step"] + ([f"{short(weight / step_s)} {summary.unit}/s"] if step_s else [])
        words += [f"{duration((of - step) * step_s)} left"] if of > step else []
    share = min(1.0, step / of) if of else 0.0
    bar = (
        f'<svg viewBox="0 0 100 2" preserveAspectRatio="none" role="img" aria-label="{share:.0%} done" '
        f'style="width:100%;height:6px;display:block"><rect width="100" height="2" style="{_FAINT}"/>'
        f'<rect width="{100 * share:.2f}" height="2" fill="{_LINE}"/></svg>'
    )
    return f"{bar if of else ''}<div>{text(' · '.join(words))}</div>"


def _numbers(summary: RunSummary) -> str:
    """The newest evaluation and the newest metrics; empty if there are none."""
    groups: tuple[Group, ...] = ("evaluation", "metrics")
    lines = []
    for group in groups:
        for record in summary.steps.with_any(group)[-1:]:
            values = list(getattr(record, group).items())[:_NAMES]
            told = ", ".join(f"{brief(name, 40)} {value:.5g}" for name, value in values)
            lines.append(f"<div>{text(f'{group} in step {record.step}: {told}')}</div>")
    return "".join(lines)


def _step_s(summary: RunSummary) -> float:
    """Seconds per step of the newest steps of one generation; NaN if there are too few."""
    newest = summary.steps[-_NEWEST:]
    if not len(newest):
        return math.nan
    same = newest.whole("generation") == newest[-1].generation
    at, numbers = newest.real("at")[same], newest.whole("step")[same]
    return (
        float((at[-1] - at[0]) / (numbers[-1] - numbers[0])) if len(at) > 1 and numbers[-1] > numbers[0] else math.nan
    )


def _curve(summary: RunSummary) -> str:
    """The loss over the steps, and that of evaluations, if there is one; non-finite values are gaps."""
    numbers, losses = summary.steps.whole("step"), summary.steps.real("loss")
    has = summary.steps.has("evaluation", "loss")
    evaluated, at_steps = summary.steps.named("evaluation", "loss")[has], numbers[has]
    finite = np.concatenate((losses, evaluated))
    finite = finite[np.isfinite(finite)]
    if not np.isfinite(losses).any():
        return ""
    low, high, last = float(finite.min()), float(finite.max()), max(int(numbers[-1]), 2)
    height, below = (high - low) or 1.0, _HEIGHT - 18

    def x(step: int) -> float:
        return _LEFT + (_WIDTH - _LEFT - 4) * (max(step, 1) - 1) / (last - 1)

    def y(loss: float) -> float:
        return _TOP + (below - _TOP) * (1 - (loss - low) / height)

    path, of_evaluations = _path(numbers, losses, x, y), _path(at_steps, evaluated, x, y)
    dot = f'<circle cx="{path[-1][1:].split()[0]}" cy="{path[-1].split()[1]}" r="2.5" fill="{_LINE}"/>'
    marks = "".join(_mark(summary.incidents[number], x, below) for number in costliest(summary.incidents, _MARKS))
    labels = "".join(
        f'<text x="{at:.0f}" y="{y}" text-anchor="{anchor}" fill="currentColor" font-size="11">{words}</text>'
        for at, y, anchor, words in (
            (_LEFT - 6, _TOP + 8, "end", f"{high:.3g}"),
            (_LEFT - 6, below, "end", f"{low:.3g}"),
            (_LEFT, _HEIGHT - 3, "start", "step 1"),
            (_WIDTH - 4, _HEIGHT - 3, "end", str(last)),
        )
    )
    axis = f'<path d="M{_LEFT} {below}H{_WIDTH}" stroke="currentColor" stroke-opacity=".3"/>'
    told = f"Loss over {count(len(losses), 'step')}: lowest {low:.4g}, highest {high:.4g}."
    if of_evaluations:
        labels += _legend()
        dots = "".join(f"{point.replace('L', 'M')}h0" for point in of_evaluations)  # a line may be a single point
        drawn = f'd="{"".join(of_evaluations)}{dots}" fill="none" stroke="{_EVALUATED}" stroke-width="2.5"'
        marks += f'<path {drawn} stroke-linecap="round" stroke-linejoin="round"/>'
    line = f'<path d="{"".join(path)}" fill="none" stroke="{_LINE}" stroke-width="1.3" stroke-linejoin="round"/>'
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(told)}" style="width:100%;display:block">'
        f"{axis}{labels}{marks}{line}{dot}</svg>"
    )


def _path(numbers: Int64s, losses: Floats, x: Callable[[int], float], y: Callable[[float], float]) -> list[str]:
    """The commands of a path through the finite losses."""
    path, pen = [], "M"
    for place in extremes(losses, _BUCKETS):
        loss = float(losses[place])
        if math.isfinite(loss):
            path.append(f"{pen}{x(int(numbers[place])):.1f} {y(loss):.1f}")
        pen = "L" if math.isfinite(loss) else "M"
    return path


def _legend() -> str:
    """The names of both lines, in their colours, between the ends of the axis."""
    names = ((-70, _LINE, "training"), (10, _EVALUATED, "evaluation"))
    return "".join(
        f'<text x="{_WIDTH // 2 + at}" y="{_HEIGHT - 3}" fill="{colour}" font-size="11">● {name}</text>'
        for at, colour, name in names
    )


def _mark(incident: Incident, x: Any, below: int) -> str:
    at = x(incident.step)
    return (
        f"<g><title>{text(brief(incident.text, _LONG))}</title>"
        f'<path d="M{at:.1f} {_TOP}V{below}" stroke="{_MARK}" stroke-opacity=".6"/>'
        f'<text x="{at:.1f}" y="{_TOP - 3}" text-anchor="middle" fill="{_MARK}" font-size="10">'
        f"{LETTERS[incident.kind]}</text></g>"
    )


def _workers(standing: Standing) -> str:
    rows = []
    slowest = sorted(standing.workers, key=lambda worker: standing.busy_s.get(worker, 0.0), reverse=True)[:_ROWS]
    for rank, worker in enumerate(standing.workers):
        if worker in slowest:
            busy_s, pid = standing.busy_s.get(worker), standing.pids.get(worker)
            busy = "" if busy_s is None else f"{span(busy_s)} busy per step"
            process = "" if pid is None else f"process {pid}"
            node, doing = standing.nodes.get(worker, ""), standing.doing.get(worker, "")
            rows.append((f"rank {rank}", f"worker {worker}", brief(node, 60), process, brief(doing, 40), busy))
    left = len(standing.workers) - len(rows)
    return _table(rows, f"And {left} more, which take no longer." if left else "")


def _incidents(found: Sequence[Incident]) -> str:
    rows = [
        (
            LETTERS[incident.kind],
            f"after {duration(incident.at_s)}",
            brief(incident.text, _LONG),
            span(incident.cost_s) if incident.costs else "",
        )
        for incident in found[-_ROWS:]
    ]
    left = len(found) - len(rows)
    return _table(rows, f"{count(left, 'incident')} before: see the report." if left else "")


def _saved(summary: RunSummary) -> str:
    if summary.failing:
        return f'<div style="color:{_BAD}">No checkpoint could be written lately.</div>'
    if not summary.committed:
        return ""
    newest = summary.committed[-1]
    age_s = summary.times.total / MICRO - (newest.at - summary.first_at)
    age = f", {duration(max(0.0, age_s))} before the newest entry"
    return f'<div style="opacity:.7">newest checkpoint: step {newest.step}{text(age)}</div>'


def _table(rows: Sequence[Sequence[str]], note: str) -> str:
    if not rows:
        return ""
    body = "".join(f'<tr style="background:transparent">{"".join(map(_cell, row))}</tr>' for row in rows)
    more = f'<div style="opacity:.7">{text(note)}</div>' if note else ""
    return f'<table style="border-collapse:collapse;margin:.4em 0;font-size:12px">{body}</table>{more}'


def _cell(content: str) -> str:
    wrap = ";white-space:nowrap" if len(content) <= _SHORT else ""
    return f'<td style="{_CELL}{wrap}">{text(content)}</td>'
