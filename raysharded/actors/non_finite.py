"""A loss or gradient that is NaN or infinite: in which microbatches, and what is said of it."""

from __future__ import annotations

import math
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


def error_of(found: NonFinite, step: int, *, is_located: bool) -> NonFiniteLoss:
    """What a worker stops with. `is_located`: it was looked for in each microbatch."""
    return NonFiniteLoss(
        f"step {step}: {_said_of(found, is_located=is_located)}. It will be the same at every try, since computation "
        f"is reproducible: {_way_out(found)}lower the learning rate, set max_grad_norm, or look at the data of this "
        "step; then resume from the newest checkpoint. Or let the run go on by itself: "
        'FailureConfig(on_non_finite="skip") or "rewind".'
    )


def _said_of(found: NonFinite, *, is_located: bool) -> str:
    if found.what == "gradient" and is_located and not found.microbatches:
        return (
            "the gradient is too large: it is finite in each microbatch, and its sum, or the squares that its norm is "
            "made of, are beyond what the numbers can hold (in float64 that is an element of 1e154 or more)"
        )
    return found.text()


def _way_out(found: NonFinite) -> str:
    if found.what == "loss" and math.isnan(found.loss):
        return "if the loss is a mean over what may be empty, which is nan, return Loss(sum, number of items); else "
    return ""
