"""The learning rate of a parameter group in a step: initial rate times schedule times requested factor.

An invalid rate is found before the step is applied. Every worker finds it, since all call the same schedule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from raysharded.actors.model.inventory import Item
from raysharded.actors.task_calls.task_numbers import kind_of, number_of
from raysharded.errors import RayshardedError, TaskError, is_ctrl_c, text_of, user_traceback
from raysharded.task import Task

_WANTED = "give a finite number, 0 or more"


def require_rates(task: Task, optimizer: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise TaskError if a parameter group has no learning rate that a schedule can multiply."""
    for place, group in enumerate(groups):
        rate = group.get("lr")
        if number_of(rate) is None:
            raise TaskError(
                f"{type(task).__name__}.build_optimizer: parameter group {place} of {type(optimizer).__name__} has "
                f"lr={rate!r:.80}. Give it a number, which Task.lr_scale multiplies; an optimizer that computes its "
                "learning rate itself (Adafactor with relative_step=True) is not supported."
            )


def scale_of(task: Task, step: int) -> Any:
    """Result of `lr_scale` for the step. Raises TaskError unless it is a finite number of 0 or more."""
    name = f"{type(task).__name__}.lr_scale({step})"
    try:
        scale = task.lr_scale(step)
    except RayshardedError:
        raise
    except BaseException as error:  # also SystemExit: a bug in the task is not the loss of a worker
        if is_ctrl_c(error):
            raise
        raise TaskError(f"{name} raised {type(error).__name__}: {text_of(error)}", user_traceback(error)) from error
    number = number_of(scale)
    if number is None:
        shown = repr(scale) if isinstance(scale, (str, complex)) else kind_of(scale)
        raise TaskError(f"{name} returned {shown}, which the learning rate cannot be multiplied with: {_WANTED}.")
    if not is_rate(_as_float(number)):
        raise TaskError(f"{name} returned {_as_float(number)}: {_WANTED}. Step {step} was not applied.")
    return scale


def schedule_item(task: Task, step: int) -> Item:
    """The schedule's value for a step, to compare it with other workers'; an invalid one is for the step to refuse.

    Raises TaskError if a second call returns another value.
    """
    name = f"lr_scale({step})"
    try:
        first, again = (_as_float(number_of(scale_of(task, step))) for _ in range(2))
    except TaskError:
        return Item("schedule", name, "invalid")
    if first != again:
        raise TaskError(
            f"{type(task).__name__}.{name} returned {first} in one call and {again} in the next: it depends on the "
            "number of its calls, a clock or a draw, which are others in a worker that joins, and in a step that is "
            "done again. Compute it from the step's number alone, without a torch scheduler that steps in it."
        )
    return Item("schedule", name, repr(first))


def rate_of(task: Task, step: int, initial: Any, scale: Any, factor: float, *, number: int) -> Any:
    """The learning rate of one group, under a number of the rule `numbers`. Raises TaskError if it is invalid.

    Number 1 multiplies the schedule's value as returned: a float32 value rounds the rate to float32.
    """
    if number == 1:
        rate = initial * (scale.reshape(()) if isinstance(scale, torch.Tensor) else scale) * factor
    else:
        rate = initial * _as_float(number_of(scale)) * factor
    if not is_rate(float(rate)):
        raise TaskError(
            f"the learning rate of step {step} is {float(rate)}: a group's own {initial} times {scale} of "
            f"{type(task).__name__}.lr_scale({step}) times the requested factor {factor}; a learning rate is "
            f"a finite number of 0 or more. Step {step} was not applied."
        )
    return rate


def set_rates(groups: Sequence[dict[str, Any]], rates: Sequence[Any]) -> None:
    """Set the learning rate of each group; one that is a tensor stays the same object."""
    for group, lr in zip(groups, rates, strict=True):
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


def own_rates(groups: Sequence[Mapping[str, Any]], factor: float, step: int) -> tuple[list[Any], list[Any]]:
    """(learning rate of each group as it is, the same times the requested factor). Raises TaskError if one is invalid.

    Rates that are tensors are copies.
    """
    own = [rate.clone() if isinstance(rate := group["lr"], torch.Tensor) else rate for group in groups]
    for place, rate in enumerate(own):
        if not is_rate(float(rate) * factor):
            raise TaskError(
                f"the learning rate of parameter group {place} is {float(rate)} in step {step}, times the requested "
                f"factor {factor}: give a finite number, 0 or more. Step {step} was not applied."
            )
    return own, own if factor == 1.0 else [rate * factor for rate in own]


def is_rate(value: float) -> bool:
    """True if a step can use this learning rate; 0 is valid."""
    return math.isfinite(value) and value >= 0


def _as_float(number: float | torch.Tensor | None) -> float:
    assert number is not None
    return float(number)
