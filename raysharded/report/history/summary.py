"""A journal's entries folded into one frozen summary of the run. Pure.

A step may appear more than once: steps after the one from which a generation continues are computed again, and the last
entry of each counts. Earlier entries are kept until they are compared: in exact mode every number of a step computed
again must be the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from raysharded.journal import entries
from raysharded.journal.entries import Entry
from raysharded.journal.entry_text import injected, slowness, step_of
from raysharded.journal.records import (
    AvoidedNode,
    CheckpointRecord,
    Difference,
    GenerationRecord,
    Recovery,
    Span,
    StepRecord,
    WorkerEvent,
)
from raysharded.numerics import KEY, number_of
from raysharded.report.history.anomalies import Numbers, by_skips
from raysharded.report.history.counted_steps import CountedSteps
from raysharded.report.history.incident_costs import Chronicle
from raysharded.report.history.run_summary import RunSummary, Status
from raysharded.report.history.step_table import Columns, StepLog, Steps
from raysharded.report.history.wall_time import MICRO


def summarise(journal: Iterable[Entry]) -> RunSummary:
    """The summary of a run's entries, oldest first. Unknown kinds are ignored.

    Raises KeyError, TypeError or ValueError for entries without the fields of their kind.
    """
    fold = Fold()
    for entry in journal:
        fold.add(entry)
    return fold.summary()


@dataclass
class Fold:
    """The state while entries are read, oldest first: the work of `summarise`, entry by entry."""

    run: str = ""
    status: Status = "unfinished"
    error: str = ""
    fingerprint: str = ""
    max_steps: int | None = None
    exact: bool = True
    step: int = 0
    starts: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    members: frozenset[int] | None = None
    """Members of this driver's newest formed generation."""
    current: CountedSteps = field(default_factory=CountedSteps)
    """Each step's index of the log's entry that counts."""
    dropped: dict[int, int] = field(default_factory=dict)
    """Lost steps that were not computed again so far."""
    highest: int = 0
    """The highest number of any finished step."""
    starting_cpu_s: float = 0.0
    generations: list[GenerationRecord] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    worker_events: list[WorkerEvent] = field(default_factory=list)
    losses: dict[int, int] = field(default_factory=dict)
    """Lost worker -> the index of that event."""
    avoided_nodes: list[AvoidedNode] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    saved: int = 0
    """The newest step with a written checkpoint."""
    failed_saves: int = 0
    failing: bool = False
    entries_dropped: int = 0
    unrecorded: list[tuple[int, int]] = field(default_factory=list)
    """Ranges of steps without entries, which were dropped while storage took none."""
    differences: list[Difference] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    numbers: Numbers = field(default_factory=Numbers)
    chronicle: Chronicle = field(default_factory=Chronicle)

    @property
    def log(self) -> StepLog:
        """Every step so far, including lost ones."""
        return self.chronicle.log

    def add(self, entry: Entry) -> None:
        """Add an entry. Raises KeyError, TypeError or ValueError for an entry without the fields of its kind."""
        if entry["kind"] == "step":
            self.add_steps([entry])
            return
        at = float(entry["at"])
        self.numbers = self.numbers.with_entry(entry, at)
        if entry["kind"] != "recovery":
            self.chronicle.add(entry)
        match entry["kind"]:
            case "started":
                self._started(entry)
            case "rewind":
                self._take_back(int(entry["to_step"]), asked=entry.get("who") == "asked")
                gone = frozenset(entry.get("distrusted", ()))
                self.checkpoints = [record for record in self.checkpoints if record.prefix not in gone]
            case "corruption":
                self._take_back(int(entry["verified_step"]))
            case "arithmetic":
                self._take_back(int(entry["from_step"]) - 1)
            case "worker_ready":
                self.starting_cpu_s += float(entry.get("start_cpu_s", 0.0))
            case "data":
                self.spans[-1:] = [_with_data(span, entry) for span in self.spans[-1:]]
            case "generation":
                self._generation(entry, at)
            case "formed":
                self._formed(entry, at)
            case "recovery":
                self._recovery(entries.recovery(entry, at))
            case "worker_lost" | "worker_leaving" | "worker_left" as kind:
                self._worker_event(kind, entry, at)
            case "worker_refused" | "start_failed" | "straggler" as kind:
                self._worker_event(kind, entry, at)
            case "stuck" as kind if "worker" in entry:
                self._worker_event(kind, entry, at)
            case "worker_died":
                self._lost_in(int(entry["worker"]), int(entry["step"]))
            case "node_avoided":
                self.avoided_nodes.append(entries.avoided_node(entry, at))
            case "node_allowed":
                self.avoided_nodes = [one for one in self.avoided_nodes if one.node != entry["node"]]
            case "chaos":
                self._injected(entry, at)
            case "checkpoint" | "checkpoint_failed" | "checkpoint_skipped" | "checkpoint_late" as kind:
                record = entries.checkpoint(entry, at)
                self.checkpoints.append(record)
                failed = kind == "checkpoint_failed" and entry.get("counted", True)
                if kind == "checkpoint":
                    self.failed_saves, self.failing = 0, False
                elif failed and record.step > self.saved:
                    self.failed_saves += 1
                if record.prefix:
                    self.saved = max(self.saved, record.step)
            case "checkpoints_failing":
                self.failing = True
            case "entries_dropped":
                self.entries_dropped += int(entry["entries"])
                if entry.get("first_step") is not None:
                    self.unrecorded.append((int(entry["first_step"]), int(entry["last_step"])))
            case "orphaned":
                self.status = "stopped"
            case "finished" | "failed" | "stopped" as kind:
                self.status = kind
                self.error = str(entry.get("error", ""))
                self.fingerprint = str(entry.get("fingerprint") or "")

    def add_steps(self, steps: Sequence[Entry]) -> None:
        """Add entries of kind `step`, as `add` does: many at once take a fraction of the time. Adds nothing if one of
        them is invalid."""
        self._added(self.log.extend(steps))

    def add_columns(self, columns: Columns) -> None:
        """As `add_steps`, for checked columns."""
        self._added(self.log.add(columns))

    def _added(self, indices: range) -> None:
        if len(indices) > 1 and self._goes_on(indices):
            self._step(indices[0])
            self._more_steps(indices[1:])
            return
        for index in indices:
            self._step(index)

    def _goes_on(self, indices: range) -> bool:
        """True if the steps are new, consecutive, and of one generation, as nearly always."""
        log = self.log
        if self.dropped or log.number(indices[0]) <= self.highest:
            return False
        return len(log.generations(indices)) == 1 and bool((np.diff(log.numbers(indices)) == 1).all())

    def _started(self, entry: Entry) -> None:
        self.starts += 1
        self.status, self.error, self.fingerprint, self.members = "unfinished", "", "", None
        self.run = str(entry.get("run", self.run))
        self.max_steps = entries.whole_or_none(entry.get("max_steps", self.max_steps))
        self.exact = entry.get("reduction", "exact") == "exact"
        self.versions = {str(name): str(version) for name, version in dict(entry.get("versions", {})).items()}
        step = int(entry["resumed_after_step"])
        self._go_on_after(step)
        known = self.spans[-1].num_samples if self.spans else None
        blocks = entries.blocks(entry.get("blocks", (1, 1)))
        kept = [replace(span, last_step=min(span.last_step, step)) for span in self.spans]
        self.spans = [span for span in kept if span.first_step <= span.last_step]
        # open-ended until the next start; the first ready worker reports its number of samples
        order = number_of(str(entry.get(KEY, "")), "order")
        self.spans.append(
            Span(
                first_step=step + 1,
                last_step=1 << 62,
                batch=entry.get("batch"),
                num_samples=known,
                order=order,
                blocks=blocks,
            )
        )

    def _go_on_after(self, step: int) -> None:
        """Continue after `step`. Later steps are lost. Lost steps up to it count after all, if a checkpoint of it was
        committed meanwhile."""
        for number in [number for number in self.dropped if number <= step and number not in self.current]:
            index = self.dropped.pop(number)
            self.current.put(number, index)
            self.chronicle.lost(-self.log.total_s(index))
        for number in self.current.after(step):
            index = self.dropped[number] = self.current.take(number)
            self.chronicle.lost(self.log.total_s(index))
        self.step = step

    def _take_back(self, step: int, *, asked: bool = False) -> None:
        """Return to `step`: later steps are lost, or undone, and their replacements need not have the same results."""
        self._go_on_after(min(step, self.step))
        if asked:
            self.chronicle.undo(index for number, index in self.dropped.items() if number > step)
        kept = [replace(span, last_step=min(span.last_step, step)) for span in self.spans[:-1]]
        newest = [replace(span, first_step=min(span.first_step, step + 1)) for span in self.spans[-1:]]
        self.spans = [*(span for span in kept if span.first_step <= span.last_step), *newest]
        self.dropped = {number: index for number, index in self.dropped.items() if number <= step}
        self.numbers = self.numbers.taken_back(step)

    def _generation(self, entry: Entry, at: float) -> None:
        self._go_on_after(int(entry["step"]))
        self.generations.append(
            GenerationRecord(
                generation=int(entry["generation"]),
                members=tuple(map(int, entry["members"])),
                step=int(entry["step"]),
                source=str(entry["source"]),
                at=at,
                spares=tuple(map(int, entry.get("spares", ()))),
                mesh=str(entry.get("mesh", "")),
                why=str(entry.get("why", "")),
            )
        )

    def _formed(self, entry: Entry, at: float) -> None:
        newest = self.generations[-1]
        self.generations[-1] = replace(
            newest,
            formed_at=at,
            bytes_received=int(entry.get("bytes_received", 0)),
            bytes_read=int(entry.get("bytes_read", 0)),
        )
        joined = () if self.members is None else sorted(set(newest.members) - self.members)
        for worker in joined:
            first = step_of("joined", entry, self.step + 1, self.max_steps)
            self.worker_events.append(WorkerEvent(what="joined", worker=worker, step=first, reason="", at=at))
        self.members = frozenset(newest.members)

    def _step(self, index: int) -> None:
        number = self.log.number(index)
        dropped, before = self.dropped.pop(number, None), self.current.get(number)
        before = dropped if before is None else before  # else: reported again without a generation in between
        if before is not None:
            earlier, record = self.log.record(before), self.log.record(index)
            differing = differing_fields(earlier, record, exact=self.exact)
            if differing:
                generations = (earlier.generation, record.generation)
                self.differences.append(Difference(step=number, fields=differing, generations=generations))
        self.current.put(number, index)
        self.step, self.highest = number, max(self.highest, number)
        self.chronicle.add_step(index)

    def _more_steps(self, indices: range) -> None:
        """Add consecutive steps."""
        self.current.put_row(self.log.number(indices[0]), indices)
        self.step = self.highest = self.log.number(indices[-1])
        self.chronicle.add_more_steps(indices)

    def _recovery(self, recovery: Recovery) -> None:
        self.recoveries.append(recovery)
        step = self.chronicle.add_recovery(recovery)
        for worker in recovery.lost:
            self._lost_in(worker, self.chronicle.died.get(worker, step))

    def _worker_event(self, kind: str, entry: Entry, at: float) -> None:
        what: dict[str, Literal["lost", "leaving", "left", "refused", "start failed", "stuck", "slow"]] = {
            "worker_lost": "lost",
            "worker_leaving": "leaving",
            "worker_left": "left",
            "worker_refused": "refused",
            "start_failed": "start failed",
            "stuck": "stuck",
            "straggler": "slow",
        }
        hit = step_of(kind, entry, self.step, self.max_steps)
        if kind == "worker_lost":
            self.losses[int(entry["worker"])] = len(self.worker_events)
        reason = slowness(entry) if kind == "straggler" else str(entry["reason"])
        self.worker_events.append(
            WorkerEvent(what=what[kind], worker=int(entry["worker"]), step=hit, reason=reason, at=at)
        )

    def _lost_in(self, worker: int, step: int) -> None:
        """Set the step in which a worker was lost."""
        if (at := self.losses.get(worker)) is not None:
            self.worker_events[at] = replace(self.worker_events[at], step=step)

    def _injected(self, entry: Entry, at: float) -> None:
        worker = int(entry["worker"])
        self.worker_events.append(
            WorkerEvent(what="injected", worker=worker, step=self.step, reason=injected(entry), at=at)
        )

    def steps(self) -> Steps:
        """The steps that count, in order."""
        return self.log.chosen(self.current.columns()[1])

    def _on_record(self, span: Span) -> Iterator[Span]:
        """The span without steps whose entries were dropped: they are not lost, and there is nothing to check."""
        first = span.first_step
        for low, high in sorted(self.unrecorded):
            for step in range(max(first, low), min(high, span.last_step) + 1):
                if step not in self.current:
                    yield replace(span, first_step=first, last_step=step - 1)
                    first = step + 1
        yield replace(span, first_step=first)

    def summary(self) -> RunSummary:
        spans = [replace(span, last_step=min(span.last_step, self.step)) for span in self.spans]
        spans = [part for span in spans for part in by_skips(span, self.numbers.skips)]
        spans = [part for span in spans for part in self._on_record(span)]
        times, track, incidents = self.chronicle.told(self.current.columns()[1])
        first_at = math.nan if self.chronicle.first_at is None else self.chronicle.first_at
        return RunSummary(
            run=self.run,
            status=self.status,
            error=self.error,
            fingerprint=self.fingerprint,
            max_steps=self.max_steps,
            last_step=self.step,
            exact=self.exact,
            starts=self.starts,
            versions=self.versions,
            steps=self.steps(),
            generations=tuple(self.generations),
            recoveries=tuple(self.recoveries),
            worker_events=tuple(self.worker_events),
            avoided_nodes=tuple(self.avoided_nodes),
            checkpoints=tuple(self.checkpoints),
            failed_saves=self.failed_saves,
            failing=self.failing,
            entries_dropped=self.entries_dropped,
            differences=tuple(self.differences),
            spans=tuple(_merged([span for span in spans if span.first_step <= span.last_step])),
            skipped_steps=self.numbers.skipped_steps,
            rewinds=self.numbers.rewinds,
            arithmetic_changes=self.numbers.arithmetic_changes,
            audits=self.numbers.audits,
            corruptions=self.numbers.corruptions,
            first_at=first_at,
            last_at=first_at + times.total / MICRO,
            times=times,
            track=track,
            incidents=incidents,
            starting_cpu_s=self.starting_cpu_s,
        )


