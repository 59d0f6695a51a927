"""Reads a run's journal for its report, up to the first damage. Compares the samples that were read with the expected
ones. Errors state what is missing."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raysharded.checkpoint import Storage, open_storage
from raysharded.checkpoint.format.paths import CHECKPOINTS_FOLDER
from raysharded.checkpoint.removal_mark import refuse_removed
from raysharded.checkpoint.stored_claims import CLAIMS_FOLDER
from raysharded.config import BatchConfig
from raysharded.data.ledger import LedgerReport, ReadColumns, check
from raysharded.data.order import ORDERS, Blocks
from raysharded.errors import StorageError
from raysharded.journal import log
from raysharded.journal.reader import entries_of, read_some, steps_of
from raysharded.journal.records import Span
from raysharded.locations import join_url
from raysharded.ownership.start_mark import is_starting
from raysharded.report.history import parallel_reader
from raysharded.report.history.run_summary import RunSummary
from raysharded.report.history.step_table import Columns
from raysharded.report.history.summary import Fold
from raysharded.report.nearby import advice
from raysharded.report.overview import is_run
from raysharded.report.run_report import RunReport

if TYPE_CHECKING:
    import pyarrow


def check_ledger(summary: RunSummary) -> LedgerReport | None:
    """Compare the samples read with the expected ones, for every step; None if the expected ones are unknown."""
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
    if not rows.all():  # else as they are: nearly all runs have one span
        records = ReadColumns(
            steps=records.steps[rows],
            low=records.low[rows],
            high=records.high[rows],
            num_reads=records.num_reads[rows],
        )
    return check(
        records,
        first_step=span.first_step,
        final_step=span.last_step,
        batch=BatchConfig(
            global_batch_size=batch["global_batch_size"], microbatch_size=batch["microbatch_size"], seed=batch["seed"]
        ),
        num_samples=num_samples,
        skipped=span.skipped,
        order=span.order,
        blocks=Blocks(*span.blocks),
    )


_DAMAGE = (*log.DAMAGE, log.DamagedJournal)
"""Errors caused by bytes that no driver wrote."""
_STEPS_AT_ONCE = 2048


def open_run(run_url: str) -> Storage:
    """The storage of a run. Raises StorageError, with runs that may be meant, if there is none, or none any more."""
    storage = open_storage(run_url)
    refuse_removed(storage, StorageError)
    if not is_run(storage):
        raise StorageError(_no_run(storage))
    return storage


def load(run_url: str) -> RunReport:
    """The report of the run in a folder or under a URL: `<storage_path>/<name>`.

    Works while the run trains, and after any number of resumes. For a damaged journal the report covers the part before
    the damage, and states that. Raises StorageError if there is no run, if it cannot be read, or if none of it can be
    decoded.
    """
    storage = open_storage(run_url)
    summary, damage = _fold(storage)
    if summary.starts:
        try:
            ledger = check_ledger(summary)
        except log.DAMAGE as error:
            ledger, damage = None, damage or f"its samples cannot be checked ({type(error).__name__}: {error})"
        return RunReport(url=storage.url, summary=_with_deletions(summary, storage), ledger=ledger, damage=damage)
    if damage:
        raise StorageError(
            f"the journal of the run at {storage.url} is damaged from its beginning: {damage}. Restore the "
            f"files under {join_url(storage.url, log.FOLDER)}, or go by its checkpoints: "
            f"`raysharded checkpoint ls {storage.url}`."
        )
    if is_starting(storage):
        raise StorageError(
            f"the run at {storage.url} is starting: its driver has written nothing yet. Retry in a moment."
        )
    if storage.list(log.FOLDER) or storage.list(CLAIMS_FOLDER):
        raise StorageError(
            f"the journal of the run at {storage.url} is empty: its driver has just begun, or ended before it could "
            "write. Retry in a few seconds; `raysharded run`, or the script, starts it again."
        )
    raise StorageError(_no_run(storage))


def _with_deletions(summary: RunSummary, storage: Storage) -> RunSummary:
    """The summary, with the checkpoints marked whose folders no longer exist.

    Unchanged if storage lists none at all: the journal may have been copied without them.
    """
    there = set[str]()
    with suppress(StorageError):
        there = {key.rpartition("/")[0] for key in storage.list(CHECKPOINTS_FOLDER)}
    if not there:
        return summary
    found = (replace(one, deleted=bool(one.prefix) and one.prefix not in there) for one in summary.checkpoints)
    return replace(summary, checkpoints=tuple(found))


def summary_of(storage: Storage) -> RunSummary:
    """The summary of a run's journal, up to the first damage; empty for a run without a journal."""
    return _fold(storage)[0]


