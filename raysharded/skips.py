"""Data that a run passed over: how far its positions are ahead of what the step alone says. Pure.

A run that goes back to step `c` because step `s` went wrong goes on with the samples after those of `s`. So positions
depend on the step and on these decisions alone, and everything that is computed later, or again, is determined.
"""

from __future__ import annotations

from typing import TypeAlias

Skips: TypeAlias = tuple[tuple[int, int], ...]
"""(step, samples), ascending by step: after `step`, so many samples have been passed over in all."""


def skipped_before(skips: Skips, step: int) -> int:
    """How many samples had been passed over, in all, when the samples of `step` were taken."""
    return next((samples for after, samples in reversed(skips) if after < step), 0)


def rewound(skips: Skips, *, to_step: int, bad_step: int, global_batch_size: int) -> Skips:
    """The decisions after going back to `to_step`, past the data of `bad_step` and of all steps between.

    Law: `to_step + 1` then takes the samples right after those that `bad_step` had taken.
    """
    samples = (bad_step - to_step) * global_batch_size + skipped_before(skips, bad_step)
    return (*(skip for skip in skips if skip[0] < to_step), (to_step, samples))


def passed_over(skips: Skips, *, to_step: int, done_step: int, global_batch_size: int) -> Skips:
    """The decisions after going back to `to_step`, past all data that was read until `done_step` was done, and past
    what was to be passed over after it.

    Law: `to_step + 1` then takes the samples that the step after `done_step` would have taken.
    """
    samples = (done_step - to_step) * global_batch_size + skipped_before(skips, done_step + 1)
    return (*(skip for skip in skips if skip[0] < to_step), (to_step, samples))


def skips_resumed(skips: Skips, *, step: int, samples: int, global_batch_size: int) -> Skips:
    """The decisions of a run that goes on from a checkpoint of `step`, at which `samples` had been consumed.

    What the checkpoint says counts up to its step: it may come from another run. What was decided after it stays.
    """
    ahead = samples - step * global_batch_size
    if ahead == skipped_before(skips, step):
        return skips
    later = tuple(skip for skip in skips if skip[0] >= step)
    return later if later and later[0][0] == step else ((step, ahead), *later)
