"""Tensor parallelism: the task's parallel styles applied to a model on the meta device, and the dimensions they cut."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

from raysharded.actors.task_calls.task_errors import naming
from raysharded.errors import ConfigError
from raysharded.task import Task, require_tensor_parallelism


def parallelize(task: Task, model: nn.Module, mesh: DeviceMesh) -> dict[str, int]:
    """Apply the task's parallel styles over the workers of a 1-D mesh; return parameter -> the dimension they cut.

    `model` has its parameters on the meta device. Raises ConfigError for a plan that does not fit the model.
    """
    name = type(task).__name__
    require_tensor_parallelism(task, mesh.size())
    tied = _tied(model)
    with naming(f"{name}.parallelize"), _missing_modules_are_errors(name):
        plan = task.parallelize(model, mesh)
        if plan is not None:
            parallelize_module(model, mesh, dict(plan))
    _check_still_tied(name, tied)
    dims = {
        parameter: dim
        for parameter, param in model.named_parameters()
        if (dim := _tensor_dim(name, parameter, param, mesh.size())) is not None
    }
    if not dims:
        raise ConfigError(f"{name}.parallelize cut none of the model's parameters: nothing would be gained by it.")
    return dims


@contextmanager
def _missing_modules_are_errors(task: str) -> Iterator[None]:
    """Raise ConfigError for a plan's key that matches no module: torch only warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Parallelize plan key")
        try:
            yield
        except UserWarning as warning:
            key = str(warning).split("'")[1]
            raise ConfigError(
                f"{task}.parallelize names the module {key!r}, which the model does not have; a key is a path of "
                "module names, in which * stands for any."
            ) from None


def _tensor_dim(task: str, name: str, param: nn.Parameter, degree: int) -> int | None:
    if not isinstance(param, DTensor):
        return None
    (placement,) = param.placements
    if isinstance(placement, Replicate):
        return None
    if type(placement) is not Shard:
        raise ConfigError(f"{task}.parallelize places {name!r} as {placement}; give it Shard(dim) or Replicate().")
    dim = placement.dim % param.dim()
    if dim and param.shape[dim] % degree:
        raise ConfigError(
            f"{task}.parallelize cuts dimension {dim} of {name!r}, of length {param.shape[dim]}, over {degree} "
            "workers; choose a tensor_parallel_degree that divides it."
        )
    return dim


def _tied(model: nn.Module) -> list[list[tuple[nn.Module, str, str]]]:
    """(module, name in it, full name) of each occurrence, for every parameter that occurs several times."""
    places: dict[int, list[tuple[nn.Module, str, str]]] = defaultdict(list)
    for prefix, module in model.named_modules():
        for name, param in module._parameters.items():
            if param is not None:
                places[id(param)].append((module, name, f"{prefix}.{name}" if prefix else name))
    return [same for same in places.values() if len(same) > 1]


def _check_still_tied(task: str, tied: list[list[tuple[nn.Module, str, str]]]) -> None:
    for same in tied:
        if len({id(module._parameters[name]) for module, name, _ in same}) > 1:
            names = " and ".join(full for _, _, full in same)
            raise ConfigError(
                f"{task}.parallelize unties {names}, which share one weight: torch's parallel styles give each module "
                "a separate parameter. Leave these modules out of the plan, or give them separate weights."
            )
