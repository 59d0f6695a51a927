"""The learning rate of a parameter group in a step: its own, times the task's schedule, times what somebody asked for.

A rate that is none is found before the step is applied: by every worker, since all ask the same of the task.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from raysharded.actors.task_calls.task_numbers import kind_of, number_of
from raysharded.errors import RayshardedError, TaskError, is_ctrl_c, text_of, user_traceback
from raysharded.task import Task

_WANTED = "give a finite number, 0 or more"


def scale_of(task: Task, step: int) -> Any:
    """What `lr_scale` returned for the step. Raises TaskError if it is no finite number of 0 or more."""
    name = f"{type(task).__name__}.lr_scale({step})"
    try:
        scale = task.lr_scale(step)
    except RayshardedError:
        raise
    except BaseException as error:  # also SystemExit: a bug of the task is no loss of a worker
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


def rate_of(task: Task, step: int, initial: Any, scale: Any, factor: float, *, number: int) -> Any:
    """The product for one group, under a number of the rule `numbers`. Raises TaskError if it is no learning rate.

    The first number multiplies the schedule's value as it came: one in float32 gives a rate that is rounded to it.
    """
    if number == 1:
        rate = initial * (scale.reshape(()) if isinstance(scale, torch.Tensor) else scale) * factor
    else:
        rate = initial * _as_float(number_of(scale)) * factor
    if not is_rate(float(rate)):
        raise TaskError(
            f"the learning rate of step {step} is {float(rate)}: a group's own {initial} times {scale} of "
            f"{type(task).__name__}.lr_scale({step}) times the factor {factor} that was asked for; a learning rate is "
            f"a finite number of 0 or more. Step {step} was not applied."
        )
    return rate


def is_rate(value: float) -> bool:
    """True if a step can be made with this learning rate; 0 is one."""
    return math.isfinite(value) and value >= 0


def _as_float(number: float | torch.Tensor | None) -> float:
    assert number is not None
    return float(number)
