from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, strategies as st

from raysharded.config import BatchConfig
from raysharded.data.ledger import (
    ZERO,
    ReadRecorder,
    StepReads,
    add,
    check,
    compare,
    digest,
    digest_of_reads,
    expected_digest,
    expected_digests,
    total,
)
from raysharded.data.order import positions_of_microbatch, positions_of_step, sample_ids

BATCH = BatchConfig(global_batch_size=8, microbatch_size=2, seed=3)
NUM_SAMPLES = 100

int64s = st.integers(-(2**63), 2**63 - 1)
reads = st.lists(st.tuples(int64s, int64s), max_size=20)


def _digest(step: int, pairs: list[tuple[int, int]]) -> tuple[int, int]:
    return digest(step, [p for p, _ in pairs], [i for _, i in pairs])


def _ids(step: int) -> list[int]:
    positions = positions_of_step(step, BATCH.global_batch_size)
    ids: list[int] = sample_ids(BATCH.seed, positions, NUM_SAMPLES).tolist()
    return ids


def _record(step: int, ids: list[int]) -> StepReads:
    positions = positions_of_step(step, BATCH.global_batch_size)
    return StepReads(digest=digest_of_reads(step, positions, np.asarray(ids, dtype=np.int64)), num_reads=len(ids))


def _good(final_step: int) -> dict[int, StepReads]:
    return {step: _record(step, _ids(step)) for step in range(1, final_step + 1)}


@given(step=st.integers(1, 2**62), pairs=reads, data=st.data())
def test_any_split_among_workers_in_any_order_gives_the_same_digest(
    step: int, pairs: list[tuple[int, int]], data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(pairs))
    workers = data.draw(st.lists(st.integers(0, 4), min_size=len(pairs), max_size=len(pairs)))
    parts = [[pair for pair, at in zip(shuffled, workers, strict=True) if at == worker] for worker in range(5)]
    assert total(_digest(step, part) for part in parts) == _digest(step, pairs)
    assert all(0 <= word < 2**64 for word in _digest(step, pairs))


@given(a=reads, b=reads, c=reads)
def test_digests_add_like_numbers(a: list[tuple[int, int]], b: list[tuple[int, int]], c: list[tuple[int, int]]) -> None:
    x, y, z = _digest(1, a), _digest(1, b), _digest(1, c)
    assert add(x, y) == add(y, x) == _digest(1, a + b)
    assert add(add(x, y), z) == add(x, add(y, z))
    assert add(x, ZERO) == x


def test_a_digest_distinguishes_steps_positions_ids_and_counts() -> None:
    different = [
        digest(1, [0, 1], [5, 6]),
        digest(2, [0, 1], [5, 6]),
        digest(1, [0, 1], [6, 5]),
        digest(1, [0, 2], [5, 6]),
        digest(1, [0], [5]),
        digest(1, [0, 0], [5, 5]),
        digest(1, [0, 0, 0], [5, 5, 5]),
        ZERO,
    ]
    assert len(set(different)) == len(different)
    assert (
        len({word for pair in different for word in pair}) == 2 * len(different) - 1
    )  # both words differ; ZERO is (0, 0)


def test_digests_are_the_same_for_ever_so_that_old_journals_can_be_verified() -> None:
    assert digest(1, [0, 1, 2], [7, 8, 2**40]) == (9618291854848954556, 3172207147354002317)
    assert digest(2**40, [-1], [0]) == (7138729107429529334, 10389392425079014814)


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="2 positions but 1 ids"):
        digest(1, [0, 1], [5])


def test_the_microbatches_of_a_step_add_up_to_the_expected_digest() -> None:
    for step in (1, 2, 13, 14):  # 13 has the end of one epoch and the beginning of the next
        parts = []
        for microbatch in range(BATCH.num_microbatches):
            positions = positions_of_microbatch(step, microbatch, BATCH.global_batch_size, BATCH.microbatch_size)
            parts.append(digest(step, positions, sample_ids(BATCH.seed, positions, NUM_SAMPLES)))
        assert total(parts) == expected_digest(step, BATCH, NUM_SAMPLES)


@given(data=st.data())
def test_reads_that_are_not_exactly_the_expected_ones_give_another_digest(data: st.DataObject) -> None:
    ids = _ids(1)
    read = data.draw(st.lists(st.sampled_from([*ids, 99, 0]), max_size=12))
    assert (_record(1, read).digest == expected_digest(1, BATCH, NUM_SAMPLES)) == (read == ids)


@given(expected=st.lists(st.integers(0, 5)), read=st.lists(st.integers(0, 5)))
def test_compare_accounts_for_every_read(expected: list[int], read: list[int]) -> None:
    lost, repeated = compare(expected, read)
    assert len(read) == len(expected) - lost + repeated
    assert (lost, repeated) == (0, 0) if sorted(read) == sorted(expected) else lost + repeated > 0
    assert compare(read, expected) == (repeated, lost)


