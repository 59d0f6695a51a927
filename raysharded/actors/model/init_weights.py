"""The first weights of a run, independent of the number of workers: drawn whole and cut afterwards.

`Task.init_weights` gets one module at a time, so that a model larger than a worker's memory starts like a small one.
Modules whose weights it sets while it gets another one, as a block's last layer, are drawn with that one. Without
`init_weights` the whole model is built once on the CPU, as its constructor draws it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from raysharded.actors.model.construction import construct, construct_whole
from raysharded.actors.model.init_batches import InitCalls, InitWeights, batches_of
from raysharded.actors.model.param_layout import BUFFER, MODEL
from raysharded.actors.model.sharded_model import clean_name, persistent_buffers
from raysharded.actors.task_calls.task_errors import naming
from raysharded.data.access import generators
from raysharded.errors import TaskError
from raysharded.task import Task

_PURPOSE = "initial weights"


@dataclass(frozen=True, kw_only=True, slots=True)
class FirstBuild:
    """The build at a run's start that gives the first state."""

    task: Task
    seed: int
    """The run's seed."""
    model: nn.Module
    """The model: whole if the task has no `init_weights`, otherwise without memory for its parameters."""

    def tensors(self) -> Iterator[dict[str, torch.Tensor]]:
        """Every parameter and persistent buffer of the first state, whole, in batches of at least one module.

        A batch may be dropped before the next is drawn. The process's generators are left unchanged.
        """
        if self.task.init_weights is None:
            yield {MODEL + clean_name(name): param.detach() for name, param in self.model.named_parameters()} | (
                self._buffers()
            )
        else:
            yield self._buffers()
            yield from _by_module(self.task, self.task.init_weights, self.model, self.seed)

    def _buffers(self) -> dict[str, torch.Tensor]:
        return {BUFFER + clean_name(name): buffer for name, buffer in persistent_buffers(self.model)}


def first_build(task: Task, seed: int) -> FirstBuild:
    """Build the model for the first state. The process's generators are left unchanged."""
    with naming(f"{type(task).__name__}.build_model", "build"):
        if task.init_weights is None:
            return FirstBuild(task=task, seed=seed, model=construct_whole(task, seed, _PURPOSE))
        return FirstBuild(task=task, seed=seed, model=construct(task, seed, _PURPOSE).model)


def _by_module(task: Task, init: InitWeights, model: nn.Module, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    names = {id(param): MODEL + clean_name(name) for name, param in model.named_parameters()}
    draw = InitCalls(task, init, seed)
    with generators.kept():
        batches = list(batches_of(model, draw))
    for batch in batches:
        metas = [dict(module._parameters) for _, module in batch]
        fresh: dict[str, tuple[nn.Module, str]] = {}
        reals: dict[int, nn.Parameter] = {}
        for (_, module), own in zip(batch, metas, strict=True):
            for local, param in own.items():
                if param is not None:
                    module._parameters[local] = reals.setdefault(id(param), _undrawn(param))
                    if id(param) in names:
                        fresh[names.pop(id(param))] = module, local
        with generators.kept():
            for name, module in reversed(batch):  # inner modules first, as in `nn.Module.apply`
                draw(name, module)
        yield {name: _drawn(task, name, *where) for name, where in fresh.items()}
        for (_, module), own in zip(batch, metas, strict=True):
            module._parameters.update(own)


def _undrawn(param: nn.Parameter) -> nn.Parameter:
    value = float("nan") if param.is_floating_point() else 0
    return nn.Parameter(torch.full_like(param, value, device="cpu"), requires_grad=param.requires_grad)


def _drawn(task: Task, name: str, module: nn.Module, local: str) -> torch.Tensor:
    tensor = module._parameters[local]
    if tensor is None or (tensor.is_floating_point() and torch.isnan(tensor).any()):
        raise TaskError(
            f"{type(task).__name__}.init_weights left {name.removeprefix(MODEL)!r} of a {type(module).__name__} "
            "without values (or drew NaN); initialise every parameter of the module it is given."
        )
    return tensor.detach()
