"""Numbers that went wrong, from the journal: the valid steps, the read samples, and the report for people."""

from __future__ import annotations

from io import StringIO
from typing import Any

from rich.console import Console

from raysharded.data.ledger import expected_digest
from raysharded.journal.entry_text import incident_text
from raysharded.journal.records import Audits
from raysharded.report import RunReport, check_ledger
from raysharded.report.history.summary import summarise
from raysharded.report.history.tables import run_table
from tests.report.entries import BATCH, NUM_SAMPLES, Entry, checkpoint, data, generation, started, step, with_times

SKIPPED = 8


def rewind() -> Entry:
    """From step 4 to 2, past the data of two steps."""
    fields = {"step": 4, "to_step": 2, "skip_samples": SKIPPED, "skips": [[2, SKIPPED]], "reason": "step 4: nan"}
    return "rewind", fields


def corruption() -> Entry:
    fields: dict[str, Any] = {"step": 4, "what": "gradient", "workers": [0, 1, 2], "culprits": [1]}
    return "corruption", {**fields, "microbatches": [0, 3], "verified_step": 2, "distrusted": []}


def skipped_data(number: int, gen: int) -> Entry:
    low, high = expected_digest(number, BATCH, NUM_SAMPLES, SKIPPED)
    return step(number, gen=gen, digest=[f"{low:016x}", f"{high:016x}"], loss=9.0)


def test_after_a_rewind_the_ledger_expects_the_data_after_what_was_passed_over() -> None:
    first = [started(), data(), *generation(1, [0, 1], 0), step(1), step(2), step(3)]
    again = [rewind(), *generation(2, [0, 1], 2, "checkpoint"), *(skipped_data(number, 2) for number in (3, 4, 5, 6))]
    summary = summarise(with_times([*first, *again]))
    assert summary.differences == ()  # other data: another loss
    assert [(span.first_step, span.last_step, span.skipped) for span in summary.spans] == [(1, 2, 0), (3, 6, SKIPPED)]
    ledger = check_ledger(summary)
    assert ledger is not None
    assert ledger.ok
    assert [(one.step, one.to_step, one.samples) for one in summary.rewinds] == [(4, 2, SKIPPED)]


def test_a_resumed_driver_reports_what_was_passed_over_and_one_that_forgets_is_found() -> None:
    first = [started(), data(), *generation(1, [0, 1], 0), step(1), step(2), step(3)]
    again = [rewind(), *generation(2, [0, 1], 2, "checkpoint"), skipped_data(3, 2)]
    resumed = [started(3, skips=[[2, SKIPPED]]), data(), *generation(3, [2], 3, "checkpoint")]
    for last, good in ((skipped_data(4, 3), True), (step(4, gen=3), False)):
        ledger = check_ledger(summarise(with_times([*first, *again, *resumed, last])))
        assert ledger is not None
        assert ledger.ok is good


def test_steps_that_are_computed_again_after_wrong_numbers_may_differ() -> None:
    first = [started(), data(), *generation(1, [0, 1, 2], 0), step(1), step(2), step(3, loss=99.0)]
    again = [corruption(), *generation(2, [0, 2], 2, "checkpoint"), step(3, gen=2), step(4, gen=2)]
    summary = summarise(with_times([*first, *again]))
    assert summary.differences == ()
    (found,) = summary.corruptions
    assert (found.culprits, found.verified_step, found.microbatches) == ((1,), 2, (0, 3))


def test_audits_and_steps_left_out_are_summed_up_and_shown() -> None:
    left_out = {"step": 2, "what": "loss", "loss": "nan", "microbatches": [1]}
    audit = {"step": 2, "seconds": 0.5, "workers": 2, "ok": True}
    entries = [started(), data(), *generation(1, [0, 1], 0), step(1), step(2), ("step_skipped", left_out)]
    summary = summarise(with_times([*entries, ("audit", audit), corruption()]))
    assert summary.audits == Audits(count=1, seconds=0.5, newest=2)
    assert [skipped.step for skipped in summary.skipped_steps] == [2]
    console = Console(file=StringIO(), width=200)
    console.print(run_table(summary))
    assert isinstance(console.file, StringIO)
    shown = console.file.getvalue()
    for text in (
        "step 2: a loss or gradient",
        "1 step computed twice with the same bits",
        "gradient of step 4 on worker 1",
    ):
        assert text in shown
    assert incident_text("step_skipped", left_out) == "step 2: left out: the loss is not finite (microbatch 1)"
    assert incident_text(*rewind()) == "step 4: not finite: back to step 2, and on past 8 samples"
    line = incident_text(*corruption())
    assert line is not None
    assert "WRONG NUMBERS" in line
    assert "worker 1 (microbatches 0, 3); the newest verified step is 2" in line


