"""A journal's entries as one value."""

from __future__ import annotations

import math

import pytest

from raysharded.journal.records import Difference
from raysharded.report.history.summary import summarise
from tests.report.entries import (
    checkpoint,
    data,
    failed_save,
    failing,
    finished,
    generation,
    late,
    lost,
    recovery,
    run_with_a_loss,
    started,
    step,
    with_times,
)


def test_a_run_with_a_loss_and_a_join_is_reported_in_full() -> None:
    summary = summarise(with_times(run_with_a_loss()))
    assert (summary.run, summary.status, summary.last_step, summary.max_steps) == ("tiny", "finished", 6, 6)
    assert summary.fingerprint == "f" * 32
    assert summary.workers_by_step == {1: 3, 2: 3, 3: 2, 4: 2, 5: 3, 6: 3}
    assert [(event.what, event.worker, event.step) for event in summary.worker_events] == [
        ("lost", 1, 3),
        ("joined", 3, 5),
    ]
    assert [(r.lost, r.total_s, r.steps_redone, r.source) for r in summary.recoveries] == [((1,), 0.7, 1, "memory")]
    assert [record.step for record in summary.committed] == [3, 6]
    assert summary.differences == ()
    assert summary.steps[4].evaluation == {"loss": 1.5}
    assert [g.members for g in summary.generations if g.formed_at is not None] == [(0, 1, 2), (0, 2), (0, 2, 3)]


def test_the_last_entry_of_a_step_counts_and_time_that_was_lost_is_distinguished() -> None:
    summary = summarise(with_times(run_with_a_loss()))
    assert [record.generation for record in summary.steps] == [1, 1, 2, 2, 3, 3]
    assert [
        record.step for record, counts in zip(summary.track.records, summary.track.counts, strict=True) if not counts
    ] == [3]
    assert summary.starting_cpu_s == 2.5
    assert summary.elapsed_s == 2.0 * (len(run_with_a_loss()) - 1)
    assert summary.goodput == pytest.approx(summary.times.seconds("computing") / summary.elapsed_s)
    assert summary.weight == 6 * 32
    assert summary.weight_per_s == 6 * 32 / summary.elapsed_s


def test_steps_that_were_lost_count_again_when_a_checkpoint_of_them_became_real_meanwhile() -> None:
    entries = [started(), data(), *generation(1, [0], 0), step(1), step(2), *generation(2, [1], 0), checkpoint(2)]
    lost_so_far = summarise(with_times(entries))
    assert (len(lost_so_far.steps), lost_so_far.times.parts["computing"]) == (0, 0)
    summary = summarise(with_times([*entries, *generation(3, [2], 2, "checkpoint"), step(3, 1, 3)]))
    assert [record.step for record in summary.steps] == [1, 2, 3]
    assert list(summary.track.counts) == [1, 1, 1]


@pytest.mark.parametrize("changed", [{"loss": 9.0}, {"gradient_norm": 2.0}, {"digest": ["00", "01"]}, {"reads": 5}])
def test_a_step_that_is_computed_again_with_another_result_is_found(changed: dict[str, object]) -> None:
    again = step(2, 2, 2, **changed)
    entries = [started(), data(), *generation(1, [0, 1], 0), step(1), step(2), *generation(2, [0], 1), again]
    summary = summarise(with_times(entries))
    assert summary.differences == (Difference(step=2, fields=tuple(changed), generations=(1, 2)),)


def test_a_step_that_is_nan_both_times_is_the_same() -> None:
    entries = [started(), *generation(1, [0], 0), step(1, loss="nan"), *generation(2, [0], 0), step(1, loss="nan")]
    summary = summarise(with_times(entries))
    assert summary.differences == ()
    assert math.isnan(summary.steps[0].loss)


def test_without_exactness_only_what_was_read_must_be_the_same() -> None:
    entries = [started(reduction="fast"), *generation(1, [0], 0), step(1), *generation(2, [0], 0), step(1, loss=9.0)]
    assert summarise(with_times(entries)).differences == ()


