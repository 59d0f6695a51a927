"""The reports of workers on their steps when a generation ends."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest

from raysharded.actors.step import pending_reports
from raysharded.actors.step.pending_reports import Reports, add_newest
from raysharded.actors.task_calls.remarks import Notes
from raysharded.actors.telemetry.phases import Phases
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import FromStart, GenerationSpec
from tests.driver.simulated_workers import report_of

SPEC = GenerationSpec(
    generation=GenerationId(1), members=(WorkerId(0),), source=FromStart(), host="host", port=1, prefix="run"
)


def test_a_few_report_all_that_the_driver_can_have_missed_and_thousands_report_little() -> None:
    generation = SPEC.generation
    reports = Reports(generation, 10_000, Phases(generation, lambda: False), Notes())
    reports.recent.extend(report_of(SPEC, step, 0.0) for step in range(1, 301))
    told = {rank: [report.step for report in reports.when_stopped(rank)] for rank in range(10_000)}
    assert told[0] == told[7] == list(range(173, 301))
    assert told[8] == told[9_999] == list(range(293, 301))
    assert sum(map(len, told.values())) < 100_000


def test_older_reports_lose_their_microbatches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_reports, "_MICROBATCHES_KEPT", 10)
    reports = deque([report_of(SPEC, 1, 0.0)], maxlen=4)
    for step in range(2, 7):
        add_newest(reports, [replace(report_of(SPEC, step, 0.0), microbatches=((1.0, 2.0),) * 4)])
    assert [(report.step, len(report.microbatches)) for report in reports] == [(3, 0), (4, 0), (5, 4), (6, 4)]
    add_newest(reports, [replace(report_of(SPEC, step, 0.0), microbatches=((1.0, 2.0),) * 20) for step in (7, 8)])
    assert [(report.step, len(report.microbatches)) for report in reports] == [(5, 0), (6, 0), (7, 0), (8, 20)]
