"""What a run read, compared with what it should have read. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from raysharded.config import BatchConfig
from raysharded.data.ledger import LedgerReport, ReadColumns, check
from raysharded.data.order import ORDERS
from raysharded.obs.records import Span
from raysharded.obs.run_summary import RunSummary


def check_ledger(summary: RunSummary) -> LedgerReport | None:
    """Compare what was read with what should have been, for every step; None if the latter is not known."""
    low, high = summary.steps.words()
    records = ReadColumns(steps=summary.steps.whole("step"), low=low, high=high, num_reads=summary.steps.whole("reads"))
    reports = []
    for span in summary.spans:
        if span.batch is None or span.num_samples is None or span.order not in ORDERS:
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


def _check_span(span: Span, batch: Mapping[str, int], num_samples: int, records: ReadColumns) -> LedgerReport:
    rows = (records.steps >= span.first_step) & (records.steps <= span.last_step)
    return check(
        ReadColumns(
            steps=records.steps[rows],
            low=records.low[rows],
            high=records.high[rows],
            num_reads=records.num_reads[rows],
        ),
        first_step=span.first_step,
        final_step=span.last_step,
        batch=BatchConfig(
            global_batch_size=batch["global_batch_size"], microbatch_size=batch["microbatch_size"], seed=batch["seed"]
        ),
        num_samples=num_samples,
        skipped=span.skipped,
        order=span.order,
    )
