"""A task's optimizer object, which is the same in every generation: only the parameters in its groups are exchanged.

Between two generations its groups hold the model's parameters without memory. Comparisons with other workers, and with
other generations, use the optimizer as it was built: steps change the groups.

A parameter that is held elsewhere cannot be exchanged: a step hook's closure may have a list of them. Such an optimizer
is built anew for every generation, and its model, too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, Self

import torch
from torch import nn

from raysharded.actors.model.inventory import Item, group_items
from raysharded.actors.optimizer.held_parameters import FormerMemory, ParameterForms, attributes_of, changed_attributes
from raysharded.actors.optimizer.inner_optimizers import OptimizerParts
from raysharded.actors.optimizer.loaded_state import OptimizerKind
from raysharded.actors.optimizer.read_watch import refusing_reads
from raysharded.actors.optimizer.step_hooks import HookCalls
from raysharded.actors.optimizer.trial import Verdict, try_out
from raysharded.actors.optimizer.trial_tensors import Marks
from raysharded.actors.task_calls.task_errors import naming
from raysharded.actors.task_calls.task_numbers import kind_of
from raysharded.errors import TaskError
from raysharded.task import Task


def made_by(task: Task, model: nn.Module) -> Any:
    """Result of `build_optimizer`. Raises TaskError, also if it reads or writes a parameter's values."""
    method = f"{type(task).__name__}.build_optimizer"
    with naming(method, "build_optimizer"), refusing_reads(method, model):
        return task.build_optimizer(model)


class BuiltOptimizer:
    """An optimizer, with all that was learned of it as it was built. Training thread only."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parts, self.hooks = OptimizerParts(optimizer), HookCalls(optimizer)
        self.keeps_groups = False
        """True if a worker that joins gets the numbers in the groups, as those of a session's registered state."""
        self.former = FormerMemory()
        """Memory of the parameters of a session's generation before."""
        self.registered: tuple[object, ...] = ()
        """A session's registered objects, which a worker that joins gets, too."""
        self.holds_elsewhere: str | None = None
        """Way to a parameter besides the groups and the model, as written in Python; None: there is none."""
        self._names: list[list[str]] = []
        self._settings: list[dict[str, Any]] = []
        self._kind: OptimizerKind | None = None
        self._items: tuple[Item, ...] = ()

    @classmethod
    def of(cls, task: Task, model: nn.Module) -> Self:
        """The task's optimizer of the model, which has memory. Raises TaskError."""
        forms, attributes = ParameterForms(model), attributes_of(model)
        in_modules = forms.ways_from_modules(model)
        made = made_by(task, model)
        if not hasattr(made, "param_groups"):
            raise TaskError(
                f"{type(task).__name__}.build_optimizer returned {kind_of(made)}: return a torch.optim.Optimizer."
            )
        built = cls(made)
        around = [*model.modules(), *built.parts.lists, *(part.state for part in built.parts.all)]
        roots: Mapping[str, object] = {"optimizer": built.optimizer, "task": task}
        ways = [name + path for name, one in roots.items() for path, _ in islice(forms.ways_from(one, around), 1)]
        ways += ["model" + path for path in sorted(forms.ways_from_modules(model) - in_modules)]
        ways += changed_attributes(attributes, model)
        built.holds_elsewhere = next(iter(ways), None)
        return built

    def tried(self, without: Collection[torch.Tensor], marks: Marks) -> Verdict:
        """The result of a trial. `without`, `marks`: as in `try_out`. Raises TaskError if a step cannot be tried."""
        return try_out(
            self.optimizer,
            self.hooks,
            without=without,
            keeps_groups=self.keeps_groups,
            registered=self.registered,
            marks=marks,
        )

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

    @property
    def names(self) -> list[list[str]]:
        """The names of each group's parameters, in the order of `parts.groups`."""
        found = {id(held): names for held, names in zip(self.parts.lists, self._names, strict=True)}
        return [found[id(group["params"])] for group in self.parts.groups]

    @property
    def is_as_built(self) -> bool:
        """True if it has the groups and state objects that it was built with, and as many parameters in each group."""
        lengths = [len(held) for held in self.parts.lists]
        return not self.parts.is_replaced and lengths == [len(names) for names in self._names]

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
