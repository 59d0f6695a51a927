"""Reports of a worker's finished steps, kept until the driver has collected them."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Collection
from dataclasses import replace

from raysharded.actors.numerics.step_consensus import Agreed, Pair
from raysharded.actors.shards.saver import Decision
from raysharded.actors.task_calls.remarks import Notes
from raysharded.actors.telemetry import device_use
from raysharded.actors.telemetry.phases import Phases
from raysharded.ids import GenerationId
from raysharded.protocol.messages import NonFinite, StepReport

REPORTS_KEPT = 2048
"""Steps that may finish while the driver stands still or is lost, and that the next one can record in the journal."""
_TOLD_AT_THE_END = 128
"""Reports sent at the end: more than the driver, which polls constantly, can be behind."""
_TELLERS = 8
"""Number of ranks that send all of these. All workers know the same. The newest are enough from the others, in case
none of the first is left; otherwise thousands would send the driver a million reports."""
_TOLD_BY_OTHERS = 8
_MICROBATCHES_KEPT = 1 << 16
"""Microbatches that are recorded in kept reports, 8 MB of them; the newest report has its microbatches in any case."""


def add_newest(reports: deque[StepReport], newest: Collection[StepReport]) -> None:
    """Add the newest reports, in place, as waiting calls hold `reports`. Older ones lose their microbatches."""
    reports.extend(newest)
    if not any(report.microbatches for report in newest):
        return
    num_recorded = 0
    for place in range(len(reports) - 1, -1, -1):
        num_recorded += len(reports[place].microbatches)
        if num_recorded > _MICROBATCHES_KEPT and place < len(reports) - 1:
            reports[place] = replace(reports[place], microbatches=())


class Reports:
    """Reports of one generation. The training thread calls `add`; any thread the rest."""

    def __init__(self, generation: GenerationId, world_size: int, phases: Phases, notes: Notes) -> None:
        self._generation, self._world_size, self._phases, self._notes = generation, world_size, phases, notes
        self.recent: deque[StepReport] = deque(maxlen=REPORTS_KEPT)
        self.updated = threading.Condition()
        """Notified when a report is added."""

    def when_stopped(self, rank: int) -> tuple[StepReport, ...]:
        """The newest reports, as a worker of this rank sends them when its generation ends."""
        return tuple(self.recent)[-(_TOLD_AT_THE_END if rank < _TELLERS else _TOLD_BY_OTHERS) :]

    def add(
        self,
        step: int,
        agreed: Agreed,
        lr: float,
        evaluation: dict[str, float],
        save: Decision,
        skipped: NonFinite | None,
        audit_s: float | None,
        microbatches: tuple[Pair, ...],
    ) -> None:
        """Report a step as all workers agreed on it.

        `skipped`: why it was not applied. `audit_s`: seconds of its audit. `microbatches`: losses and weights, if they
        are recorded.
        """
        report = StepReport(
            generation=self._generation,
            step=step,
            world_size=self._world_size,
            loss=agreed.loss,
            weight=agreed.weight,
            metrics=agreed.averages(),
            evaluation=evaluation,
            gradient_norm=math.nan if skipped else agreed.gradient_norm / agreed.weight,
            lr=lr,
            read_digest=agreed.read_digest,
            num_reads=agreed.num_reads,
            seconds=self._phases.seconds,
            finished_at=time.time(),
            save_started=save.start,
            save_asked=save.asked,
            save_late=save.late,
            skipped=skipped,
            audit_s=audit_s,
            remarks=self._notes.take(),
            gpu=device_use.newest(),
            microbatches=microbatches,
        )
        with self.updated:
            add_newest(self.recent, [report])
            self.updated.notify_all()