def load_metrics(run_url: str) -> pyarrow.Table:
    """The run's numbers, a row per committed step: as `raysharded.report.history.metrics_table`.

    For a damaged journal it has the steps before the damage. Raises StorageError as `load` does.
    """
    return metrics_of(open_run(run_url))


def metrics_of(storage: Storage) -> pyarrow.Table:
    """The metrics of a run's storage, as `load_metrics`; no rows for a run without a journal."""
    from raysharded.report.history.metrics_table import table_of

    fold, _ = read_fold(storage)
    return table_of(fold.steps())


def _no_run(storage: Storage) -> str:
    return f"there is no run at {storage.url}: nothing of a journal under {log.FOLDER}/.{advice(storage)}"


def _fold(storage: Storage) -> tuple[RunSummary, str]:
    """The summary of the journal up to the first damaged entry, and that entry's place; empty if there is none."""
    fold, damage = read_fold(storage)
    try:
        return fold.summary(), damage
    except log.DAMAGE as error:
        raise log.DamagedJournal(
            f"the journal of the run at {storage.url} is damaged: it has a value that no driver wrote "
            f"({type(error).__name__}: {error}). Restore the files under {join_url(storage.url, log.FOLDER)}."
        ) from error


def read_fold(storage: Storage) -> tuple[Fold, str]:
    """The fold of the journal up to the first damaged entry, and that entry's place; empty if there is none."""
    refuse_removed(storage, StorageError)
    keys = log.segment_keys(storage)
    if len(keys) >= parallel_reader.FEWEST:
        with suppress(parallel_reader.Unavailable):
            return _read(parallel_reader.parts_of(storage.url, keys))
    return _read(read_some(storage, keys))


def _read(parts: Iterable[parallel_reader.Part]) -> tuple[Fold, str]:
    reader = _Reader()
    with _no_collection():
        try:
            for part in parts:
                if len(part) == 2:
                    reader.add(*part)
                else:
                    reader.add_columns(*part)
            reader.give()
        except _DAMAGE as error:
            return reader.fold, f"{reader.where} cannot be read ({type(error).__name__}: {error})"
    return reader.fold, ""


class _Reader:
    """Feeds the entries of segments to a fold: consecutive steps in batches, because nearly all entries are steps.

    Damage is detected at the same place, and everything before it is folded, as if entries were fed one by one.
    """

    def __init__(self) -> None:
        self.fold = Fold()
        self.where = "its first line"
        """Place of the first entry that was not folded."""
        self._steps: list[dict[str, Any]] = []
        self._places: list[tuple[str, range]] = []
        """Segments and lines of the pending steps."""

    def add(self, key: str, segment: bytes) -> None:
        """Add a segment. At the first damaged entry it raises an error of `_DAMAGE`, after folding all earlier
        entries."""
        steps = steps_of(segment)
        if steps is None:
            self._add(key, segment)
        elif steps:
            self._wait(key, 2, steps)
        if len(self._steps) >= _STEPS_AT_ONCE:
            self.give()

    def add_columns(self, key: str, line: int, columns: Columns) -> None:
        """Add the steps of segments up to `line` of this one; they contain only steps."""
        self.give()
        self.fold.add_columns(columns)
        self._folded(key, line)

    def _add(self, key: str, segment: bytes) -> None:
        """Add a segment's entries one by one."""
        try:
            for line, entry in entries_of(segment):
                if entry["kind"] == "step":
                    self._wait(key, line, [entry])
                    continue
                self.give()
                self.fold.add(entry)
                self._folded(key, line)
        except _DAMAGE:
            self.give()
            raise

    def _wait(self, key: str, line: int, steps: list[dict[str, Any]]) -> None:
        self._steps += steps
        self._places.append((key, range(line, line + len(steps))))

    def give(self) -> None:
        """Fold the pending steps."""
        steps, places, self._steps, self._places = self._steps, self._places, [], []
        if not steps:
            return
        try:
            self.fold.add_steps(steps)
        except _DAMAGE:
            lines = ((key, line) for key, lines in places for line in lines)
            for entry, (key, line) in zip(steps, lines, strict=True):
                self.fold.add(entry)
                self._folded(key, line)
        else:
            key, last = places[-1]
            self._folded(key, last[-1])

    def _folded(self, key: str, line: int) -> None:
        self.where = f"what follows line {line} of {key}"


@contextmanager
def _no_collection() -> Iterator[None]:
    """A context without the cyclic garbage collector, which would scan all read data repeatedly; none of it is
    cyclic."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
