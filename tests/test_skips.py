"""Data that is skipped: positions follow from the decisions alone, and nothing is read twice."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, strategies as st

from raysharded.overrides import Skips, rewound, skipped_before, skips_resumed

BATCH = 4


def start_of(skips: Skips, step: int) -> int:
    return (step - 1) * BATCH + skipped_before(skips, step)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=6))
def test_after_a_rewind_the_next_step_takes_the_samples_after_those_that_went_wrong(
    rewinds: list[tuple[int, int]],
) -> None:
    skips: Skips = ()
    for to_step, further in rewinds:
        bad_step, before = to_step + further, skips
        skips = rewound(skips, to_step=to_step, bad_step=bad_step, global_batch_size=BATCH)
        assert start_of(skips, to_step + 1) == start_of(before, bad_step) + BATCH
        for step in range(1, to_step + 1):  # what stays as it was
            assert start_of(skips, step) == start_of(before, step)
        starts = [start_of(skips, step) for step in range(1, 60)]
        assert all(after - before >= BATCH for before, after in pairwise(starts))


def test_a_checkpoint_that_agrees_changes_nothing_and_one_of_another_run_counts() -> None:
    skips = rewound((), to_step=2, bad_step=4, global_batch_size=BATCH)
    assert skips_resumed(skips, step=6, samples=6 * BATCH + 2 * BATCH, global_batch_size=BATCH) == skips
    forked = skips_resumed((), step=6, samples=6 * BATCH + 2 * BATCH, global_batch_size=BATCH)
    assert start_of(forked, 7) == start_of(skips, 7)
    assert skips_resumed((), step=6, samples=6 * BATCH, global_batch_size=BATCH) == ()
    assert skips_resumed(((6, 12),), step=6, samples=6 * BATCH + 4, global_batch_size=BATCH) == ((6, 12),)
