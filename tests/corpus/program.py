"""The program of a row of the corpus: a task with its data and settings, and pieces that many of them are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import nn

import raysharded as rs

SEED = 5
WIDTH, SAMPLES = 6, 41


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A task with its data and settings. All of it can be pickled, and is imported by the workers."""

    task: rs.Task
    data: Any
    steps: int = 3
    microbatches: int = 3
    microbatch_size: int = 2
    engine: rs.EngineConfig = field(default_factory=rs.EngineConfig)
    evaluation: rs.EvalConfig | None = None
    then: rs.Task | None = None
    """The task that continues from the checkpoint after `steps` for two steps more."""
    tolerance: float = 1e-5
    """Limit of the difference to plain torch's number or tensor, as a part of the largest."""
    plain: rs.Task | None = None
    """The task for plain torch, where the task itself would behave differently there."""


Programs = Mapping[str, Callable[[], Program]]
"""Programs by the row's name; called where they are run."""
Optimize = Callable[[nn.Module], torch.optim.Optimizer]
Measure = Callable[[nn.Module, Any], "rs.Loss | torch.Tensor"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with weight decay, over all trained parameters."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.1)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    """Plain descent with momentum, over all trained parameters."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)


def squares(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """The mean square of the model's output for the batch, less one."""
    return (model(batch) - 1).square().mean()


class Fit(rs.Task):
    """Trains a model that a function makes."""

    def __init__(
        self,
        make: Callable[[], nn.Module],
        *,
        optimize: Optimize = adamw,
        measure: Measure = squares,
        whole: bool = False,
        max_grad_norm: float | None = None,
    ) -> None:
        """`whole`: no unit but the root."""
        self.make, self.optimize, self.measure, self.whole = make, optimize, measure, whole
        self.max_grad_norm = max_grad_norm

    def build_model(self) -> nn.Module:
        return self.make()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.optimize(model)

    def loss(self, model: nn.Module, batch: Any) -> rs.Loss | torch.Tensor:
        return self.measure(model, batch)

    def wrap(self, model: nn.Module) -> list[nn.Module] | None:
        return [] if self.whole else None


class Block(nn.Module):
    """A norm, a linear layer, dropout, and the way around them."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.dropout(self.linear(self.norm(x))).tanh()
        return y


class Net(nn.Module):
    """A layer, blocks that are units, and a head."""

    def __init__(self, make: Callable[[], nn.Module] = Block, blocks: int = 2) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([make() for _ in range(blocks)])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


@cache
def vectors(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> Sequence[torch.Tensor]:
    """Samples of so many numbers each."""
    return [
        torch.randn(width, generator=torch.Generator().manual_seed(index), dtype=torch.float64).to(dtype)
        for index in range(SAMPLES)
    ]


@cache
def texts(vocabulary: int, length: int, first: int = 3) -> Sequence[torch.Tensor]:
    """Samples of so many tokens each, none below `first`, where the special ones are."""
    return [
        torch.randint(first, vocabulary, (length,), generator=torch.Generator().manual_seed(index))
        for index in range(SAMPLES)
    ]


@cache
def pictures(channels: int, side: int) -> Sequence[torch.Tensor]:
    """Square pictures."""
    shape = (channels, side, side)
    return [torch.randn(shape, generator=torch.Generator().manual_seed(index)) for index in range(SAMPLES)]


def fitted(make: Callable[[], nn.Module], **settings: Any) -> Program:
    """A program of `Fit` on vectors; settings are those of `Fit`, and then those of `Program`."""
    own = {name: settings.pop(name) for name in ("optimize", "measure", "whole", "max_grad_norm") if name in settings}
    return Program(**{"task": Fit(make, **own), "data": vectors(), **settings})
