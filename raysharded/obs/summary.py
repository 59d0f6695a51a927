"""A run as its journal tells it: entries folded into one frozen value. Pure.

A step may appear more than once: what was computed after the step that a generation goes on from is computed again,
and its last entry counts. The earlier ones are kept long enough to be compared: in exact mode every number of a
step that is computed again must be the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from raysharded.obs.lines import injected, slowness
from raysharded.obs.numbers import Numbers, by_skips
from raysharded.obs.records import (
    AvoidedNode,
    CheckpointRecord,
    Difference,
    GenerationRecord,
    Recovery,
    RunSummary,
    Span,
    Status,
    StepRecord,
    WorkerEvent,
)

Entry = Mapping[str, Any]


def summarise(entries: Iterable[Entry]) -> RunSummary:
    """The summary of a run's entries, oldest first. Unknown kinds are passed over.

    Raises KeyError, TypeError or ValueError for entries without what their kind must have.
    """
    fold = _Fold()
    for entry in entries:
        fold.add(entry)
    return fold.summary()


@dataclass
class _Fold:
    """The state while entries are read."""

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
    """Of the newest generation of this driver that was formed."""
    current: dict[int, StepRecord] = field(default_factory=dict)
    dropped: dict[int, StepRecord] = field(default_factory=dict)
    """Lost, and not computed again so far."""
    lost_step_s: float = 0.0
    starting_cpu_s: float = 0.0
    generations: list[GenerationRecord] = field(default_factory=list)
    recoveries: list[Recovery] = field(default_factory=list)
    worker_events: list[WorkerEvent] = field(default_factory=list)
    avoided_nodes: list[AvoidedNode] = field(default_factory=list)
    checkpoints: list[CheckpointRecord] = field(default_factory=list)
    failed_saves: int = 0
    failing: bool = False
    differences: list[Difference] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    numbers: Numbers = field(default_factory=Numbers)
    sessions: list[tuple[float, float]] = field(default_factory=list)
    """Wall clock of each driver's first and newest entry."""

    def add(self, entry: Entry) -> None:
        at = float(entry["at"])
        if not self.sessions or entry["kind"] == "started":
            self.sessions.append((at, at))
        if entry["kind"] != "checkpoint_skipped":  # found by the next driver, before it says that it has started
            self.sessions[-1] = (self.sessions[-1][0], max(at, self.sessions[-1][1]))
        self.numbers = self.numbers.with_entry(entry, at)
        match entry["kind"]:
            case "started":
                self._started(entry)
            case "rewind":
                self._take_back(int(entry["to_step"]))
            case "corruption":
                self._take_back(int(entry["verified_step"]))
            case "worker_ready":
                self.starting_cpu_s += float(entry.get("start_cpu_s", 0.0))
            case "data":
                self.spans[-1:] = [replace(span, num_samples=int(entry["num_samples"])) for span in self.spans[-1:]]
            case "generation":
                self._generation(entry, at)
            case "formed":
                self._formed(entry, at)
            case "step":
                self._step(_step_record(entry, at))
            case "recovery":
                self.recoveries.append(_recovery(entry, at))
            case "worker_lost" | "worker_leaving" | "worker_left" as kind:
                self._worker_event(kind, entry, at)
            case "worker_refused" | "start_failed" | "straggler" as kind:
                self._worker_event(kind, entry, at)
            case "stuck" as kind if "worker" in entry:
                self._worker_event(kind, entry, at)
            case "node_avoided":
                self.avoided_nodes.append(_avoided_node(entry, at))
            case "chaos":
                self._injected(entry, at)
            case "checkpoint" | "checkpoint_failed" | "checkpoint_skipped" | "checkpoint_late" as kind:
                newest = max((record.step for record in self.checkpoints if record.prefix), default=0)
                self.checkpoints.append(_checkpoint(entry, at))
                if kind == "checkpoint":
                    self.failed_saves, self.failing = 0, False
                elif kind == "checkpoint_failed" and int(entry["step"]) > newest and entry.get("counted", True):
                    self.failed_saves += 1
            case "checkpoints_failing":
                self.failing = True
            case "orphaned":
                self.status = "stopped"
            case "finished" | "failed" | "stopped" as kind:
                self.status = kind
                self.error = str(entry.get("error", ""))
                self.fingerprint = str(entry.get("fingerprint") or "")

    def _started(self, entry: Entry) -> None:
        self.starts += 1
        self.status, self.error, self.fingerprint, self.members = "unfinished", "", "", None
        self.run = str(entry.get("run", self.run))
        self.max_steps = entry.get("max_steps", self.max_steps)
        self.exact = entry.get("reduction", "exact") == "exact"
        self.versions = dict(entry.get("versions", {}))
        step = int(entry["resumed_after_step"])
        self._go_on_after(step)
        known = self.spans[-1].num_samples if self.spans else None
        kept = [replace(span, last_step=min(span.last_step, step)) for span in self.spans]
        self.spans = [span for span in kept if span.first_step <= span.last_step]
        # open-ended until the next start; its number of samples is news of the first worker that is ready
        self.spans.append(_open_span(first_step=step + 1, batch=entry.get("batch"), num_samples=known))

    def _go_on_after(self, step: int) -> None:
        """What was computed after `step` is lost; what was lost up to it counts after all, if a checkpoint of it became
        real meanwhile."""
        for number in [number for number in self.dropped if number <= step and number not in self.current]:
            self.current[number] = self.dropped.pop(number)
            self.lost_step_s -= self.current[number].total_s
        lost = [number for number in self.current if number > step]
        for number in lost:
            self.dropped[number] = self.current.pop(number)
            self.lost_step_s += self.dropped[number].total_s
        self.step = step

    def _take_back(self, step: int) -> None:
        """What was computed after `step` is lost, and what comes in its place need not be the same."""
        self._go_on_after(min(step, self.step))
        self.dropped = {number: record for number, record in self.dropped.items() if number <= step}
        self.numbers = self.numbers.taken_back(step)

    def _generation(self, entry: Entry, at: float) -> None:
        self._go_on_after(int(entry["step"]))
        self.generations.append(
            GenerationRecord(
                generation=int(entry["generation"]),
                members=tuple(entry["members"]),
                step=int(entry["step"]),
                source=str(entry["source"]),
                at=at,
                spares=tuple(entry.get("spares", ())),
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
            self.worker_events.append(WorkerEvent(what="joined", worker=worker, step=self.step, reason="", at=at))
        self.members = frozenset(newest.members)

    def _step(self, record: StepRecord) -> None:
        before = self.dropped.pop(record.step, None)
        if record.step in self.current:  # reported again without a generation between
            before = self.current[record.step]
            self.lost_step_s += before.total_s
        if before is not None:
            differing = differing_fields(before, record, exact=self.exact)
            if differing:
                generations = (before.generation, record.generation)
                self.differences.append(Difference(step=record.step, fields=differing, generations=generations))
        self.current[record.step] = record
        self.step = record.step

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
        reason = slowness(entry) if kind == "straggler" else str(entry["reason"])
        self.worker_events.append(
            WorkerEvent(what=what[kind], worker=int(entry["worker"]), step=self.step, reason=reason, at=at)
        )

    def _injected(self, entry: Entry, at: float) -> None:
        worker = int(entry["worker"])
        self.worker_events.append(
            WorkerEvent(what="injected", worker=worker, step=self.step, reason=injected(entry), at=at)
        )

    def summary(self) -> RunSummary:
        spans = [replace(span, last_step=min(span.last_step, self.step)) for span in self.spans]
        spans = [part for span in spans for part in by_skips(span, self.numbers.skips)]
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
            steps=tuple(self.current[step] for step in sorted(self.current)),
            generations=tuple(self.generations),
            recoveries=tuple(self.recoveries),
            worker_events=tuple(self.worker_events),
            avoided_nodes=tuple(self.avoided_nodes),
            checkpoints=tuple(self.checkpoints),
            failed_saves=self.failed_saves,
            failing=self.failing,
            differences=tuple(self.differences),
            spans=tuple(_merged([span for span in spans if span.first_step <= span.last_step])),
            skipped_steps=self.numbers.skipped_steps,
            rewinds=self.numbers.rewinds,
            audits=self.numbers.audits,
            corruptions=self.numbers.corruptions,
            first_at=self.sessions[0][0] if self.sessions else math.nan,
            last_at=self.sessions[-1][1] if self.sessions else math.nan,
            elapsed_s=math.fsum(last - first for first, last in self.sessions),
            lost_step_s=self.lost_step_s,
            starting_cpu_s=self.starting_cpu_s,
        )


def differing_fields(before: StepRecord, after: StepRecord, *, exact: bool) -> tuple[str, ...]:
    """What must be the same when a step is computed again, and is not. Without exactness only what was read must be."""
    names = ("loss", "weight", "gradient_norm", "digest", "reads") if exact else ("digest", "reads")
    return tuple(name for name in names if repr(getattr(before, name)) != repr(getattr(after, name)))  # NaN is NaN


def _open_span(*, first_step: int, batch: Mapping[str, int] | None, num_samples: int | None) -> Span:
    return Span(first_step=first_step, last_step=1 << 62, batch=batch, num_samples=num_samples)


def _merged(spans: list[Span]) -> list[Span]:
    """Neighbours with the same order of samples as one."""
    merged: list[Span] = []
    for span in spans:
        same = merged and (merged[-1].batch, merged[-1].num_samples, merged[-1].skipped) == (
            span.batch,
            span.num_samples,
            span.skipped,
        )
        if same and merged[-1].last_step + 1 == span.first_step:
            merged[-1] = replace(merged[-1], last_step=span.last_step)
        else:
            merged.append(span)
    return merged


def _step_record(entry: Entry, at: float) -> StepRecord:
    low, high = entry["digest"]
    return StepRecord(
        step=int(entry["step"]),
        generation=int(entry["generation"]),
        workers=int(entry["workers"]),
        loss=float(entry["loss"]),  # "nan" and "inf" are written as text
        weight=float(entry["weight"]),
        gradient_norm=float(entry["gradient_norm"]),
        lr=float(entry["lr"]),
        digest=(int(low, 16), int(high, 16)),
        reads=int(entry["reads"]),
        seconds=_numbers(entry.get("seconds", {})),
        metrics=_numbers(entry.get("metrics", {})),
        evaluation=_numbers(entry.get("evaluation", {})),
        at=at,
    )


def _numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in fields.items()}


