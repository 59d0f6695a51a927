"""Finds an operand without memory in a forward: torch's matrix products on CPUs read free memory in its place.

A tensor that a constructor made of parameters has no values, and may be kept where the model does not show it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # torch's own profilers and sanitizers use it

from raysharded.actors.build import clean_name
from raysharded.actors.contents import reachable
from raysharded.errors import TaskError


class MemoryWatch(TorchDispatchMode):
    """Within it, an operation on a tensor without memory and on others raises TaskError, which names the first.

    Operations on nothing but tensors without memory are let through: they compute shapes.
    """

    def __init__(self, model: nn.Module, where: str) -> None:
        """`where`: whose forward it is, for errors."""
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self._model, self._where = model, where

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: what a task compiles is compiled as it is without this."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operands = [one for one in (*args, *kwargs.values()) if type(one) in (torch.Tensor, nn.Parameter)]
        empty = next((one for one in operands if one.is_meta), None)
        if empty is not None and not all(one.is_meta for one in operands):
            raise TaskError(
                f"{self._where} used {self._name_of(empty)}, which has no values: it was made of parameters while the "
                "model was built, and those have none then. Compute it in forward, or register it as a buffer."
            )
        return func(*args, **kwargs)

    def _name_of(self, tensor: torch.Tensor) -> str:
        storage = tensor.untyped_storage()._cdata
        shape = f"a tensor of shape {list(tensor.shape)}"
        for path, one in reachable(self._model, most=sys.maxsize):
            if isinstance(one, torch.Tensor) and one.is_meta and one.untyped_storage()._cdata == storage:
                return f"{clean_name(path.lstrip('.'))!r}, {shape}"
        names = {id(module): clean_name(name) or "the model" for name, module in self._model.named_modules()}
        frame = sys._getframe()
        while frame is not None:
            name = names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return f"{shape} in the forward of {name}, which the model itself does not hold,"
            frame = frame.f_back  # type: ignore[assignment]  # it ends with None
        return f"{shape}, which the model itself does not hold,"
