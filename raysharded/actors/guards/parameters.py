"""Whole parameters in a forward and its backward: gradient hooks, and detection of changes that would be lost.

FSDP2 gathers a unit's whole parameters for its forward. Gradient hooks are registered on these, so that each gets the
whole gradient of each microbatch before it is reduced, as in plain torch. Changes that a forward makes to whole
parameters are lost with them: torch's version counter shows them. So is a gradient of a worker's part, which no unit
reduces: it is refused where it comes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from raysharded.actors.in_place.unit_hooks import UnitHooks
from raysharded.actors.model.parameter_marks import GradientHook
from raysharded.actors.model.sharded_model import clean_name
from raysharded.errors import InexactError

_Place = tuple[nn.Module, str, str]
"""(module, the parameter's name in it, the parameter's full name)"""


class ParameterWatch:
    """Watch of the parameters of one generation's model. Training thread only."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[tuple[str, UnitHooks]],
        hooks: Mapping[str, Sequence[GradientHook]],
        parts: Mapping[str, torch.Tensor],
    ) -> None:
        """`units`: the units' hooks. `hooks`: gradient hooks by parameter name. `parts`: the sharded parameters."""
        for name, part in parts.items():
            if isinstance(part, DTensor) and part.requires_grad:
                part.register_hook(RefusedGradient(name))
        self._hooks = hooks
        self._hooked = WeakTensorKeyDictionary()
        for unit, places in _places_by_unit(model, [unit for _, unit in units]):
            whole: list[tuple[str, torch.Tensor, int]] = []
            unit.before_forward(partial(self._before, places, whole))
            unit.after_forward(partial(self._after, whole))

    def _before(self, places: Sequence[_Place], whole: list[tuple[str, torch.Tensor, int]], *_: Any) -> None:
        whole.clear()
        for module, local, name in places:
            param = module._parameters[local]
            assert param is not None
            whole.append((name, param, param._version))
            if name in self._hooks and param.requires_grad and param not in self._hooked:
                self._hooked[param] = True
                for hook in self._hooks[name]:
                    param.register_hook(hook)

    def _after(self, whole: list[tuple[str, torch.Tensor, int]], *_: Any) -> None:
        for name, param, version in whole:
            if param._version != version:
                raise InexactError(
                    f"the forward changed the parameter {name!r} (as Embedding(max_norm=...) does): each worker has a "
                    "part of it, and changes to the whole parameter are lost. Compute from the parameter without "
                    "changing it, or change it in a step hook of the optimizer."
                )
        whole.clear()


class RefusedGradient:
    """The gradient hook of a sharded parameter: raises InexactError."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, _: torch.Tensor) -> None:
        raise InexactError(
            f"a gradient came to {self._name!r} from outside the forward of its unit, where a worker has a part of it: "
            "it would be lost. Compute a penalty on weights in the model's forward, or use weight decay."
        )


def _places_by_unit(model: nn.Module, units: Sequence[UnitHooks]) -> Iterator[tuple[UnitHooks, list[_Place]]]:
    """(unit's hooks, places of the parameters that no inner unit holds), for each unit with such parameters."""
    names = {id(module): clean_name(name) for name, module in model.named_modules()}
    inner_first = sorted(units, key=lambda unit: -len(names[id(unit.module)]))
    taken: set[int] = set()
    for unit in inner_first:
        places = []
        for module in unit.module.modules():
            for local, param in module._parameters.items():
                if param is not None and id(param) not in taken:
                    taken.add(id(param))
                    prefix = names[id(module)]
                    places.append((module, local, f"{prefix}.{local}" if prefix else local))
        if places:
            yield unit, places
