"""The key figures of the page, each in a tile.

All text from a journal passes through `markup.text`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from raysharded.data.ledger import LedgerReport
from raysharded.display.quantities import count, duration, short
from raysharded.report.history.run_summary import RunSummary
from raysharded.report.history.step_table import Floats, Group
from raysharded.report.history.wall_time import MICRO
from raysharded.report.page.charts import title_of
from raysharded.report.page.markup import text

_MOST_NAMED = 4
"""Maximum number of tiles for evaluations, and for metrics."""


@dataclass(frozen=True, slots=True)
class _Tile:
    name: str
    value: str
    note: str
    bad: bool = False


def tiles(summary: RunSummary, ledger: LedgerReport | None) -> str:
    """The tiles, as items of a definition list."""
    found = [*_numbers(summary), *_work(summary), *_recoveries(summary)]
    found += [_samples(ledger)] if ledger is not None else []
    return "".join(map(_html, found))


def _html(tile: _Tile) -> str:
    kind = ' class="bad"' if tile.bad else ""
    return f"<div><dt>{text(tile.name)}</dt><dd{kind}>{text(tile.value)}<small>{text(tile.note)}</small></dd></div>"


def _numbers(summary: RunSummary) -> Iterator[_Tile]:
    """The loss, the evaluations and the metrics."""
    steps = summary.steps
    if not steps:
        return
    losses = steps.real("loss")
    yield _Tile("Loss", f"{losses[-1]:.5g}", f"in step {steps[-1].step}; {_range(losses)}")
    groups: tuple[Group, ...] = ("evaluation", "metrics")
    for group in groups:
        for name in steps.names(group)[:_MOST_NAMED]:
            has = steps.has(group, name)
            values, newest = steps.named(group, name)[has], int(steps.whole("step")[has][-1])
            yield _Tile(title_of(group, name), f"{values[-1]:.5g}", f"in step {newest}; {_range(values)}")


def _range(values: Floats) -> str:
    finite = values[np.isfinite(values)]
    return f"from {finite.min():.4g} to {finite.max():.4g}" if len(finite) else "never finite"


def _work(summary: RunSummary) -> Iterator[_Tile]:
    if summary.steps:
        unit = summary.unit
        yield _Tile("Goodput", f"{summary.goodput:.1%}", "of the time at work, in steps that count")
        yield _Tile(
            f"{unit.capitalize()} per second", short(summary.weight_per_s), f"{short(summary.weight)} {unit} in all"
        )
        workers = np.unique(summary.steps.whole("workers")).tolist()
        yield _Tile("Workers", f"{workers[0]} to {workers[-1]}" if len(workers) > 1 else str(workers[0]), "at a step")
    drivers = count(summary.starts, "driver") if summary.starts > 1 else "one driver"
    at_work = f"{duration(summary.elapsed_s)} at work, {drivers}"
    yield _Tile("Time", duration(summary.times.total / MICRO), at_work)


def _recoveries(summary: RunSummary) -> Iterator[_Tile]:
    losses = sum(len(recovery.lost) for recovery in summary.recoveries)
    redone = sum(recovery.steps_redone for recovery in summary.recoveries)
    note = f"{count(losses, 'worker')} lost, {count(redone, 'step')} again"
    yield _Tile("Recoveries", str(len(summary.recoveries)), note)


def _samples(ledger: LedgerReport) -> _Tile:
    least = "" if ledger.exact else "at least "
    lost, repeated = (f"{least if number else ''}{number}" for number in (ledger.samples_lost, ledger.samples_repeated))
    note = f"{repeated} repeated, {count(ledger.steps_checked, 'step')} checked"
    return _Tile("Samples", f"{lost} lost", note, bad=not ledger.ok)
