"""The model of a session between `session.build` and `session.shard`: its parameters have no memory there.

First weights are drawn in `make()`, or by `init_weights`. Values that a loop writes in between would be lost, so a
write raises an error. So does a change of the model's parts, as `make()` is called again for the values. In `shard` the
model gets other parameters: those that the loop has kept from before are of no generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from raysharded.actors.model.meta_watch import MemoryWatch
from raysharded.actors.model.parameter_marks import share
from raysharded.actors.model.sharded_model import clean_name
from raysharded.actors.optimizer.built_optimizer import BuiltOptimizer
from raysharded.actors.optimizer.held_parameters import refuse_use
from raysharded.actors.task_calls.task_errors import line_here
from raysharded.errors import TaskError

_REMEDY = "Do it in the function that session.build calls, or draw first weights by session.build(init_weights=...)."


class _WriteWatch(MemoryWatch):
    """Also raises an error for an operation that writes to one of these parameters, or to a view of it."""

    def __init__(self, names: Mapping[int, str]) -> None:
        """`names`: identity of a parameter's storage -> its name."""
        super().__init__(self._no_values)
        self._names = names

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args:
            written = args[0] if isinstance(args[0], (list, tuple)) else (args[0],)
            for one in written:
                if name := self._name_of(one):
                    raise TaskError(f"{line_here()}: {_called(func)} of {name!r} would be lost: {_WHY} {_REMEDY}")
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _name_of(self, tensor: object) -> str | None:
        return self._names.get(_storage_of(tensor)) if isinstance(tensor, torch.Tensor) and tensor.is_meta else None

    def _no_values(self, tensor: torch.Tensor) -> Exception:
        name = self._name_of(tensor)
        of_it = f"the values of {name!r}" if name else f"the values of a tensor of shape {tuple(tensor.shape)}"
        return TaskError(f"{line_here()}: {of_it} were read, or moved to a device: {_WHY} {_REMEDY}")


_WHY = "parameters have no memory between session.build and session.shard, which puts them on the worker's device."


def _storage_of(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _called(func: Any) -> str:
    return str(func._schema.name).partition("::")[2]


class BuiltModel:
    """A model, from `session.build` to `session.shard`. Thread of the function only."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._built = _parts_of(model)
        names = {_storage_of(param): clean_name(name) for name, param in model.named_parameters()}
        self._watch: _WriteWatch | None = _WriteWatch(names)
        self._watch.__enter__()  # type: ignore[no-untyped-call]  # torch has no types there

    def end(self) -> None:
        """Look for writes no longer. Idempotent."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.__exit__(None, None, None)  # type: ignore[no-untyped-call]  # torch has no types there

    def require_unchanged(self) -> None:
        """Raise TaskError if the model has other parameters than `make()` returned."""
        now = _parts_of(self.model)
        for name, (param, *form) in now.items():
            if name not in self._built:
                raise TaskError(f"{line_here()}: the parameter {name!r} was added behind session.build. {_REMEDY}")
            was, *before = self._built[name]
            if param is not was or form != before:
                raise TaskError(
                    f"{line_here()}: the parameter {name!r} was replaced, tied or converted behind session.build. "
                    f"{_REMEDY}"
                )
        missing = sorted(self._built.keys() - now.keys())
        if missing:
            raise TaskError(f"{line_here()}: the parameter {missing[0]!r} was removed behind session.build. {_REMEDY}")

    def renew(self, optimizer: BuiltOptimizer) -> None:
        """Give the model and the optimizer other parameters without memory; the former ones refuse to be used."""
        renewed: dict[nn.Parameter, nn.Parameter] = {}
        for module in self.model.modules():
            for name, param in list(module._parameters.items()):
                if param is not None:
                    if param not in renewed:
                        renewed[param] = nn.Parameter(param.detach(), requires_grad=param.requires_grad)
                        share(param, renewed[param])
                    setattr(module, name, renewed[param])
        optimizer.exchange({name: param for name, (param, *_) in _parts_of(self.model).items()})
        refuse_use(renewed, "from before session.shard")


def _parts_of(model: nn.Module) -> dict[str, tuple[nn.Parameter, torch.dtype, torch.Size]]:
    """Each parameter and its form by every name that it has: tied ones have several."""
    named = model.named_parameters(remove_duplicate=False)
    return {clean_name(name): (param, param.dtype, param.shape) for name, param in named}