def differing_fields(before: StepRecord, after: StepRecord, *, exact: bool) -> tuple[str, ...]:
    """The fields that differ although they must be the same when a step is computed again. Without exactness only the
    samples read must be the same."""
    names = ("loss", "weight", "gradient_norm", "digest", "reads") if exact else ("digest", "reads")
    return tuple(name for name in names if repr(getattr(before, name)) != repr(getattr(after, name)))  # NaN is NaN


def _with_data(span: Span, entry: Entry) -> Span:
    """The span with the data of the first ready worker. They determine the blocks of a run that has just begun."""
    per_block = int(entry.get("samples_per_block", 1))
    blocks = span.blocks
    if blocks[0] == 1 != per_block and span.batch is not None:
        blocks = per_block, int(span.batch["global_batch_size"])
    return replace(span, num_samples=int(entry["num_samples"]), blocks=blocks)


def _merged(spans: list[Span]) -> list[Span]:
    """The spans, with neighbours of the same sample order merged."""
    merged: list[Span] = []
    for span in spans:
        same = merged and replace(merged[-1], first_step=0, last_step=0) == replace(span, first_step=0, last_step=0)
        if same and merged[-1].last_step + 1 == span.first_step:
            merged[-1] = replace(merged[-1], last_step=span.last_step)
        else:
            merged.append(span)
    return merged
