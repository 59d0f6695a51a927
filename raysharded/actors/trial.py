"""Trying the task's optimizer once, on tensors that mean nothing, before a run depends on it.

Some kernels round differently in their vector tails, where a shard's end falls: steps on shards of odd lengths are
compared with steps on the whole. And a worker that takes another's place makes the optimizer anew and has only what was
kept of its parameters: steps of one optimizer are compared with those of one that is made anew for each.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from raysharded.actors.bits import tensor_digest

_LENGTH = 4099
_WIDTH = 3
_CUTS = (0, 1, 14, 45, 300, 1369, 2740, 2741, 4099)
_STEPS = 8
_OF_TORCH = frozenset(
    ("state", "param_groups", "defaults", "_warned_capturable_if_run_uncaptured", "_need_device_dtype_check_for_fused")
)
"""Attributes of torch's optimizers that say nothing of what they remember."""


@dataclass(frozen=True, slots=True)
class _Case:
    """Parameters that are alike for an optimizer."""

    settings: dict[str, Any]
    """Of their group."""
    shape: tuple[int, ...]
    """That is tried in place of theirs; matrices may have rules of their own."""
    dtype: torch.dtype
    device: torch.device


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether steps on shards of odd lengths give the bits of steps on the whole, for every group's settings."""
    return all(_same_on_shards(optimizer, case) for case in _cases(optimizer))


def not_handed_on(optimizer: torch.optim.Optimizer) -> str:
    """What it does that no other worker would learn of, and that changes its steps, in words; empty if nothing."""
    for case in _cases(optimizer):
        usual = _Steps(optimizer, case, anew=False)
        late = sorted(usual.keys[-1] ^ usual.keys[0])
        if late:
            return f"makes {late[0]!r} of its state after its first step"
        try:
            anew = _Steps(optimizer, case, anew=True).param
        except Exception:  # noqa: BLE001 - any code may miss what it had kept, in its own way
            anew = None
        if anew is None or _bits(anew) != _bits(usual.param):
            return f"changes {usual.changed[0]} in its steps" if usual.changed else "remembers something of its own"
    return ""


def with_params(
    optimizer: torch.optim.Optimizer, settings: dict[str, Any], params: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """The same optimizer over other parameters, without knowing its constructor. It has attributes of its own."""
    twin = copy.copy(optimizer)
    vars(twin).update(copy.deepcopy(_attributes(optimizer)))
    twin.state = defaultdict(dict)
    twin.param_groups = [{**copy.deepcopy(settings), "params": params}]
    return twin


def _cases(optimizer: torch.optim.Optimizer) -> list[_Case]:
    """Each once."""
    found: dict[object, _Case] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        shown = tuple(sorted((key, repr(value)) for key, value in settings.items()))
        for param in group["params"]:
            shape = (_LENGTH, *[_WIDTH] * min(param.dim() - 1, 3))
            case = _Case(settings, shape, param.dtype, param.device)
            found.setdefault((case.shape, case.dtype, case.device, shown), case)
    return list(found.values())


class _Draws:
    """The same random tensors each time, for a case."""

    def __init__(self, case: _Case) -> None:
        self._case, self._generator = case, torch.Generator().manual_seed(0)

    def draw(self) -> torch.Tensor:
        drawn = torch.randn(self._case.shape, generator=self._generator)
        return drawn.to(device=self._case.device, dtype=self._case.dtype)


def _same_on_shards(optimizer: torch.optim.Optimizer, case: _Case) -> bool:
    draws = _Draws(case)
    start = draws.draw()
    cuts = list(pairwise(_CUTS))
    whole = [nn.Parameter(start.clone())]
    parts = [nn.Parameter(start[a:b].clone()) for a, b in cuts]
    of_whole, of_parts = (with_params(optimizer, case.settings, params) for params in (whole, parts))
    for _ in range(_STEPS):
        gradient = draws.draw()
        whole[0].grad = gradient.clone()
        for part, (a, b) in zip(parts, cuts, strict=True):
            part.grad = gradient[a:b].clone()
        of_whole.step()
        of_parts.step()
    return torch.equal(whole[0].detach(), torch.cat([part.detach() for part in parts]))


class _Steps:
    """Some steps of an optimizer; `anew`: one that is made anew for each, with the state of its parameter alone."""

    def __init__(self, optimizer: torch.optim.Optimizer, case: _Case, *, anew: bool) -> None:
        draws = _Draws(case)
        param = nn.Parameter(draws.draw())
        twin = with_params(optimizer, case.settings, [param])
        before = _remembered(twin)
        self.keys: list[frozenset[str]] = []
        """Of the state that it has of its parameter, after each step."""
        for _ in range(_STEPS):
            if anew:
                kept = dict(twin.state.get(param, {}))
                twin = with_params(optimizer, case.settings, [param])
                if kept:
                    twin.state[param] = kept
            param.grad = draws.draw()
            twin.step()
            state = twin.state.get(param, {})
            self.keys.append(frozenset(key for key, value in state.items() if value is not None))
        self.param = param.detach()
        self.changed = sorted(name for name, value in _remembered(twin).items() if before.get(name) != value)
        """What it keeps elsewhere and is not as it was, by name."""


def _remembered(optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """What an optimizer of one group keeps beside the state of its parameters, as far as it is plain: name -> bits."""
    group = {f"{key!r} of its groups": value for key, value in optimizer.param_groups[0].items() if key != "params"}
    state = {f"state[{key!r}]": value for key, value in optimizer.state.items() if not isinstance(key, torch.Tensor)}
    found = {**group, **state, **{f"self.{name}": value for name, value in _attributes(optimizer).items()}}
    return {name: _bits(value) for name, value in found.items() if _is_plain(value)}


def _attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's own, as far as they are plain."""
    return {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH and _is_plain(value)}


def _is_plain(value: object) -> bool:
    """Numbers, text and tensors, and what is made of them; a parameter is none of an optimizer's own."""
    match value:
        case dict():
            return all(_is_plain(one) for one in value.values())
        case list() | tuple():
            return all(_is_plain(one) for one in value)
        case _:
            return value is None or type(value) in (bool, int, float, str, torch.Tensor)


def _bits(value: object) -> object:
    """Equal for equal values, to the bit."""
    match value:
        case torch.Tensor():
            return value.dtype, tuple(value.shape), int(tensor_digest(value).item())
        case dict():
            return [(repr(key), _bits(one)) for key, one in value.items()]
        case list() | tuple():
            return [_bits(one) for one in value]
        case _:
            return repr(value)
