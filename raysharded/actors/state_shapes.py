"""Refuses an optimizer whose state is cut otherwise than its parameters are: in no mode could it be handed on."""

from __future__ import annotations

import torch
from torch import nn

from raysharded.actors.trial import with_params
from raysharded.errors import InexactError

_LENGTHS = (5, 3, 2)


def require_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Raise InexactError unless all that one step keeps of a parameter has its shape, or none. Takes milliseconds."""
    found = next((found for group in optimizer.param_groups for found in _reshaped(optimizer, group)), None)
    if found is not None:
        raise InexactError(
            f"{type(optimizer).__name__} keeps {found}: it cannot be handed on when the number of workers changes, in "
            "exact mode or in fast mode. Use one whose state has the shapes of the parameters: SGD, Adam or AdamW; in "
            'fast mode (EngineConfig(reduction="fast")) Muon, too.'
        )


def _reshaped(optimizer: torch.optim.Optimizer, group: dict[str, object]) -> list[str]:
    settings = {key: value for key, value in group.items() if key != "params"}
    params = group["params"]
    assert isinstance(params, list)
    found = []
    for dims in sorted({min(param.dim(), len(_LENGTHS)) for param in params}):
        tried = nn.Parameter(torch.ones(_LENGTHS[:dims]))
        tried.grad = torch.ones_like(tried)
        twin = with_params(optimizer, dict(settings), [tried])
        try:
            twin.step()
        except Exception:  # noqa: BLE001 - any code of the task's; where it matters the run's own step raises it
            continue
        found += [
            f"{key!r} of a parameter of shape {tuple(tried.shape)} in the shape {tuple(value.shape)}"
            for key, value in twin.state[tried].items()
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != tried.shape
        ]
    return found
