"""The report of a run, from its journal alone: what happened, and the proof that nothing was lost."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType

from raysharded.checkpoint import open_storage
from raysharded.checkpoint.storage.urls import join_url
from raysharded.config import BatchConfig
from raysharded.data.ledger import LedgerReport, StepReads, check
from raysharded.driver import journal
from raysharded.errors import StorageError
from raysharded.obs.records import RunSummary, Span
from raysharded.obs.summary import summarise
from raysharded.obs.tables import (
    checkpoint_table,
    facts_table,
    node_table,
    recovery_table,
    run_table,
    verdict,
    worker_table,
)
from raysharded.obs.units import count, listing

_SHOWN = 8
"""At most so many step numbers are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What is known of a run. Printed with rich, it shows tables."""

    url: str
    summary: RunSummary
    ledger: LedgerReport | None
    """The check of what was read; None if the journal does not say what should have been (no worker was ever ready)."""

    @property
    def ok(self) -> bool:
        """Nothing that is promised was found broken. An unfinished or failed run may well be ok."""
        return (self.ledger is None or self.ledger.ok) and not self.summary.differences

    def as_dict(self) -> dict[str, Any]:
        """The same as data, for JSON. Numbers that JSON has no word for are None."""
        summary, ledger = self.summary, self.ledger
        by_step = summary.workers_by_step
        losses = {record.step: record.loss for record in summary.steps}
        steps = range(1, summary.last_step + 1)
        found: dict[str, Any] = {
            "run": summary.run,
            "url": self.url,
            "status": summary.status,
            "error": summary.error or None,
            "ok": self.ok,
            "steps": summary.last_step,
            "max_steps": summary.max_steps,
            "starts": summary.starts,
            "versions": summary.versions,
            "workers_by_step": [by_step.get(step) for step in steps],
            "losses": [losses.get(step) for step in steps],
            "evaluations": {record.step: record.evaluation for record in summary.steps if record.evaluation},
            "recoveries": [asdict(recovery) for recovery in summary.recoveries],
            "worker_events": [asdict(event) for event in summary.worker_events],
            "avoided_nodes": [asdict(node) for node in summary.avoided_nodes],
            "preemptions": summary.preemptions,
            "checkpoints": [asdict(checkpoint) for checkpoint in summary.checkpoints],
            "checkpoints_late": len(summary.late),
            "checkpoints_failed_in_a_row": summary.failed_saves,
            "checkpoints_failing": summary.failing,
            "samples_lost": ledger.samples_lost if ledger else None,
            "samples_repeated": ledger.samples_repeated if ledger else None,
            "ledger": {**asdict(ledger), "ok": ledger.ok} if ledger else None,
            "differences": [asdict(difference) for difference in summary.differences],
            "skipped_steps": [asdict(skipped) for skipped in summary.skipped_steps],
            "rewinds": [asdict(rewind) for rewind in summary.rewinds],
            "audits": asdict(summary.audits),
            "corruptions": [asdict(corruption) for corruption in summary.corruptions],
            "fingerprint": summary.fingerprint or None,
            "weight": summary.weight,
            "weight_per_s": summary.weight_per_s,
            "elapsed_s": summary.elapsed_s,
            "computing_s": summary.computing_s,
            "recovering_s": summary.recovering_s,
            "lost_step_s": summary.lost_step_s,
            "starting_cpu_s": summary.starting_cpu_s,
            "goodput": summary.goodput,
        }
        return {name: _plain(value) for name, value in found.items()}

    def __rich__(self) -> RenderableType:
        summary = self.summary
        parts: list[RenderableType] = [run_table(summary), ""]
        if summary.recoveries:
            parts.append(recovery_table(summary.recoveries))
        if summary.worker_events:
            parts.append(worker_table(summary))
        if summary.avoided_nodes:
            parts.append(node_table(summary.avoided_nodes))
        if summary.checkpoints:
            parts.append(checkpoint_table(summary.checkpoints))
        return Group(*parts, _proof_table(self))


def load(run_url: str) -> RunReport:
    """The report of the run in a folder or under a URL: `<storage_path>/<name>`.

    Works while the run goes on, and after any number of resumes. Raises StorageError if there is no run, if it cannot
    be read, or if its journal is damaged.
    """
    storage = open_storage(run_url)
    try:
        summary = summarise(journal.read(storage))
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise StorageError(
            f"the journal of the run at {storage.url} is damaged: {type(error).__name__}: {error}. Restore the files "
            f"under {join_url(storage.url, journal.FOLDER)}, or go by its checkpoints: "
            f"`raysharded checkpoint ls {storage.url}`."
        ) from error
    if not summary.starts:
        raise StorageError(
            f"there is no run at {storage.url}: nothing of a journal under {journal.FOLDER}/. Give the folder of one "
            "run, <RunConfig.storage_path>/<RunConfig.name>."
        )
    return RunReport(url=storage.url, summary=summary, ledger=check_ledger(summary))


def check_ledger(summary: RunSummary) -> LedgerReport | None:
    """Compare what was read with what should have been, for every step; None if the latter is not known."""
    records = {record.step: StepReads(digest=record.digest, num_reads=record.reads) for record in summary.steps}
    reports = []
    for span in summary.spans:
        if span.batch is None or span.num_samples is None:
            return None
        reports.append(_check_span(span, span.batch, span.num_samples, records))
    if not reports:
        return None
    return LedgerReport(
        steps_checked=sum(report.steps_checked for report in reports),
        samples_lost=sum(report.samples_lost for report in reports),
        samples_repeated=sum(report.samples_repeated for report in reports),
        steps_missing=tuple(step for report in reports for step in report.steps_missing),
        steps_wrong=tuple(step for report in reports for step in report.steps_wrong),
        exact=all(report.exact for report in reports),
    )


def _check_span(
    span: Span, batch: Mapping[str, int], num_samples: int, records: Mapping[int, StepReads]
) -> LedgerReport:
    return check(
        {step: reads for step, reads in records.items() if span.first_step <= step <= span.last_step},
        first_step=span.first_step,
        final_step=span.last_step,
        batch=BatchConfig(
            global_batch_size=batch["global_batch_size"], microbatch_size=batch["microbatch_size"], seed=batch["seed"]
        ),
        num_samples=num_samples,
        skipped=span.skipped,
    )


def _proof_table(report: RunReport) -> RenderableType:
    """What was promised, and whether it held."""
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
    for difference in summary.differences:
        what = f"step {difference.step}: another {listing(difference.fields)} when it was computed again"
        table.add_row("not the same", verdict(good=False, text=what))
    if summary.fingerprint:
        table.add_row("fingerprint", summary.fingerprint)
    elif summary.committed:
        newest = summary.committed[-1]
        table.add_row("fingerprint", f"{newest.fingerprint} (of the checkpoint of step {newest.step})")
    return table


def _some(steps: tuple[int, ...]) -> str:
    more = len(steps) - _SHOWN
    return ", ".join(map(str, steps[:_SHOWN])) + (f" and {count(more, 'more', 'more')}" if more > 0 else "")


def _plain(value: Any) -> Any:  # any JSON value
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
