"""What an optimizer keeps, and what its step allocates: tried on a few numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from raysharded.actors.live import dtype_name
from raysharded.actors.trial import with_params
from raysharded.planning.following import MemoryFollower
from raysharded.planning.shapes import Slot, Transient

_LENGTH = 64
_SEVERAL = 4


def kept_by(optimizer: torch.optim.Optimizer) -> dict[int, tuple[Slot, ...]]:
    """id of a parameter -> what the optimizer has for it after a step; parameters may be on the meta device."""
    tried: dict[tuple[Any, ...], tuple[Slot, ...]] = {}
    found: dict[int, tuple[Slot, ...]] = {}
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        for param in group["params"]:
            if not param.requires_grad:
                continue
            signature = (number, param.dtype, param.dim())
            if signature not in tried:
                tried[signature] = _slots(optimizer, settings, param)
            found[id(param)] = tried[signature]
    return found


def transient_of(optimizer: torch.optim.Optimizer) -> Transient:
    """What its step allocates beyond its state, per element: for the largest parameter, or for all together."""
    of_largest = of_all = 0.0
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        for param in group["params"][:1]:
            one, several = (_peak_of_step(optimizer, settings, param.dtype, count) for count in (1, _SEVERAL))
            if several > 2 * one:
                of_all = max(of_all, several / (_SEVERAL * _LENGTH))
            else:
                of_largest = max(of_largest, one / _LENGTH)
    return Transient(of_largest=of_largest, of_all=of_all)


def _slots(optimizer: torch.optim.Optimizer, settings: dict[str, Any], like: torch.Tensor) -> tuple[Slot, ...]:
    shape = tuple([2] * like.dim())
    (param,) = _params(1, shape, like.dtype)
    twin = with_params(optimizer, settings, [param])
    twin.step()
    slots = []
    for key, value in twin.state[param].items():
        if isinstance(value, torch.Tensor):
            slots.append(Slot(key=key, dtype=dtype_name(value.dtype), scalar=value.dim() == 0))
        elif isinstance(value, (int, float)):
            dtype = "int64" if isinstance(value, int) else "float64"
            slots.append(Slot(key=key, dtype=dtype, scalar=True, is_number=True))
    return tuple(slots)


def _peak_of_step(optimizer: torch.optim.Optimizer, settings: dict[str, Any], dtype: torch.dtype, count: int) -> int:
    twin = with_params(optimizer, settings, _params(count, (_LENGTH,), dtype))
    twin.step()
    follower = MemoryFollower()
    with follower:
        follower.ignore([param for group in twin.param_groups for param in group["params"]])
        follower.ignore([param.grad for group in twin.param_groups for param in group["params"]])
        follower.ignore([v for state in twin.state.values() for v in state.values() if isinstance(v, torch.Tensor)])
        twin.step()
    return follower.peak


def _params(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params
