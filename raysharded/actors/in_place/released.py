"""Parameters of a generation that is over: each use of one is an error.

A loop may have kept them in a list, a closure or a second optimizer. What it does with them would be lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch

from raysharded.actors.task_calls.task_errors import line_here
from raysharded.errors import TaskError

_OF_THE_FORM = frozenset(
    {
        *(getattr(torch.Tensor, name) for name in ("numel", "size", "dim", "element_size", "is_floating_point")),
        *(
            getattr(torch.Tensor, name).__get__
            for name in ("shape", "dtype", "ndim", "requires_grad", "is_meta", "is_leaf", "device")
        ),
    }
)
"""Functions that read a tensor's form, which stays the same."""


def refuse_use(parameters: Iterable[torch.Tensor], when: str) -> None:
    """Let each use of these parameters raise a TaskError. `when`: where they are from, for the error."""
    for param in parameters:
        param.__class__ = _released(type(param), when)


@cache
def _released(kind: type[torch.Tensor], when: str) -> type[torch.Tensor]:
    def refuse(_: type, func: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _OF_THE_FORM:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise TaskError(
            f"{line_here()}: a parameter {when} was used: the model has other parameters after each change of the "
            "workers. Take them from model.parameters() or optimizer.param_groups when you need them, and give each "
            "one to the one optimizer of session.shard."
        )

    return type(f"Released{kind.__name__}", (kind,), {"__torch_function__": classmethod(refuse)})
