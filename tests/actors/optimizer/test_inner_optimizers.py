"""An optimizer with others inside: the outermost comes first, and paths are not those of a loop's own state."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from raysharded.actors.optimizer.inner_optimizers import REGISTERED, OptimizerParts
from raysharded.errors import TaskError


class Holding(SGD):
    """Has another optimizer under a name."""

    def __init__(self, param: nn.Parameter, name: str) -> None:
        super().__init__([param], lr=0.1, momentum=0.9)
        setattr(self, name, AdamW([param], lr=0.1))


def test_the_state_of_the_outermost_optimizer_comes_first() -> None:
    param = nn.Parameter(torch.zeros(2))
    optimizer = Holding(param, "inner")
    param.grad = torch.ones(2)
    optimizer.step()
    optimizer.inner.step()  # type: ignore[attr-defined]
    assert list(OptimizerParts(optimizer).kept_of(param)) == [
        "momentum_buffer",
        "inner:step",
        "inner:exp_avg",
        "inner:exp_avg_sq",
    ]


def test_the_path_of_a_loops_registered_state_belongs_to_no_inner_optimizer() -> None:
    param = nn.Parameter(torch.zeros(2))
    parts = OptimizerParts(Holding(param, "inner"))
    parts.hold_registered(["average"])
    parts.keep(param, f"{REGISTERED}:average", 1.0)
    with pytest.raises(KeyError):
        parts.keep(param, f"{REGISTERED}:other", 1.0)
    with pytest.raises(TaskError, match="holds another one as 'registered': give that attribute another name"):
        OptimizerParts(Holding(param, REGISTERED)).hold_registered(["average"])