def test_steps_that_somebody_took_back_are_neither_lost_nor_repeated_and_may_come_out_otherwise() -> None:
    rate = {"step": 3, "factor": 0.5, "from_step": 4}
    asked: dict[str, Any] = {"step": 5, "to_step": 2, "skip_samples": 0, "skips": [], "learning_rate": []}
    asked |= {"reason": "asked for", "who": "asked", "generation": 2, "distrusted": [checkpoint(4)[1]["prefix"]]}
    decided, formed = generation(3, [0, 1], 2, "checkpoint")
    entries = [
        *[started(), data(), *generation(1, [0, 1], 0), step(1), step(2), checkpoint(2), step(3)],
        *[generation(2, [0, 1], 3)[0], ("learning_rate", rate), generation(2, [0, 1], 3)[1]],
        *[step(4, gen=2, lr=0.05), checkpoint(4), step(5, gen=2, lr=0.05)],
        *[decided, ("rewind", asked), formed, *(step(number, gen=3, loss=7.0) for number in (3, 4, 5, 6))],
    ]
    summary = summarise(with_times(entries))
    assert [record.step for record in summary.steps] == [1, 2, 3, 4, 5, 6]
    assert summary.differences == ()
    assert list(summary.track.undone) == [0, 0, 1, 1, 1, 0, 0, 0, 0]
    assert summary.times.parts["lost"] == 0
    assert summary.times.parts["undone"] > 0
    assert [record.step for record in summary.committed] == [2]
    ledger = check_ledger(summary)
    assert ledger is not None
    assert ledger.ok
    assert [incident.kind for incident in summary.incidents if incident.kind == "asked"] == ["asked", "asked"]
    assert [incident.kind for incident in summary.incidents if incident.kind == "numbers"] == []
    assert incident_text("rewind", asked) == "step 5: back to step 2, as was asked for"
    assert incident_text("learning_rate", rate) == (
        "step 3: 0.5 times the task's learning rate from step 4 on, as was asked for"
    )


def test_a_generation_that_was_to_go_back_and_did_not_changes_nothing() -> None:
    entries = [
        *[started(), data(), *generation(1, [0, 1], 0), step(1), step(2), step(3)],
        *[
            generation(2, [0, 1], 1, "checkpoint")[0],
            ("rewind_refused", {"step": 3, "to_step": 1, "reason": "damaged"}),
        ],
        *[*generation(3, [0, 1], 3), step(4, gen=3)],
    ]
    summary = summarise(with_times(entries))
    assert [record.step for record in summary.steps] == [1, 2, 3, 4]
    assert summary.times.parts["lost"] == summary.times.parts["undone"] == 0


def test_from_the_step_on_from_which_other_bits_were_accepted_steps_may_differ_and_the_report_names_it() -> None:
    entry: dict[str, Any] = {"step": 2, "from_step": 3, "changes": {"torch": ["2.12.0", "2.13.0"], "order": ["1", "9"]}}
    entry["arithmetic"] = {"torch": "2.13.0", "numerics": "order 9"}
    entries = [
        *[started(numerics="order 1"), data(), *generation(1, [0, 1], 0), step(1), step(2), step(3), step(4)],
        *[started(2, numerics="order 9"), ("arithmetic", entry), *generation(2, [0, 1], 2, "checkpoint")],
        *[step(3, gen=2, loss=7.0), step(4, gen=2, loss=7.0)],
    ]
    summary = summarise(with_times(entries))
    assert summary.differences == ()
    assert [(span.first_step, span.last_step, span.order) for span in summary.spans] == [(1, 2, 1), (3, 4, 9)]
    assert check_ledger(summary) is None, "this version has no order 9"
    (change,) = summary.arithmetic_changes
    assert (change.from_step, change.changes["torch"]) == (3, ("2.12.0", "2.13.0"))
    said = "order: 1 -> 9, torch: 2.12.0 -> 2.13.0"
    assert incident_text("arithmetic", entry) == f"from step 3 on: other bits, as was accepted: {said}"
    console = Console(file=StringIO(), width=200, color_system=None)
    console.print(run_table(summary))
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert f"from step 3 on, as was accepted: {said}" in printed
    report = RunReport(url="/runs/tiny", summary=summary, ledger=None)
    assert report.as_dict()["arithmetic_changes"] == [
        {"from_step": 3, "changes": {"torch": ["2.12.0", "2.13.0"], "order": ["1", "9"]}, "at": change.at}
    ]
    assert (
        "From step 3 on: other bits, as was accepted: order: 1 -&gt; 9, torch: 2.12.0 -&gt; 2.13.0." in report.as_html()
    )


def test_without_acceptance_a_step_that_comes_out_otherwise_is_found() -> None:
    entries = [started(), data(), *generation(1, [0, 1], 0), step(1), step(2), step(3)]
    entries += [started(2), *generation(2, [0, 1], 2, "checkpoint"), step(3, gen=2, loss=7.0)]
    assert [difference.step for difference in summarise(with_times(entries)).differences] == [3]


def test_after_a_rewind_the_report_shows_that_other_bits_begin_where_they_are_computed() -> None:
    entry = {"step": 3, "from_step": 4, "changes": {"torch": ["a", "b"]}, "arithmetic": {"torch": "b", "numerics": ""}}
    first = [started(), data(), *generation(1, [0, 1], 0), step(1), step(2), step(3), ("arithmetic", entry)]
    (before,) = summarise(with_times(first)).arithmetic_changes
    (after,) = summarise(with_times([*first, rewind()])).arithmetic_changes
    assert (before.from_step, after.from_step) == (4, 3)  # step 3 is computed anew, with what was accepted


def test_a_proof_that_failed_is_reported_with_the_node_and_takes_nothing_back() -> None:
    failed = {
        "step": 4,
        "what": "gradient",
        "workers": [0, 2],
        "culprits": [2],
        "microbatches": [1],
        "nodes": ["node-a", "node-b (GPU 3)"],
    }
    steps = [started(), data(), *generation(1, [0, 2], 0), step(1), step(2), step(3)]
    summary = summarise(with_times([*steps, ("proof_failed", failed)]))
    (found,) = summary.corruptions
    assert (found.step, found.culprits, found.verified_step) == (4, (2,), 3)
    assert len(summary.steps) == 3
    text = incident_text("proof_failed", failed)
    assert text is not None
    assert "on worker 2 on node-b (GPU 3) (microbatch 1)" in text