def test_a_run_that_read_everything_once_is_right() -> None:
    report = check(_good(30), final_step=30, batch=BATCH, num_samples=NUM_SAMPLES)
    assert report.ok
    assert report.exact
    assert (report.samples_lost, report.samples_repeated, report.steps_checked) == (0, 0, 30)


def test_a_missing_step_loses_its_whole_batch() -> None:
    records = _good(10)
    del records[4]
    report = check(records, final_step=10, batch=BATCH, num_samples=NUM_SAMPLES)
    assert (report.ok, report.exact, report.steps_missing, report.steps_wrong) == (False, True, (4,), ())
    assert (report.samples_lost, report.samples_repeated) == (8, 0)


def test_wrong_steps_are_counted_exactly_where_their_ids_are_known() -> None:
    wrong = {2: _ids(2)[:-3], 5: _ids(5) + _ids(5)[:2], 7: [*_ids(7)[1:], _ids(7)[3]]}
    records = _good(10) | {step: _record(step, ids) for step, ids in wrong.items()}
    report = check(records, final_step=10, batch=BATCH, num_samples=NUM_SAMPLES, read_ids=wrong)
    assert (report.ok, report.exact, report.steps_wrong) == (False, True, (2, 5, 7))
    assert (report.samples_lost, report.samples_repeated) == (3 + 0 + 1, 0 + 2 + 1)


def test_steps_outside_of_the_run_are_wrong_and_come_behind_its_own_in_order() -> None:
    report = check(_good(10), first_step=4, final_step=7, batch=BATCH, num_samples=NUM_SAMPLES)
    assert (report.ok, report.steps_wrong, report.steps_missing) == (False, (1, 2, 3, 8, 9, 10), ())


def test_wrong_steps_without_ids_count_for_what_their_reads_prove() -> None:
    records = _good(10)
    records |= {2: _record(2, _ids(2)[:-3]), 5: _record(5, _ids(5) + _ids(5)[:2]), 7: _record(7, _ids(8))}
    report = check(records, final_step=10, batch=BATCH, num_samples=NUM_SAMPLES)
    assert (report.ok, report.exact, report.steps_wrong) == (False, False, (2, 5, 7))
    assert (report.samples_lost, report.samples_repeated) == (3 + 0 + 1, 0 + 2 + 1)


def test_reads_beyond_the_final_step_are_too_many() -> None:
    report = check(_good(4), final_step=3, batch=BATCH, num_samples=NUM_SAMPLES)
    assert (report.ok, report.steps_wrong, report.samples_lost, report.samples_repeated) == (False, (4,), 0, 8)


def test_a_part_of_a_run_can_be_checked_alone() -> None:
    records = {step: record for step, record in _good(9).items() if step >= 5}
    report = check(records, final_step=9, first_step=5, batch=BATCH, num_samples=NUM_SAMPLES)
    assert report.ok
    assert report.steps_checked == 5


def test_another_seed_or_dataset_length_does_not_pass() -> None:
    records = _good(3)
    other_seed = BatchConfig(global_batch_size=8, microbatch_size=2, seed=4)
    assert check(records, final_step=3, batch=other_seed, num_samples=NUM_SAMPLES).steps_wrong == (1, 2, 3)
    assert check(records, final_step=3, batch=BATCH, num_samples=NUM_SAMPLES + 1).steps_wrong == (1, 2, 3)


def test_the_recorder_notes_every_successful_read_from_any_thread() -> None:
    recorder = ReadRecorder(range(1000))
    assert len(recorder) == 1000
    threads = [
        threading.Thread(target=lambda first=first: [recorder[i] for i in range(first, first + 100)])
        for first in range(0, 800, 100)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with pytest.raises(IndexError):
        recorder[1000]
    assert sorted(recorder.ids.tolist()) == list(range(800))
    assert recorder[np.int64(7)] == 7  # type: ignore[index]  # what NumPy users pass
    assert recorder.ids[-1] == 7


def test_of_very_many_steps_the_expected_digests_are_those_of_each() -> None:
    batch = BatchConfig(global_batch_size=16, microbatch_size=2, seed=3)
    steps = np.arange(7, 50_007)
    low, high = np.zeros(len(steps), np.uint64), np.zeros(len(steps), np.uint64)
    for rows, words in expected_digests(steps, batch, 1001, 5):
        low[rows], high[rows] = words
    for row in (0, 1, 4095, 4096, 30_000, len(steps) - 1):
        assert (int(low[row]), int(high[row])) == expected_digest(int(steps[row]), batch, 1001, 5)
