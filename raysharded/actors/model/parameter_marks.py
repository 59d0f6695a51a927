"""Attributes and gradient hooks that a task's `build_model` leaves on its parameters.

The optimizer gets different parameters: on the meta device first, and cut afterwards. Attributes are set on them, too.
Gradient hooks get whole gradients, which FSDP2 has before it reduces (`guards/parameters.py`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn

from raysharded.errors import TaskError
from raysharded.task import Task

GradientHook: TypeAlias = Callable[[torch.Tensor], torch.Tensor | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterMarks:
    """Attributes and gradient hooks, by the parameter's name."""

    attributes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    hooks: Mapping[str, tuple[GradientHook, ...]] = field(default_factory=dict)

    def put_on(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set the attributes of the task's parameters on the parameters that will be trained."""
        for name, attributes in self.attributes.items():
            for key, value in attributes.items():
                setattr(parameters[name], key, value)


def share(original: nn.Parameter, stand_in: nn.Parameter) -> None:
    """Make both share attributes and hooks, including any that either gets later."""
    stand_in.__dict__ = original.__dict__
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        shared = getattr(original, hooks)
        if shared is None:
            shared = OrderedDict()
            setattr(original, hooks, shared)
        setattr(stand_in, hooks, shared)


def marks_of(task: Task, parameters: Mapping[str, nn.Parameter]) -> ParameterMarks:
    """The marks that `build_model` left on the parameters. Raises TaskError for those that parts cannot carry."""
    where = f"{type(task).__name__}.build_model"
    for name, param in parameters.items():
        for key, value in vars(param).items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape == param.shape:
                raise TaskError(
                    f"{where} left {key!r} on the parameter {name!r}, a tensor of its shape {tuple(param.shape)}: each "
                    "worker has a part of the parameter and would need that part of it. Register it as a buffer of the "
                    "module, or compute what needs it in forward."
                )
        if getattr(param, "_post_accumulate_grad_hooks", None):
            raise TaskError(
                f"{where} registered a post-accumulate hook on the parameter {name!r}: it would see sums of some "
                "microbatches' gradients, which depend on the number of workers. Use register_hook to process each "
                "microbatch's gradient, or a step hook of the optimizer."
            )
    hooks = {name: tuple((param._backward_hooks or {}).values()) for name, param in parameters.items()}
    return ParameterMarks(
        attributes={name: dict(vars(param)) for name, param in parameters.items() if vars(param)},
        hooks={name: found for name, found in hooks.items() if found},
    )


def refuse_hooks_on(task: Task, marks: ParameterMarks, cut: Collection[str]) -> None:
    """Raise TaskError for a gradient hook of a parameter that tensor parallelism cuts."""
    for name in sorted(marks.hooks.keys() & set(cut)):
        raise TaskError(
            f"{type(task).__name__}.build_model registered a gradient hook on the parameter {name!r}, which "
            f"{type(task).__name__}.parallelize cuts: no worker has its whole gradient. Do one of both."
        )