def test_a_resumed_run_continues_from_its_checkpoint_and_compares_across_drivers() -> None:
    first = [started(), data(), *generation(1, [0, 1], 0), step(1), step(2), checkpoint(2), step(3), step(4)]
    second = [started(2), data(), *generation(2, [0], 2, "checkpoint"), step(3, 1, 2, loss=7.0)]
    summary = summarise([*with_times(first), *with_times(second)])
    assert (summary.starts, summary.status, summary.last_step) == (2, "unfinished", 3)
    assert list(summary.workers_by_step) == [1, 2, 3]
    assert [difference.step for difference in summary.differences] == [3]
    assert [(span.first_step, span.last_step, span.num_samples) for span in summary.spans] == [(1, 3, 50)]
    assert [event.what for event in summary.worker_events] == []  # a new driver's workers do not join


def test_time_between_two_drivers_is_not_time_at_work() -> None:
    first = with_times([started(), *generation(1, [0], 0), step(1)])
    skipped = {"kind": "checkpoint_skipped", "at": first[0]["at"] + 500, "step": 1, "reason": "damaged"}
    second = [{**entry, "at": entry["at"] + 500} for entry in with_times([started(), finished(1)])]
    summary = summarise([*first, skipped, *second])
    assert summary.elapsed_s == 6.0 + 2.0
    assert [record.problem for record in summary.checkpoints] == ["damaged"]


def test_a_changed_batch_begins_a_new_span() -> None:
    other = {"global_batch_size": 8, "microbatch_size": 2, "seed": 3}
    first = [started(), data(), *generation(1, [0], 0), step(1), step(2), checkpoint(2)]
    second = [started(2, batch=other), data(), *generation(2, [0], 2), step(3)]
    spans = summarise([*with_times(first), *with_times(second)]).spans
    assert [(s.first_step, s.last_step, s.batch and s.batch["global_batch_size"]) for s in spans] == [
        (1, 2, 4),
        (3, 3, 8),
    ]


def test_a_failure_is_reported_and_a_new_start_forgets_it() -> None:
    failed = [started(), ("failed", {"step": 0, "fingerprint": None, "error": "TaskError: no"})]
    assert summarise(with_times(failed)).error == "TaskError: no"
    assert summarise(with_times(failed)).status == "failed"
    again = summarise(with_times([*failed, started()]))
    assert (again.status, again.error) == ("unfinished", "")


def test_generations_that_never_formed_and_workers_that_never_started_are_reported() -> None:
    entries = [
        started(),
        ("start_failed", {"worker": 0, "reason": "no memory"}),
        ("worker_refused", {"worker": 1, "node": "n", "reason": "another CPU"}),
        ("generation", {"generation": 1, "members": [2, 3], "step": 0, "source": "start"}),
        lost(3, 0),
        *generation(2, [2], 0),
        recovery(3, 0),
    ]
    summary = summarise(with_times(entries))
    assert [event.what for event in summary.worker_events] == ["start failed", "refused", "lost"]
    assert [record.formed_at is None for record in summary.generations] == [True, False]


def test_unknown_kinds_are_passed_over_and_nothing_is_an_empty_summary() -> None:
    assert summarise([]).starts == 0
    assert summarise([{"kind": "weather", "at": 1.0, "sky": "blue"}]).last_step == 0


def test_checkpoints_that_were_left_out_and_that_failed_are_counted() -> None:
    entries = [started(), checkpoint(1), late(2, writing=1), failed_save(3), late(4, writing=3), failed_save(5)]
    summary = summarise(with_times([*entries, failing(5, newest=1)]))
    assert [record.step for record in summary.late] == [2, 4]
    assert [record.step for record in summary.committed] == [1]
    assert (summary.failed_saves, summary.failing) == (2, True)
    better = summarise(with_times([*entries, failing(5, newest=1), checkpoint(6)]))
    assert (better.failed_saves, better.failing) == (0, False)


def test_a_checkpoint_has_its_size_its_files_and_its_time() -> None:
    kind, fields = checkpoint(3)
    about = {"bytes": 1000, "files": 2, "seconds": 1.5, "retries": 4}
    (record,) = summarise(with_times([started(), (kind, {**fields, **about})])).committed
    assert (record.size_bytes, record.num_files, record.seconds, record.retries) == (1000, 2, 1.5, 4)
    (older,) = summarise(with_times([started(), checkpoint(3)])).committed
    assert older.size_bytes is None
