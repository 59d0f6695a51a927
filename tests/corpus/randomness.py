"""Draws, memories and counters outside of the parameters; and numbers at the edges."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import nn

import raysharded as rs
from tests.corpus.program import SAMPLES, WIDTH, Block, Fit, Net, Program, Programs, fitted, momentum, squares, vectors


class Drawing:
    """A custom dataset."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return vectors()[index]


class Seeding(Drawing):
    """Seeds torch's generator with the index, and draws from it."""

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.manual_seed(index)
        return torch.randn(WIDTH)


class Sometimes(Drawing):
    """Draws from NumPy's generator for every second sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        return sample + torch.from_numpy(np.random.standard_normal(WIDTH)).float() if index % 2 else sample


class Unseeded(Drawing):
    """Draws from a separate generator."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        return super().__getitem__(index) + float(self.generator.random())


def drawn_in_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    shift = float(np.random.standard_normal()) + random.gauss(0.0, 1.0)
    return (model(batch) - shift).square().mean()


class Counting(Block):
    """Weighs by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 0.01 * self.calls)


class Counted(Fit):
    """Weighs by the number of calls of its loss."""

    calls = 0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        self.calls += 1
        return squares(model, batch) * (1 + 0.01 * self.calls)


class Queue(Net):
    """Compares with its last inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        against = y - self.queue
        self.queue = y.detach().mean(0)
        return against


def changed_in_place(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    batch.mul_(0.5).clamp_(-1, 1)
    return model(batch).square().mean()


def of_all_sizes(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    y = model(batch)
    return (y[:, 0] * 1e28 + y[:, 1] * 1e-28 + y[:, 2]).mean()


def subnormal(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean() * 1e-42


def overflowing(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).mean() * 1e200


def still(model: nn.Module) -> torch.optim.Optimizer:
    """At a rate so small that nothing overflows."""
    return torch.optim.SGD(model.parameters(), lr=1e-30)


def in_float64() -> nn.Module:
    return Net().double()


def still64(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-202)


def counted() -> Program:
    return Program(task=Counted(Net), data=vectors())


def _on(data: Drawing) -> Callable[[], Program]:
    return lambda: fitted(Net, data=data)


PROGRAMS: Programs = {
    "data_seeds_by_index": _on(Seeding()),
    "data_draws_sometimes": _on(Sometimes()),
    "data_own_generator": _on(Unseeded()),
    "draws_in_loss": lambda: fitted(Net, measure=drawn_in_loss),
    "counter_in_module": lambda: fitted(partial(Net, Counting)),
    "counter_in_task": counted,
    "queue": lambda: fitted(Queue),
    "batch_in_place": lambda: fitted(Net, measure=changed_in_place),
    "gradients_of_all_sizes": lambda: fitted(Net, measure=of_all_sizes, optimize=still),
    "subnormal": lambda: fitted(Net, measure=subnormal, optimize=momentum),
    "float64_overflow": lambda: fitted(
        in_float64, measure=overflowing, optimize=still64, data=vectors(WIDTH, torch.float64)
    ),
}
