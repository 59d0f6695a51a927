"""What happens to whole parameters in a forward and its backward: their gradient hooks, and changes that would be lost.

FSDP2 makes a unit's parameters whole for its forward. A hook on a gradient is registered on those, so that it gets
each microbatch's whole gradient before it is reduced, as in plain torch. And what a forward writes to them is lost with
them: torch counts it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.weak import WeakTensorKeyDictionary

from raysharded.actors.model.parameter_marks import GradientHook
from raysharded.actors.model.sharded_model import clean_name
from raysharded.errors import InexactError

_Place = tuple[nn.Module, str, str]
"""(module, the parameter's name in it, its whole name)"""


class ParameterWatch:
    """Of one generation's model. Training thread only."""

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[tuple[str, FSDPModule]],
        hooks: Mapping[str, Sequence[GradientHook]],
    ) -> None:
        """`hooks`: on the gradients of parameters, by name."""
        self._hooks = hooks
        self._hooked = WeakTensorKeyDictionary()
        for unit, places in _places_by_unit(model, [unit for _, unit in units]):
            whole: list[tuple[str, torch.Tensor, int]] = []
            unit.register_forward_pre_hook(partial(self._before, places, whole))  # after FSDP2's, which gathers
            unit.register_forward_hook(partial(self._after, whole), prepend=True)  # before FSDP2's, which frees

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
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

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # torch gives it no types
    def _after(self, whole: list[tuple[str, torch.Tensor, int]], *_: Any) -> None:
        for name, param, version in whole:
            if param._version != version:
                raise InexactError(
                    f"the forward changed the parameter {name!r} (as Embedding(max_norm=...) does): each worker has a "
                    "part of it, and what a forward writes to the whole is lost. Compute what is needed from the "
                    "parameter without changing it, or change it in a step hook of the optimizer."
                )
        whole.clear()


def _places_by_unit(model: nn.Module, units: Sequence[FSDPModule]) -> Iterator[tuple[nn.Module, list[_Place]]]:
    """Each unit with the parameters that no unit inside it holds."""
    names = {id(module): clean_name(name) for name, module in model.named_modules()}
    inner_first = sorted(units, key=lambda unit: -len(names[id(unit)]))
    taken: set[int] = set()
    for unit in inner_first:
        assert isinstance(unit, nn.Module)
        places = []
        for module in unit.modules():
            for local, param in module._parameters.items():
                if param is not None and id(param) not in taken:
                    taken.add(id(param))
                    prefix = names[id(module)]
                    places.append((module, local, f"{prefix}.{local}" if prefix else local))
        if places:
            yield unit, places