def _recovery(entry: Entry, at: float) -> Recovery:
    return Recovery(
        lost=tuple(entry["lost"]),
        reasons=tuple(entry["reasons"]),
        workers_before=int(entry["workers_before"]),
        workers_after=int(entry["workers_after"]),
        found_at=float(entry["found_at"]),
        abort_s=float(entry["abort_s"]),
        reshard_s=float(entry["reshard_s"]),
        first_step_s=float(entry["first_step_s"]),
        total_s=float(entry["total_s"]),
        steps_redone=int(entry["steps_redone"]),
        source=str(entry["source"]),
        resumed_after_step=int(entry["resumed_after_step"]),
        at=at,
    )


def _avoided_node(entry: Entry, at: float) -> AvoidedNode:
    return AvoidedNode(
        node=str(entry["node"]),
        host=str(entry.get("host", "")),
        step=int(entry["step"]),
        failures=int(entry["failures"]),
        reasons=tuple(map(str, entry["reasons"])),
        at=at,
    )


def _checkpoint(entry: Entry, at: float) -> CheckpointRecord:
    late = entry["kind"] == "checkpoint_late"
    return CheckpointRecord(
        step=int(entry["step"]),
        prefix=str(entry.get("prefix", "")),
        fingerprint=str(entry.get("fingerprint", "")),
        problem=_why_late(entry) if late else str(entry.get("error", entry.get("reason", ""))),
        at=at,
        size_bytes=entry.get("bytes"),
        num_files=entry.get("files"),
        seconds=float(entry.get("seconds", math.nan)),
        retries=int(entry.get("retries", 0)),
        late=late,
    )


def _why_late(entry: Entry) -> str:
    which = f"the one of step {entry['writing']}" if "writing" in entry else "the one before"
    return f"left out: {which} was still being written"
