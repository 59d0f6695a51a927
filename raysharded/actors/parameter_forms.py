"""Forms of parameters and of their gradients that FSDP2 does not shard: laid out as it does, or refused by name."""

from __future__ import annotations

from torch import nn

from raysharded.errors import TaskError
from raysharded.task import Task


def lay_out_plainly(model: nn.Module) -> None:
    """Let parameters lie row by row: of those that do not (`channels_last`, a transposed weight) no worker could have
    some rows as one stretch of memory. `model` has them on the meta device, where that changes no value.

    Convolutions still compute in channels_last where their inputs come so.
    """
    for param in model.parameters():
        if not param.is_contiguous():
            param.data = param.data.contiguous()


def refuse_sparse_gradients(task: Task, model: nn.Module) -> None:
    """Raise TaskError for a module that is told to give them."""
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
