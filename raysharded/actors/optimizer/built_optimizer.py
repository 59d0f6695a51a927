"""A task's optimizer object, which is the same in every generation: only the parameters in its groups are exchanged.

Between two generations its groups hold the model's parameters without memory. Comparisons with other workers, and with
other generations, use the optimizer as it was built: steps change the groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raysharded.actors.model.inventory import Item, group_items
from raysharded.actors.optimizer.inner_optimizers import OptimizerParts
from raysharded.actors.optimizer.loaded_state import OptimizerKind
from raysharded.actors.optimizer.step_hooks import HookCalls


class BuiltOptimizer:
    """An optimizer, with all that was learned of it as it was built. Training thread only."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parts, self.hooks = OptimizerParts(optimizer), HookCalls(optimizer)
        self._settings: list[dict[str, Any]] = []
        self._kind: OptimizerKind | None = None
        self._items: tuple[Item, ...] = ()

    def note(self, names: Mapping[int, str]) -> OptimizerKind:
        """The optimizer as built, which the first call records. `names`: id of a parameter in the groups -> name."""
        if self._kind is None:
            self._kind = OptimizerKind.of(self.parts, names)
            self._items = tuple(group_items(self.parts.groups, names))
            self._settings = [{k: v for k, v in group.items() if k != "params"} for group in self.parts.groups]
        return self._kind

    @property
    def items(self) -> tuple[Item, ...]:
        """The groups as built, for the comparison with other workers."""
        return self._items

    def exchange(self, names: Mapping[int, str], parameters: Mapping[str, torch.Tensor]) -> None:
        """Replace each parameter in the groups whose id `names` has by the one of this name."""
        for held in self.parts.lists:
            for place, param in enumerate(held):
                if id(param) in names:
                    held[place] = parameters[names[id(param)]]

    def release(self, names: Mapping[int, str], origin: Mapping[str, nn.Parameter]) -> None:
        """Drop the state, and leave the groups as they were built, with parameters without memory.

        `names`: id of a parameter in the groups -> its name. `origin`: the model's parameters without memory, by name.
        """
        self.hooks.unwatch()
        self.parts.forget()
        self.exchange(names, origin)
        for group, settings in zip(self.parts.groups, self._settings, strict=False):
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)
