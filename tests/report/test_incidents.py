"""The incidents of a run, in sentences."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import raysharded as rs
from raysharded.actors.model.build import check_exactness
from raysharded.checkpoint import open_storage
from raysharded.errors import InexactError
from raysharded.journal.entry_text import incident_text
from raysharded.report.history.incidents import Incident, costliest
from raysharded.report.history.summary import summarise
from raysharded.report.recent import read_recent
from tests.report.entries import (
    Entry,
    avoided,
    checkpoint,
    data,
    failed_save,
    failing,
    generation,
    lost,
    recovery,
    run_with_a_loss,
    started,
    step,
    with_times,
    write_run,
)

JOURNALS = Path(__file__).parent / "journals"


def told(entries: list[Entry]) -> list[Incident]:
    return list(summarise(with_times(entries)).incidents)


def recorded(name: str) -> list[Incident]:
    lines = (JOURNALS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return list(summarise(map(json.loads, lines)).incidents)


def costs(incident: Incident) -> dict[str, float]:
    return {cost.name: round(cost.seconds, 6) for cost in incident.costs if cost.seconds}


def test_a_loss_is_one_sentence_with_every_part_of_its_cost() -> None:
    loss, joined = told(run_with_a_loss())
    assert loss.text == (
        "Worker 1 was lost in step 3 (the process died); 2 workers of 3 went on with step 3, the state from memory, "
        "and 1 step had to be computed again: 11 s (found 9.30 s, stopped 50 ms, formed 0.25 s, computed again "
        "1.00 s)."
    )
    assert costs(loss) == {"found": 9.3, "stopped": 0.05, "formed": 0.25, "computed again": 1.0}
    assert joined.text.startswith("Worker 3 joined before step 5, 2 to 3 workers, with no step computed again: ")
    assert (loss.kind, loss.step, joined.kind, joined.step) == ("recovery", 3, "reshard", 5)


def test_the_wait_for_a_replacement_is_a_part_of_its_own() -> None:
    waited = recovery(1, 2, steps_redone=1, wait_s=6.0, total_s=6.7)
    loss, _ = told([waited if entry[0] == "recovery" else entry for entry in run_with_a_loss()])
    assert costs(loss)["waited for workers"] == 6.0
    assert costs(loss)["formed"] == 0.25
    assert "stopped 50 ms, waited for workers 6.00 s, formed 0.25 s" in loss.text
    assert incident_text(*waited) == (
        "step 3: recovered in 6.70 s, 3 to 2 workers: aborted 0.05 s, waited for workers 6.00 s, resharded 0.25 s, "
        "first step 0.40 s; 1 step computed again, state from memory"
    )


def test_a_loss_has_one_step_number_in_the_line_the_incident_and_the_table() -> None:
    entries = run_with_a_loss()
    loss, _ = told(entries)
    event = summarise(with_times(entries)).worker_events[0]
    assert incident_text(*lost(1, 3)) == "worker 1 lost: the process died"  # when it is not known yet what is complete
    assert str(incident_text(*recovery(1, 2, steps_redone=1))).startswith("step 3: recovered in ")
    assert loss.text.startswith("Worker 1 was lost in step 3")
    assert loss.step == event.step == 3


def died(worker: int, in_step: int) -> Entry:
    cause = {"cause": "was ended by SIGKILL", "status": None, "signal": 9, "out_of_memory": False}
    where = {"step": in_step, "phase": "apply", "microbatch": None, "samples": []}
    return "worker_died", {"worker": worker, "node": "n", **where, **cause, "stderr": [], "stderr_file": ""}


@pytest.mark.parametrize(
    ("newest", "late", "complete", "death", "step_of_the_loss"),
    [
        (5, [], 5, None, 6),
        (5, [6], 5, None, 6),  # another worker finished step 6, and the lost one did not
        (5, [6], 6, None, 7),
        (6, [], 5, None, 6),
        (6, [], 5, 6, 6),
        (6, [], 5, 7, 7),  # before the others had the lost one's part of step 6
    ],
)
@pytest.mark.parametrize("explained", ["at once", "behind the recovery"])
def test_a_loss_has_the_step_that_its_worker_computed_and_a_recovery_the_next(
    newest: int, late: list[int], complete: int, death: int | None, step_of_the_loss: int, explained: str
) -> None:
    entries = [started(max_steps=9), *generation(1, [0, 1], 0), *map(step, range(1, newest + 1)), lost(1, newest)]
    found = [died(1, death)] if death is not None else []
    entries += found if explained == "at once" else []
    entries += [*map(step, late), *generation(2, [0], complete), step(complete + 1, 1, 2)]
    over = recovery(1, complete, steps_redone=len([*range(newest), *late]) - complete, total_s=7.0)
    entries += [over, *(found if explained != "at once" else [])]
    summary = summarise(with_times(entries))
    (loss,) = [one for one in summary.incidents if one.kind == "recovery"]
    (event,) = [one for one in summary.worker_events if one.what == "lost"]
    assert (loss.step, event.step) == (step_of_the_loss, step_of_the_loss)
    assert loss.text.startswith(f"Worker 1 was lost in step {step_of_the_loss} (")
    assert f" went on with step {complete + 1}, the state from memory, " in loss.text
    assert str(incident_text(*over)).startswith(f"step {complete + 1}: recovered ")
    own = [one.step for one in summary.incidents if one.text.startswith("Worker 1 on n was ended by SIGKILL")]
    assert own == ([death] if found and explained != "at once" else [])  # else the recovery has it


def test_a_loss_after_the_last_step_is_one_in_the_last_step() -> None:
    entries = [
        started(max_steps=3),
        *generation(1, [0, 1], 0),
        step(1),
        step(2),
        step(3),
        lost(1, 3),
    ]
    (alone,) = told(entries)
    assert alone.step == 3
    entries += generation(2, [0], 2)
    (found,) = told([*entries, step(3, 1, 2), recovery(1, 2, steps_redone=1)])
    assert found.text.startswith("Worker 1 was lost in step 3 ")
    assert found.step == 3


def test_what_is_stuck_and_then_lost_has_the_step_of_its_own_reason() -> None:
    lines = map(json.loads, (JOURNALS / "losses.jsonl").read_text(encoding="utf-8").splitlines())
    stuck, gone = (entry for entry in lines if entry.get("worker") == 2 and entry["kind"] in ("stuck", "worker_lost"))
    reason = "did not answer while training, 2.2 s into step 4: stopped or cut off"
    native = "or native code holds Python's lock (the GIL)"
    assert incident_text("stuck", stuck) == f"step 4: worker 2 on vm: {reason}, {native}"
    assert incident_text("worker_lost", gone) == f"worker 2 lost: {reason}"


def test_the_losses_of_a_run_that_took_place() -> None:
    kill, stop, save, broken = recorded("losses")
    assert kill.text == (
        "Worker 1 was lost in step 2 (process 31294 ended with exit code -9); 2 workers of 3 went on with step 2, "
        "the state from memory, and no step had to be computed again: 0.15 s (found 55 ms, stopped 3 ms, formed 18 ms, "
        "built 43 ms, moved 28 ms for 63.4 KiB)."
    )
    assert costs(stop)["found"] == pytest.approx(2.206, abs=0.01)  # the deadline of 2 s, and a look
    assert "Worker 2 was lost in step 4 (did not answer while training, 2.2 s into step 4" in stop.text
    assert (save.kind, save.text) == (
        "checkpoint",
        "Checkpoint not written: worker 2 was lost before it had written its part.",
    )
    assert broken.text.startswith("Step 7 was broken off, with no worker lost; 2 workers went on with step 7, ")


def test_a_driver_that_follows_another_is_reported_with_why_and_the_time_without_one() -> None:
    resumed, taken = recorded("two_drivers")
    assert (resumed.kind, taken.kind) == ("resumed", "driver")
    assert "its process is gone" in resumed.text
    assert costs(resumed) == {
        "without a driver": pytest.approx(0.18, abs=0.01),
        "started": pytest.approx(0.153, abs=0.01),
    }


def test_steps_that_a_second_driver_repeats_are_part_of_what_it_cost() -> None:
    first = [started(), data(), *generation(1, [0], 0), step(1), step(2), checkpoint(1)]
    second = [started(1), *generation(2, [0], 1, "checkpoint"), step(2, 1, 2)]
    (resumed,) = told([*first, *second])
    assert costs(resumed)["computed again"] == 1.0
    assert "went on with step 2, the state from a checkpoint" in resumed.text


def test_the_contents_of_a_recovery_are_not_reported_twice() -> None:
    stuck: Entry = ("stuck", {"worker": 1, "step": 1, "phase": "x", "reason": "the process died"})
    entries = [started(), *generation(1, [0, 1], 0), step(1), stuck, lost(1, 1), lost(7, 1), *generation(2, [0], 1)]
    found = told([*entries, step(2, 1, 2), recovery(1, 1, total_s=9.0)])
    assert [incident.kind for incident in found] == ["recovery", "worker"]  # a worker that was no member was lost, too
    assert "worker 7" in found[1].text.lower()


def test_a_loss_is_told_once_though_a_step_that_was_done_before_is_reported_after_it() -> None:
    entries = [started(), *generation(1, [0, 1], 0), step(1), lost(1, 1), step(2), *generation(2, [0], 2)]
    (found,) = told([*entries, step(3, 1, 2), recovery(1, 2, total_s=5.0)])
    assert (found.kind, found.step) == ("recovery", 3)


WAITING: Entry = ("waiting", {"ready": 1, "needed": 2, "missing": "Each worker needs 1 GPU."})
SLOW: Entry = ("waiting", {"ready": 1, "needed": 2, "missing": ""})


def test_a_slow_start_is_no_incident_and_a_shortage_is_one_however_often_it_is_said() -> None:
    rest = [*generation(1, [0, 1], 0), step(1)]
    assert told([started(), SLOW, SLOW, *rest]) == []
    (short,) = told([started(), WAITING, WAITING, WAITING, *rest])
    assert (short.kind, short.text) == ("waiting", "1 worker ready, at least 2 needed. Each worker needs 1 GPU.")
    later = ("waiting", {"ready": 0, "needed": 2, "missing": "Each worker needs 1 GPU."})
    assert len(told([started(), WAITING, later, WAITING, *rest])) == 3


@pytest.mark.parametrize(("after", "kinds"), [([0, 1], []), ([0, 1, 2], ["reshard"])])
def test_a_pause_is_no_incident_and_a_change_of_the_workers_in_it_is_one(after: list[int], kinds: list[str]) -> None:
    pause: list[Entry] = [("pause", {"step": 1}), ("paused", {"step": 1, "workers": [0, 1]})]
    resume: Entry = ("resume", {"step": 1, "seconds": 5.0})
    entries = [started(), *generation(1, [0, 1], 0), step(1), *pause, resume, *generation(2, after, 1), step(2, 2, 2)]
    assert [incident.kind for incident in told(entries)] == kinds


def test_a_reason_that_another_one_repeats_is_reported_once() -> None:
    entries = [started(), *generation(1, [0, 1], 0), step(1), *generation(2, [0], 1), step(2, 1, 2)]
    reasons = ["step 2 is wrong", "computed wrong numbers: step 2 is wrong.", "computed wrong numbers: step 2 is wrong"]
    (found,) = told([*entries, recovery(1, 1, reasons=reasons)])
    assert found.text.startswith("Worker 1 was lost in step 2 (computed wrong numbers: step 2 is wrong); ")


def test_a_loss_that_was_never_recovered_from_is_reported_all_the_same() -> None:
    entries = [started(), *generation(1, [0, 1], 0), step(1), lost(1, 1)]
    failed: Entry = ("failed", {"step": 1, "fingerprint": None, "error": "ClusterError: too few"})
    assert [incident.text for incident in told([*entries, failed])] == [
        "Worker 1 lost: the process died.",
        "The run failed: ClusterError: too few.",
    ]


def test_an_error_ends_with_its_remedy_and_one_that_is_too_long_with_a_sentence() -> None:
    with pytest.raises(InexactError) as raised:
        check_exactness(torch.nn.BatchNorm1d(3), rs.EngineConfig())
    error = f"InexactError: building the model on worker 0: {raised.value}"
    started_ = [started(), *generation(1, [0, 1], 0)]
    for kind, who in (("start_failed", "worker"), ("worker_refused", "worker")):
        (one,) = told([*started_, (kind, {"worker": 0, "node": "n", "reason": error})])
        assert one.text.endswith('results without identical bits with EngineConfig(reduction="fast").')
        assert one.kind == who
    ended = ("failed", {"step": 0, "fingerprint": None, "error": error})
    assert told([*started_, ended])[-1].text == f"The run failed: {error}"
    long = ("failed", {"step": 0, "fingerprint": None, "error": f"One is. {'Two is. ' * 100}{'three ' * 100}."})
    assert told([*started_, long])[-1].text.endswith("Two is. Two is.")
    (lost_one,) = told([*started_, step(1), *generation(2, [0], 1), step(2, 1, 2), recovery(1, 1, reasons=[error])])
    assert "which samples); 2 workers of 3" in lost_one.text


def test_two_losses_before_the_first_step_are_one_recovery() -> None:
    entries = [started(), *generation(1, [0, 1, 2], 0), step(1), lost(1, 1), *generation(2, [0, 2], 1), lost(2, 1)]
    both = recovery(1, 1, lost=[1, 2], reasons=["a", "b"], workers_before=3, workers_after=1)
    (found,) = told([*entries, *generation(3, [0], 1), step(2, 1, 3), both])
    assert found.text.startswith("Workers 1 and 2 were lost in step 2 (a; b); 1 worker of 3 went on")


def test_other_events_are_reported_in_the_words_of_the_live_view() -> None:
    entries = [started(), *generation(1, [0, 1], 0), step(1), avoided(1), failed_save(1)]
    node, save = told(entries)
    assert node.text == "Node trainer-7 (4f6ad2aa) is avoided after 3 failures; the last: died again."
    assert save.text == "Checkpoint not written: disk full."


def test_checkpoints_that_fail_in_a_row_are_one_incident_and_the_next_row_another(tmp_path: Path) -> None:
    entries = [started(), data(), *generation(1, [0, 1], 0), step(1), failed_save(1), step(2), failed_save(2)]
    entries += [step(3), failed_save(3), failing(3, newest=0), step(4), failed_save(4), failing(4, newest=0, failed=4)]
    row = "4 checkpoints in a row, of steps 1 to 4, could not be written: NO CHECKPOINT AT ALL; the last: disk full."
    assert [incident.text for incident in told(entries)] == [row]
    twice = [*entries, checkpoint(5), failed_save(6), failed_save(6)]
    assert (
        told(twice)[-1].text == "The checkpoint of step 6 could not be written, 2 times in a row; the last: disk full."
    )
    entries += [step(5), checkpoint(5), step(6), failed_save(6)]
    texts = [row, "Checkpoint not written: disk full."]
    assert [(incident.step, incident.text) for incident in told(entries)] == [(4, texts[0]), (6, texts[1])]
    storage = open_storage(write_run(tmp_path, entries))
    assert [text for _, text in read_recent(storage).incidents] == [row, "step 6: checkpoint not written: disk full"]


def test_an_entry_with_too_few_fields_is_passed_over_and_the_rest_is_reported() -> None:
    old: Entry = ("worker_leaving", {"worker": 0, "reason": "drained"})
    entries = [started(), *generation(1, [0, 1], 0), step(1), old, failed_save(1), step(2)]
    summary = summarise(with_times(entries))
    assert [incident.kind for incident in summary.incidents] == ["checkpoint"]
    assert summary.last_step == 2


def test_of_many_the_costliest_stay_and_of_those_without_a_cost_the_newest() -> None:
    free = [Incident(kind="worker", at_s=float(at), step=0, text="x") for at in range(5)]
    (loss, _) = told(run_with_a_loss())
    assert costliest([free[0], loss, *free[1:]], 3) == [1, 4, 5]
