"""The name of a tensor that a forward uses, for people."""

from __future__ import annotations

import sys

import torch
from torch import nn

from raysharded.actors.build import clean_name
from raysharded.actors.contents import reachable


def operand_name(model: nn.Module, tensor: torch.Tensor) -> str:
    """The path from the model to a tensor without memory, or to one that it is a view of; or else the module in whose
    forward it is met. Called where it is met."""
    storage, shape = tensor.untyped_storage()._cdata, f"a tensor of shape {list(tensor.shape)}"
    for path, one in reachable(model, most=sys.maxsize):
        if isinstance(one, torch.Tensor) and one.is_meta and one.untyped_storage()._cdata == storage:
            return f"{clean_name(path.lstrip('.'))!r}, {shape}"
    names = {id(module): clean_name(name) or "the model" for name, module in model.named_modules()}
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        name = names.get(id(frame.f_locals.get("self")))
        if name is not None:
            return f"{shape} in the forward of {name}, which the model itself does not hold"
    return f"{shape}, which the model itself does not hold"
