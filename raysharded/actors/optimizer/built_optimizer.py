"""A task's optimizer object, which is the same in every generation: only the parameters in its groups are exchanged.

Between two generations its groups hold the model's parameters without memory. Comparisons with other workers, and with
other generations, use the optimizer as it was built: steps change the groups.

A parameter that is held elsewhere cannot be exchanged: a step hook's closure may have a list of them. Such an optimizer
is built anew for every generation.
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
from raysharded.actors.task_calls.object_contents import reachable


class BuiltOptimizer:
    """An optimizer, with all that was learned of it as it was built. Training thread only."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parts, self.hooks = OptimizerParts(optimizer), HookCalls(optimizer)
        self.holds_elsewhere: str | None = None
        """Way to a parameter that is not in the groups alone, as written in Python; None: there is none."""
        self._names: list[list[str]] = []
        self._settings: list[dict[str, Any]] = []
        self._kind: OptimizerKind | None = None
        self._items: tuple[Item, ...] = ()

    def search(self, task: object, model: nn.Module) -> None:
        """Look for the model's parameters in all that the optimizer and its task hold, besides the model itself."""
        ids = {id(param) for param in model.parameters()}
        without = [*model.modules(), *self.parts.lists, *(part.state for part in self.parts.all)]
        for name, root in (("optimizer", self.optimizer), ("task", task)):
            for path, found in reachable(root, without=without):
                if id(found) in ids or (isinstance(found, dict) and any(id(key) in ids for key in found)):
                    self.holds_elsewhere = name + path
                    return

    def note(self, names: Mapping[int, str]) -> OptimizerKind:
        """The optimizer as built, which the first call records. `names`: id of a parameter in the groups -> name."""
        if self._kind is None:
            self._kind = OptimizerKind.of(self.parts, names)
            self._items = tuple(group_items(self.parts.groups, names))
            self._names = [[names[id(param)] for param in held] for held in self.parts.lists]
            self._settings = [{k: v for k, v in group.items() if k != "params"} for group in self.parts.groups]
        return self._kind

    @property
    def items(self) -> tuple[Item, ...]:
        """The groups as built, for the comparison with other workers."""
        return self._items

    def exchange(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Put these parameters, by name, into the groups in place of the present ones."""
        for held, names in zip(self.parts.lists, self._names, strict=False):
            held[:] = [parameters[name] for name in names]

    def release(self, origin: Mapping[str, nn.Parameter]) -> None:
        """Drop the state, and leave the groups as they were built, with parameters without memory.

        `origin`: the model's parameters without memory, by name.
        """
        self.hooks.unwatch()
        self.parts.forget()
        self.exchange(origin)
        for group, settings in zip(self.parts.groups, self._settings, strict=False):
            for key in group.keys() - settings.keys() - {"params"}:
                del group[key]
            group.update(settings)
