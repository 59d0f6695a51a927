"""The report of a run, from its journal alone: its history, and the check that no sample was lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType

from raysharded.data.ledger import LedgerReport
from raysharded.display.quantities import count, listing
from raysharded.report.history.run_summary import RunSummary
from raysharded.report.history.tables import (
    checkpoint_table,
    facts_table,
    incident_table,
    node_table,
    run_table,
    time_table,
    verdict,
    worker_table,
)
from raysharded.report.history.wall_time import PARTS

_SHOWN = 8
"""Maximum number of step numbers in a list."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """A run's report. Printed with rich, it shows tables; in a notebook, the same view as a run's handle."""

    url: str
    """The run's folder."""
    summary: RunSummary
    """Contents of the run's journal: steps, incidents, times, checkpoints."""
    ledger: LedgerReport | None
    """The check of the samples read; None if the journal lacks the expected samples (no worker was ever ready)."""
    damage: str = ""
    """The damaged part of the journal; the report covers the part before it. Empty if nothing is damaged."""

    @property
    def ok(self) -> bool:
        """True if no promise was found broken. An unfinished or failed run may be ok."""
        return (self.ledger is None or self.ledger.ok) and not self.summary.differences

    def as_html(self) -> str:
        """The report as one page, which needs no other file and no network."""
        from raysharded.report.page.document import render

        return render(self.summary, self.ledger, url=self.url, damage=self.damage, ok=self.ok)

    def as_dict(self) -> dict[str, Any]:
        """The report as data for JSON. Non-finite numbers are None."""
        summary, ledger = self.summary, self.ledger
        by_step = summary.workers_by_step
        losses = dict(zip(by_step, summary.steps.real("loss").tolist(), strict=True))
        steps = range(1, summary.last_step + 1)
        found: dict[str, Any] = {
            "run": summary.run,
            "url": self.url,
            "status": summary.status,
            "error": summary.error or None,
            "ok": self.ok,
            "damage": self.damage or None,
            "steps": summary.last_step,
            "max_steps": summary.max_steps,
            "starts": summary.starts,
            "versions": summary.versions,
            "workers_by_step": [by_step.get(step) for step in steps],
            "losses": [losses.get(step) for step in steps],
            "evaluations": {record.step: record.evaluation for record in summary.evaluated},
            "incidents": [{**asdict(incident), "cost_s": incident.cost_s} for incident in summary.incidents],
            "recoveries": [asdict(recovery) for recovery in summary.recoveries],
            "worker_events": [asdict(event) for event in summary.worker_events],
            "avoided_nodes": [asdict(node) for node in summary.avoided_nodes],
            "preemptions": summary.preemptions,
            "checkpoints": [asdict(checkpoint) for checkpoint in summary.checkpoints],
            "checkpoints_late": len(summary.late),
            "checkpoints_failed_in_a_row": summary.failed_saves,
            "checkpoints_failing": summary.failing,
            "entries_dropped": summary.entries_dropped,
            "samples_lost": ledger.samples_lost if ledger else None,
            "samples_repeated": ledger.samples_repeated if ledger else None,
            "ledger": {**asdict(ledger), "ok": ledger.ok} if ledger else None,
            "differences": [asdict(difference) for difference in summary.differences],
            "skipped_steps": [asdict(skipped) for skipped in summary.skipped_steps],
            "rewinds": [asdict(rewind) for rewind in summary.rewinds],
            "arithmetic_changes": [asdict(change) for change in summary.arithmetic_changes],
            "audits": asdict(summary.audits),
            "corruptions": [asdict(corruption) for corruption in summary.corruptions],
            "fingerprint": summary.fingerprint or None,
            "weight": summary.weight,
            "weight_per_s": summary.weight_per_s,
            "elapsed_s": summary.elapsed_s,
            "times_s": {part: summary.times.seconds(part) for part in PARTS},
            "starting_cpu_s": summary.starting_cpu_s,
            "goodput": summary.goodput,
        }
        return {name: plain(value) for name, value in found.items()}

    def _repr_html_(self) -> str:
        """The notebook's view of the report."""
        from raysharded.report.notebook import run_html

        return run_html(None, self.summary)

    def __rich__(self) -> RenderableType:
        summary = self.summary
        parts: list[RenderableType] = [run_table(summary), "", *self._warnings(), time_table(summary.times), ""]
        if summary.incidents:
            parts += [incident_table(summary.incidents), ""]
        if summary.worker_events:
            parts += [worker_table(summary), ""]
        if summary.avoided_nodes:
            parts += [node_table(summary.avoided_nodes), ""]
        if summary.checkpoints:
            parts += [checkpoint_table(summary.checkpoints), ""]
        return Group(*parts, _proof_table(self))

    def _warnings(self) -> list[RenderableType]:
        if not self.damage:
            return []
        return [verdict(good=False, text=f"The journal is damaged: {self.damage}. This is what comes before."), ""]


def _proof_table(report: RunReport) -> RenderableType:
    """The promises, and whether they held."""
    table = facts_table()
    ledger, summary = report.ledger, report.summary
    if ledger is None:
        table.add_row("samples", "nothing to check: no step was recorded, or not what it should have read")
    else:
        bound = "" if ledger.exact else "at least "
        for what, number in (("samples lost", ledger.samples_lost), ("samples repeated", ledger.samples_repeated)):
            table.add_row(what, verdict(good=number == 0, text=f"{bound}{number}" if number else "0"))
        table.add_row("steps checked", str(ledger.steps_checked))
        for what, steps in (("steps without record", ledger.steps_missing), ("steps read wrongly", ledger.steps_wrong)):
            if steps:
                table.add_row(what, verdict(good=False, text=_some(steps)))
    if summary.entries_dropped:
        what = f"{summary.entries_dropped} not recorded, because storage took none for too long"
        table.add_row("journal entries", verdict(good=False, text=what))
    for difference in summary.differences[:_SHOWN]:
        what = f"step {difference.step}: another {listing(difference.fields)} when it was computed again"
        table.add_row("not the same", verdict(good=False, text=what))
    if more := summary.differences[_SHOWN:]:
        table.add_row("not the same", verdict(good=False, text=f"and {count(len(more), 'step')} more"))
    if summary.fingerprint:
        table.add_row("fingerprint", summary.fingerprint)
    elif summary.committed:
        newest = summary.committed[-1]
        table.add_row("fingerprint", f"{newest.fingerprint} (of the checkpoint of step {newest.step})")
    return table


def _some(steps: tuple[int, ...]) -> str:
    more = len(steps) - _SHOWN
    return ", ".join(map(str, steps[:_SHOWN])) + (f" and {count(more, 'more', 'more')}" if more > 0 else "")


def plain(value: Any) -> Any:  # any JSON value
    """The value for JSON: non-finite numbers are None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
