"""The first weights of a run: the same at every number of workers, drawn whole and cut afterwards.

A task with `init_weights` gets one module at a time, so that a model larger than a worker's memory starts as a small
one does; otherwise the whole model is built once on the CPU, as its constructor draws it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from raysharded.actors.build import clean_name, parameters_on_meta, persistent_buffers
from raysharded.actors.cuts import BUFFER, MODEL
from raysharded.errors import TaskError
from raysharded.ids import derive_seed
from raysharded.task import Task


def initial_tensors(task: Task, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Every parameter and persistent buffer of the first state, whole, in batches of one module at least.

    The yielded tensors may be dropped before the next are drawn. Global random state is left as it was.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, "initial weights"))
        if task.init_weights is None:
            yield _whole(task.build_model())
        else:
            yield from _by_module(task, seed)


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    params = {MODEL + clean_name(name): param.detach() for name, param in model.named_parameters()}
    return params | _buffers(model)


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {BUFFER + clean_name(name): buffer for name, buffer in persistent_buffers(model)}


def _by_module(task: Task, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    init_weights = task.init_weights
    assert init_weights is not None
    with parameters_on_meta():
        model = task.build_model()
    yield _buffers(model)
    names = {id(param): MODEL + clean_name(name) for name, param in model.named_parameters()}
    for name, module in model.named_modules():
        metas = dict(module.named_parameters(recurse=False))
        fresh = {local: param for local, param in metas.items() if id(param) in names}
        if not fresh:
            continue
        for local, param in metas.items():
            module._parameters[local] = nn.Parameter(
                torch.full_like(param, float("nan") if param.is_floating_point() else 0, device="cpu"),
                requires_grad=param.requires_grad,
            )
        module_seed = derive_seed(seed, "initial weights", name)
        torch.manual_seed(module_seed)
        init_weights(module, torch.Generator().manual_seed(module_seed))
        drawn = {names.pop(id(param)): module._parameters[local] for local, param in fresh.items()}
        for full_name, tensor in drawn.items():
            if tensor is None or (tensor.is_floating_point() and torch.isnan(tensor).any()):
                raise TaskError(
                    f"{type(task).__name__}.init_weights left {full_name.removeprefix(MODEL)!r} of a "
                    f"{type(module).__name__} without values (or drew NaN); initialise every parameter of the module "
                    "it is given."
                )
        yield {full_name: tensor.detach() for full_name, tensor in drawn.items() if tensor is not None}
        module._parameters.update(metas)
