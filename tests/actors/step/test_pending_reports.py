"""The reports of workers on their steps when a generation ends."""

from __future__ import annotations

from raysharded.actors.step.pending_reports import Reports
from raysharded.actors.task_calls.remarks import Notes
from raysharded.actors.telemetry.phases import Phases
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import FromStart, GenerationSpec
from tests.driver.simulated_workers import report_of


def test_a_few_report_all_that_the_driver_can_have_missed_and_thousands_report_little() -> None:
    generation = GenerationId(1)
    spec = GenerationSpec(
        generation=generation, members=(WorkerId(0),), source=FromStart(), host="host", port=1, prefix="run"
    )
    reports = Reports(generation, 10_000, Phases(generation, lambda: False), Notes())
    reports.recent.extend(report_of(spec, step, 0.0) for step in range(1, 301))
    told = {rank: [report.step for report in reports.when_stopped(rank)] for rank in range(10_000)}
    assert told[0] == told[7] == list(range(173, 301))
    assert told[8] == told[9_999] == list(range(293, 301))
    assert sum(map(len, told.values())) < 100_000
