"""A whole run, according to its journal: one frozen value. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from raysharded.journal.records import (
    ArithmeticChange,
    Audits,
    AvoidedNode,
    CheckpointRecord,
    Corruption,
    Difference,
    GenerationRecord,
    Recovery,
    Rewind,
    SkippedStep,
    Span,
    WorkerEvent,
)
from raysharded.report.history.incidents import Incident
from raysharded.report.history.step_table import Steps
from raysharded.report.history.wall_time import Times, Track

_AT_ONCE = 1 << 16
Status = Literal["finished", "failed", "stopped", "unfinished"]
"""unfinished: the newest driver is still at work, or exited without a final entry."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """All information about a run in its journal."""

    run: str
    status: Status
    error: str
    """The cause of failure; empty otherwise."""
    fingerprint: str
    """Fingerprint of the final state; empty unless the run finished."""
    max_steps: int | None
    last_step: int
    """The newest step that was not lost."""
    exact: bool
    """Whether the run promises the same bits."""
    starts: int
    """Drivers that have worked on the run: 1, and one more for each resume."""
    versions: Mapping[str, str]
    steps: Steps
    """The steps that count, in order."""
    generations: tuple[GenerationRecord, ...]
    recoveries: tuple[Recovery, ...]
    worker_events: tuple[WorkerEvent, ...]
    avoided_nodes: tuple[AvoidedNode, ...]
    checkpoints: tuple[CheckpointRecord, ...]
    """Checkpoints, including failed and skipped ones."""
    failed_saves: int
    """Checkpoints that could not be written since the newest one that was."""
    failing: bool
    """Whether the failed saves are so many that the run reported it."""
    entries_dropped: int
    """Entries that were dropped because storage took none for too long."""
    differences: tuple[Difference, ...]
    """Steps computed again with a different result: empty if the promise holds."""
    spans: tuple[Span, ...]
    skipped_steps: tuple[SkippedStep, ...]
    rewinds: tuple[Rewind, ...]
    arithmetic_changes: tuple[ArithmeticChange, ...]
    audits: Audits
    corruptions: tuple[Corruption, ...]
    first_at: float
    last_at: float
    """Wall clock of the oldest and the newest entry."""
    times: Times
    """Division of the time between these two entries."""
    track: Track
    """Every step, including lost ones, in order of time."""
    incidents: tuple[Incident, ...]
    """The run's incidents, in order of time."""
    starting_cpu_s: float
    """CPU seconds that all workers took to start, mostly for imports. On shared cores they slow down the other
    workers."""

    @property
    def preemptions(self) -> int:
        """Workers that left with notice; they are not losses."""
        return sum(event.what == "leaving" for event in self.worker_events)

    @property
    def workers_by_step(self) -> dict[int, int]:
        """Step -> the number of workers that computed it."""
        return dict(zip(self.steps.whole("step").tolist(), self.steps.whole("workers").tolist(), strict=True))

    @property
    def evaluated(self) -> Steps:
        """The steps with an evaluation."""
        return self.steps.with_any("evaluation")

    @property
    def elapsed_s(self) -> float:
        """Seconds that drivers were at work, without requested pauses."""
        return self.times.at_work_s

    @property
    def goodput(self) -> float:
        """The share of the time at work that was spent on steps that count; NaN before the first."""
        return self.times.goodput if self.steps else math.nan

    @property
    def unit(self) -> Literal["tokens", "samples"]:
        """The items that the loss is averaged over: samples, unless a step had more of them than samples."""
        has_more = (self.steps.real("weight") > self.steps.whole("reads")).any()
        return "tokens" if has_more else "samples"

    @property
    def weight(self) -> float:
        """The sum of the loss's weights: the number of `unit` trained on."""
        weights = self.steps.real("weight")
        parts = (weights[first : first + _AT_ONCE].tolist() for first in range(0, len(weights), _AT_ONCE))
        return math.fsum(chain.from_iterable(parts))

    @property
    def weight_per_s(self) -> float:
        """`weight` per second at work, including starts and recoveries; NaN without a time."""
        return self.weight / self.elapsed_s if self.elapsed_s > 0 else math.nan

    @property
    def slowest(self) -> WorkerEvent | None:
        """The worker that was most recently found to be slower than its peers."""
        return next((event for event in reversed(self.worker_events) if event.what == "slow"), None)

    @property
    def committed(self) -> tuple[CheckpointRecord, ...]:
        """The checkpoints that were written; older ones may have been deleted since."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.prefix)

    @property
    def late(self) -> tuple[CheckpointRecord, ...]:
        """Checkpoints skipped because the previous one was still being written."""
        return tuple(checkpoint for checkpoint in self.checkpoints if checkpoint.late)
