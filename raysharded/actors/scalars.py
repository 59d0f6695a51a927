"""Parameters of no dimensions (a temperature, CLIP's `logit_scale`), of which no worker can have a part: all have them.

FSDP2 shards along the first dimension and leaves these alone: they are plain parameters of the shape that the task gave
them, which a loss may use as well. Their gradients: see `scalar_gradients.py`.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharded.errors import ConfigError
from raysharded.task import Task


def scalars_of(model: nn.Module) -> set[nn.Parameter]:
    """Those of a model; tied ones once."""
    return {param for param in model.parameters() if not param.dim()}


def refuse_spread_scalars(task: Task, model: nn.Module) -> None:
    """Raise ConfigError for one that the task's parallel styles have made a DTensor, as they do with whole modules."""
    for name, param in model.named_parameters():
        if not param.dim() and isinstance(param, DTensor):
            raise ConfigError(
                f"{type(task).__name__}.parallelize spreads the parameter {name!r} over the workers, which is a "
                "scalar; leave its module out of the plan, or give the parameter the shape (1,)."
            )


def allocate_scalars(model: nn.Module, device: torch.device) -> None:
    """Give those that are on the meta device their memory; what is tied stays so, as `nn.Module._apply` would not."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None and not param.dim() and param.is_meta:
                if param not in made:
                    made[param] = nn.Parameter(torch.empty_like(param, device=device), param.requires_grad)
                module._parameters[name] = made[param]
