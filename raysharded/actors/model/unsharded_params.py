"""Parameters that FSDP2 cannot shard as they are: made contiguous, kept whole by every worker, or refused by name.

FSDP2 shards along the first dimension. It leaves scalars alone: a temperature, or CLIP's `logit_scale`. They are plain
parameters of the shape that the task gave them, which a loss may use as well. `tree_reducer` adds their gradients.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharded.errors import ConfigError, TaskError
from raysharded.task import Task


def scalars_of(model: nn.Module) -> set[nn.Parameter]:
    """The scalar parameters of a model; tied ones once."""
    return {param for param in model.parameters() if not param.dim()}


def refuse_spread_scalars(task: Task, model: nn.Module) -> None:
    """Raise ConfigError for a scalar that the task's parallel styles made a DTensor, as they do with whole modules."""
    for name, param in model.named_parameters():
        if not param.dim() and isinstance(param, DTensor):
            raise ConfigError(
                f"{type(task).__name__}.parallelize spreads the parameter {name!r} over the workers, which is a "
                "scalar; leave its module out of the plan, or give the parameter the shape (1,)."
            )


def allocate_scalars(model: nn.Module, device: torch.device) -> None:
    """Allocate the scalars on the meta device; tied ones stay tied, unlike with `nn.Module._apply`."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and not param.dim() and param.is_meta:
                if param not in made:
                    made[param] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                module._parameters[name] = made[param]


def lay_out_plainly(model: nn.Module) -> None:
    """Make parameters contiguous, so that a worker's rows of each are one stretch of memory.

    Parameters in `channels_last`, or transposed ones, are not contiguous. `model` has its parameters on the meta
    device, where this changes no value. Convolutions still compute in channels_last if their inputs are.
    """
    for param in model.parameters():
        if not param.is_contiguous():
            param.data = param.data.contiguous()


def refuse_sparse_gradients(task: Task, model: nn.Module) -> None:
    """Raise TaskError for a module that makes sparse gradients."""
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and _is_trained(weight):
            raise TaskError(
                f"{name or 'the model'} is an {type(module).__name__} with sparse=True, and sparse gradients cannot be "
                f"sharded, nor added in one order. Leave it out in {type(task).__name__}.build_model: the gradient is "
                "the same, dense, and any optimizer but SparseAdam takes it."
            )


def _is_trained(weight: object) -> bool:
    return isinstance(weight, nn.Parameter) and weight.requires_grad
