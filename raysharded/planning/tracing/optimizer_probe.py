"""An optimizer's state, and its step's temporary allocations: measured on a few numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raysharded.actors.optimizer.inner_optimizers import StandIns, stand_ins
from raysharded.actors.shards.device_state import dtype_name
from raysharded.planning.models.shapes import Slot, Transient
from raysharded.planning.tracing.tensor_lifetimes import MemoryFollower

_LENGTH = 64
_SEVERAL = 4


def kept_by(optimizer: torch.optim.Optimizer) -> dict[int, tuple[Slot, ...]]:
    """id of a parameter -> the optimizer's state after a step; parameters may be on the meta device."""
    signatures: dict[int, tuple[Any, ...]] = {}
    tried: dict[tuple[Any, ...], nn.Parameter] = {}
    given: dict[int, list[nn.Parameter]] = {}
    with stand_ins(optimizer) as standing:
        for number, held in enumerate(standing.own):
            for param in held:
                if param.requires_grad:
                    signatures[id(param)] = (*signatures.get(id(param), ()), number, param.dtype, param.dim())
        for param in {id(param): param for held in standing.own for param in held}.values():
            signature = signatures.get(id(param))
            if signature is not None and signature not in tried:
                (tried[signature],) = given[id(param)] = _params(1, tuple([2] * param.dim()), param.dtype)
        standing.give(given)
        optimizer.step()
        slots = {signature: _slots(standing.parts.kept_of(param)) for signature, param in tried.items()}
    return {param: slots[signature] for param, signature in signatures.items()}


def transient_of(optimizer: torch.optim.Optimizer) -> Transient:
    """Allocations of a step beyond the state, per element: for the largest parameter, or for all together."""
    of_largest = of_all = 0.0
    with stand_ins(optimizer) as standing:
        for param in [held[0] for held in standing.own if held]:
            one, several = (_peak_of_step(optimizer, standing, param, count) for count in (1, _SEVERAL))
            if several > 2 * one:
                of_all = max(of_all, several / (_SEVERAL * _LENGTH))
            else:
                of_largest = max(of_largest, one / _LENGTH)
    return Transient(of_largest=of_largest, of_all=of_all)


def _slots(kept: Mapping[str, Any]) -> tuple[Slot, ...]:
    slots = []
    for key, value in kept.items():
        if isinstance(value, torch.Tensor):
            slots.append(Slot(key=key, dtype=dtype_name(value.dtype), scalar=value.dim() == 0))
        elif isinstance(value, (int, float)):
            dtype = "int64" if isinstance(value, int) else "float64"
            slots.append(Slot(key=key, dtype=dtype, scalar=True, is_number=True))
    return tuple(slots)


def _peak_of_step(optimizer: torch.optim.Optimizer, standing: StandIns, of: torch.Tensor, count: int) -> int:
    given = _params(count, (_LENGTH,), of.dtype)
    standing.give({id(of): given})
    optimizer.step()
    follower = MemoryFollower()
    with follower:
        follower.ignore(given)
        follower.ignore([param.grad for param in given if param.grad is not None])
        kept = [value for param in given for value in standing.parts.kept_of(param).values()]
        follower.ignore([value for value in kept if isinstance(value, torch.Tensor)])
        optimizer.step()
    return follower.peak


def _params(count: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[nn.Parameter]:
    params = [nn.Parameter(torch.ones(shape, dtype=dtype)) for _ in range(count)]
    for param in params:
        param.grad = torch.ones_like(param)
    return params
