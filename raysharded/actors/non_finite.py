"""A loss or gradient that is NaN or infinite: in which microbatches, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from raysharded.actors.gradient import StepGradient
from raysharded.driver.messages import NonFinite
from raysharded.errors import NonFiniteLoss


def located(
    found: NonFinite, step: int, gradient: StepGradient, sum_over_workers: Callable[[torch.Tensor], torch.Tensor]
) -> NonFinite:
    """The same, with the microbatches whose gradient is not finite: computes the step once more, on every worker.

    None if only their sum is too large. Fast reduction does not show them.
    """
    if found.what == "loss" or not gradient.reducers:
        return found
    flags: list[tuple[int, torch.Tensor]] = []
    gradient.compute_again(step, 0, lambda index, values: flags.append((index, values.isfinite().all())))
    bad = torch.zeros(gradient.rounds.num_microbatches, dtype=torch.int64)
    for index, finite in flags:
        bad[index] += int(not finite.item())
    bad = sum_over_workers(bad)
    return replace(found, microbatches=tuple(index for index, count in enumerate(bad.tolist()) if count))


def error_of(found: NonFinite, step: int) -> NonFiniteLoss:
    """What a worker stops with."""
    return NonFiniteLoss(
        f"step {step}: {found.text()}. It will be the same at every try, since computation is reproducible: lower the "
        "learning rate, set max_grad_norm, or look at the data of this step; then resume from the newest checkpoint. "
        'Or let the run go on by itself: FailureConfig(on_non_finite="skip") or "rewind".'
    )
