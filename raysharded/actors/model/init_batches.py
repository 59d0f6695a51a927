"""Batches of modules whose first weights are drawn together, and the calls of `Task.init_weights` that draw them.

Each module is drawn by itself, unless `init_weights` sets its weights when it gets another module. Examples are
`nn.init.zeros_` of a block's last layer, and a `reset_parameters` that reaches into children. Such modules are drawn
together. They are found by calling `init_weights` for every module that contains others, while no parameter has memory.
This takes almost no time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode  # torch's own profilers and sanitizers use it

from raysharded.actors.device.accelerator import seed_torch
from raysharded.actors.task_calls.task_errors import naming
from raysharded.data.access import generators
from raysharded.ids import derive_seed
from raysharded.task import Task

Batch = list[tuple[str, nn.Module]]
"""(name, module) pairs in the model's order."""
InitWeights = Callable[[nn.Module, torch.Generator], None]


class InitCalls:
    """Calls a task's `init_weights`, each module with its own seed."""

    def __init__(self, task: Task, init_weights: InitWeights, seed: int) -> None:
        """`seed`: the run's seed."""
        self._task, self._init_weights, self._seed = task, init_weights, seed

    def __call__(self, name: str, module: nn.Module) -> None:
        """Draw a module's weights. Raises TaskError for errors that the task raises."""
        what = f"{name!r}, a" if name else "the model, a"
        with naming(f"{type(self._task).__name__}.init_weights for {what} {type(module).__name__},"):
            self._call(name, module)

    def _call(self, name: str, module: nn.Module) -> None:
        seed = derive_seed(self._seed, "initial weights", name)
        generators.seed(seed, with_torch=False)
        seed_torch(seed)
        self._init_weights(module, torch.Generator().manual_seed(seed))

    def writes_of(self, name: str, module: nn.Module) -> set[int]:
        """The ids of inner modules' parameters that the call sets, as far as it runs without memory."""
        own = {id(param) for param in module._parameters.values()}
        before = {one: dict(one._parameters) for one in module.modules() if one is not module}
        storages = {
            _storage_of(param): id(param) for one in before.values() for param in one.values() if param is not None
        }
        writes = _Writes()
        try:
            with writes:
                self._call(name, module)
        except Exception:  # noqa: BLE001 - it may fail without memory; the real call raises any other error again
            pass
        found = {storages[storage] for storage in writes.storages if storage in storages}
        for one, parameters in before.items():
            for local, param in parameters.items():
                if one._parameters.get(local) is not param:
                    found.add(id(param))
            one._parameters.clear()
            one._parameters.update(parameters)
        return found - own


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _Writes(TorchDispatchMode):
    """Recorder of the storages of meta tensors that operations write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types there
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                if isinstance(value, torch.Tensor) and value.is_meta:
                    self.storages.add(_storage_of(value))
        return func(*args, **kwargs)


def batches_of(model: nn.Module, calls: InitCalls) -> Iterator[Batch]:
    """Batches, to be drawn together, of the modules that have parameters or that set others'.

    Every parameter is in the first batch of a module that has it.
    """
    modules = dict(model.named_modules())
    holders: dict[int, set[str]] = {}
    for name, module in modules.items():
        for param in module._parameters.values():
            if param is not None:
                holders.setdefault(id(param), set()).add(name)
    together = {name: {name} for name in modules}
    callers = {name for names in holders.values() for name in names}
    for name, module in modules.items():
        written = calls.writes_of(name, module) if next(module.children(), None) is not None else set()
        if written:
            callers.add(name)
            _join(together, {name}.union(*(holders[one] for one in written)))
    drawn: set[int] = set()
    order = {name: place for place, name in enumerate(modules)}
    for name in modules:
        batch = [one for one in sorted(together[name], key=order.__getitem__) if one in callers]
        own = {id(p) for one in batch for p in modules[one]._parameters.values() if p is not None}
        if own - drawn:
            drawn |= own
            yield [(one, modules[one]) for one in batch]


def _join(together: dict[str, set[str]], names: set[str]) -> None:
    joined = set[str]().union(*(together[name] for name in names))
    for name in joined:
        together[name] = joined
