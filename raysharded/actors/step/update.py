"""Use of a step's gradient: the optimizer's step, nothing, or an error; the same on every worker.

The error for a loss or gradient that is not finite names the microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from raysharded.actors.device.device_waits import numbers_of
from raysharded.actors.model.sharded_model import local_of
from raysharded.actors.numerics.step_consensus import Agreed, non_finite, require_weight
from raysharded.actors.optimizer.learning_rate import own_rates, set_rates
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.actors.step.gradient import Batches, StepGradient
from raysharded.actors.step.parameter_use import LEAVES_ALONE
from raysharded.actors.task_calls.remarks import Say
from raysharded.actors.telemetry.phases import Phases
from raysharded.errors import NonFiniteLoss
from raysharded.overrides import factor_at
from raysharded.protocol.job import Job
from raysharded.protocol.messages import NonFinite


def located(
    found: NonFinite, step: int, gradient: StepGradient, sum_over_workers: Callable[[torch.Tensor], torch.Tensor]
) -> Batches[NonFinite]:
    """`found` with the microbatches whose gradient is not finite: every worker computes the step once more.

    No microbatch if only their sum is too large. Fast reduction does not show them.
    """
    if found.what == "loss" or not gradient.reducers:
        return found
    flags: list[tuple[int, torch.Tensor]] = []
    yield from gradient.compute_again(step, 0, lambda index, values: flags.append((index, values.isfinite().all())))
    bad = torch.zeros(gradient.rounds.num_microbatches, dtype=torch.int64)
    for (index, _), is_finite in zip(flags, numbers_of(finite for _, finite in flags), strict=True):
        bad[index] += int(not is_finite)
    bad = sum_over_workers(bad)
    return replace(found, microbatches=tuple(index for index, count in enumerate(bad.tolist()) if count))


def error_of(found: NonFinite, step: int, *, is_located: bool, broken: Sequence[str] = ()) -> NonFiniteLoss:
    """Error with which a worker stops.

    `is_located`: True if each microbatch was checked. `broken`: parameters that are not finite before the step.
    """
    said = f"step {step}: {_said_of(found, is_located=is_located)}"
    if broken:
        also = f", and {len(broken) - 1} others have," if len(broken) > 1 else ""
        remedy = "give them finite first values" if step == 1 else "continue from a checkpoint that has finite ones"
        return NonFiniteLoss(f"{said}: {broken[0]!r} has{also} weights that are not finite before the step; {remedy}.")
    remedy = "look at the model's forward, and at the data of this step"
    if step > 1:
        remedy = (
            "lower the learning rate, set max_grad_norm, or look at the data of this step; then resume from the newest "
            "checkpoint"
        )
    return NonFiniteLoss(
        f"{said}. It will be the same at every try, since computation is reproducible: {_way_out(found)}{remedy}. Or "
        'let the run go on by itself: FailureConfig(on_non_finite="skip") or "rewind".'
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


_CLIP_EPSILON = 1e-6  # as torch.nn.utils.clip_grad_norm_


def _scale_of(agreed: Agreed, max_norm: float | None) -> float:
    """Factor of the summed gradient: the mean, clipped."""
    scale = 1.0 / agreed.weight
    if max_norm is not None:
        scale *= min(1.0, float(max_norm) / (agreed.gradient_norm / agreed.weight + _CLIP_EPSILON))
    return scale


class StepUpdate:
    """Updates of one generation. Training thread only."""

    def __init__(
        self,
        job: Job,
        optimizer: ShardOptimizer,
        gradient: StepGradient,
        phases: Phases,
        sum_over_workers: Callable[[torch.Tensor], torch.Tensor],
        *,
        unused: int,
        say: Say | None,
    ) -> None:
        """`unused`: the number of the rule. `say`: reports remarks on the first step; None: no remarks."""
        self._say = say
        self._job, self._optimizer, self._gradient = job, optimizer, gradient
        self._in_phase, self._sum = phases, sum_over_workers
        self.has_applied = False
        """True once the optimizer has made a step, and with it its state."""
        self.begun: frozenset[str] = frozenset()
        """Parameters for which the newest step was the optimizer's first in this generation."""
        self._stepped: set[str] = set()
        self._leaves_alone = LEAVES_ALONE[unused]

    def why_not(self, step: int, agreed: Agreed) -> Batches[NonFinite | None]:
        """Reason to leave the step out, or None. Raises NonFiniteLoss or TaskError if it cannot be left out."""
        found = non_finite(agreed)
        if found is None:
            require_weight(step, agreed)
            return None
        with self._in_phase("locate"):
            found = yield from located(found, step, self._gradient, self._sum)
            broken = self._not_finite()
        if self._job.on_non_finite != "skip" or broken:
            raise error_of(found, step, is_located=bool(self._gradient.reducers), broken=broken)
        return found

    def _not_finite(self) -> list[str]:
        """Parameters of the optimizer that have values which are not finite, on any worker."""
        written = self._optimizer.written
        flags = [local_of(param).isfinite().all().logical_not().long() for param in written.values()]
        counts = self._sum(torch.tensor([int(flag) for flag in numbers_of(flags)], dtype=torch.int64)).tolist()
        return [name for name, count in zip(written, counts, strict=True) if count]

    def leave_out(self, step: int) -> float:
        """Change nothing; returns the learning rate that the step would have had."""
        self.begun = frozenset()
        self._optimizer.clear_gradients()
        return self._optimizer.lr_of(step)

    def leave_out_by_itself(self, step: int) -> float:
        """As `leave_out`, with the optimizer's own learning rates."""
        self.begun = frozenset()
        self._optimizer.clear_gradients()
        _, rates = self._own_rates(step)
        return float(rates[0])

    def _own_rates(self, step: int) -> tuple[list[Any], list[Any]]:
        return own_rates(self._optimizer.built.parts.groups, factor_at(self._optimizer.rates, step), step)

    def apply(self, step: int, agreed: Agreed, max_norm: float | None) -> float:
        """Clip and step the parameters that the step's microbatches used; returns the learning rate."""
        used = self._to_be_changed(step, agreed)
        lr = self._optimizer.apply(step, _scale_of(agreed, max_norm), used)
        self._note(used)
        return lr

    @contextmanager
    def applying(self, step: int, agreed: Agreed, max_norm: float | None) -> Iterator[float]:
        """As `apply`: a context for the optimizer's step, with its own learning rates. Yields that of a group."""
        used = self._to_be_changed(step, agreed)
        own, rates = self._own_rates(step)
        with self._optimizer.stepping(step, _scale_of(agreed, max_norm), rates, used):
            yield float(rates[0])
        set_rates(self._optimizer.built.parts.groups, own)
        self._note(used)

    def _note(self, used: frozenset[str]) -> None:
        self.has_applied = True
        self.begun = frozenset(used - self._stepped)
        self._stepped |= used

    def _name_unused(self, step: int, agreed: Agreed, say: Say) -> None:
        names = [name for name, is_used in zip(self._gradient.use.names, agreed.used, strict=True) if not is_used]
        unused = [name for name in names if self._optimizer.trains(name)]
        if unused:
            effect = "is left as it is" if self._leaves_alone else "has a gradient of zeros, and decays"
            say(
                "unused parameters",
                f"no microbatch of step {step} used {len(unused)} of the parameters, first {unused[0]!r}: a parameter "
                f"{effect} in a step that does not use it. Freeze what is never used (requires_grad=False), or leave "
                "it out of the model, and its memory is free.",
            )

    def _to_be_changed(self, step: int, agreed: Agreed) -> frozenset[str]:
        """Names of the parameters that the step changes; the same on every worker, with any rows of them."""
        if self._say is not None:
            self._name_unused(step, agreed, self._say)
            self._say = None
        names = self._gradient.use.names
        if not self._leaves_alone:
            return frozenset(names)
        return frozenset(name for name, is_used in zip(names, agreed.used, strict=True) if is_used)
