"""Values that a constructor draws, keeps, and leaves behind; and first weights by a module at a time."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn

from tests.corpus.program import WIDTH, Block, Fit, Net, Program, Programs, fitted, vectors

NAMES = ("query", "key", "value", "gate", "out")


class Table(Net):
    """Adds a table that its constructor draws, as a plain attribute."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.keep(torch.randn(WIDTH, WIDTH))

    def keep(self, table: torch.Tensor) -> None:
        self.table = table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x @ self.table.to(x.dtype))


class Buffered(Table):
    def keep(self, table: torch.Tensor) -> None:
        self.register_buffer("table", table, persistent=False)


class Persistent(Table):
    def keep(self, table: torch.Tensor) -> None:
        self.register_buffer("table", table)


class FromNumpy(Table):
    def keep(self, table: torch.Tensor) -> None:
        self.table = torch.from_numpy(np.random.standard_normal((WIDTH, WIDTH))).float()


class Seeded(Table):
    def keep(self, table: torch.Tensor) -> None:
        self.table = torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(7))


class Permuted(Net):
    """Permutes its inputs by draws of torch or `random` in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.order: Any = torch.randperm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x[:, self.order])


class Shuffled(Permuted):
    def __init__(self) -> None:
        super().__init__()
        self.order = list(range(WIDTH))
        random.shuffle(self.order)


class OrderedBySet(nn.Module):
    """Makes its modules in the order of a set of names."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(WIDTH, WIDTH) for name in set(NAMES)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in NAMES:
            x = torch.tanh(self.parts[name](x))
        return x


class Anchored(Net):
    """Is pulled towards its first weights."""

    def __init__(self) -> None:
        super().__init__()
        self.start = self.first.weight.detach().clone()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (x @ self.start.T)[:, :3]


class AnchoredInList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.anchors = [param.detach().clone() for param in self.first.parameters()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + (x @ self.anchors[0].T)[:, :3]


class AnchoredInHook(Net):
    def __init__(self) -> None:
        super().__init__()
        start = self.first.weight.detach().clone()

        def pull(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output + args[0] @ start.T

        self.first.register_forward_hook(pull)


def with_bfloat16_left() -> nn.Module:
    torch.set_default_dtype(torch.bfloat16)
    return Net().float()


def with_gradients_off() -> nn.Module:
    torch.set_grad_enabled(False)
    return Net()


def with_threads_left() -> nn.Module:
    torch.set_num_threads(2)
    return Net()


def weighed(model: nn.Module, batch: torch.Tensor) -> Any:
    """A loss with a metric and a weight that bfloat16 does not have."""
    import raysharded as rs

    return rs.Loss((model(batch) - 1).square().sum(), 1013, {"items": (1013.0, 1)})


# -- init_weights --


class Drawn(Fit):
    """Draws its weights a module at a time."""

    def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3, generator=generator)
            nn.init.normal_(module.bias, std=0.1, generator=generator)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()


class Gated(Block):
    """A block with a parameter in addition to its children's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gate


class ZeroesChild(Drawn):
    """Zeroes the last layer of each block."""

    def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
        super().init_weights(module, generator)
        if isinstance(module, Gated):
            nn.init.ones_(module.gate)
            nn.init.zeros_(module.linear.weight)


class Attending(nn.Module):
    """nn.MultiheadAttention between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention, self.head = nn.Linear(1, 8), nn.MultiheadAttention(8, 2), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.T[:, :, None])
        y: torch.Tensor = self.head(self.attention(x, x, x)[0])
        return y


class ResetsAttention(Drawn):
    """Calls the attention's own reset, which sets a bias of its child."""

    def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
        super().init_weights(module, generator)
        if isinstance(module, nn.MultiheadAttention):
            module._reset_parameters()


class Scale(nn.Module):
    """A parameter, and no way to reset it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__(Block)
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.scale(x))


class Resets(Fit):
    """Assumes that every module can be reset."""

    def init_weights(self, module: nn.Module, generator: torch.Generator) -> None:
        module.reset_parameters()  # type: ignore[operator]


def gated() -> nn.Module:
    return Net(Gated)


def _task(task: Fit) -> Callable[[], Program]:
    return lambda: Program(task=task, data=vectors())


PROGRAMS: Programs = {
    "table_attribute": lambda: fitted(Table),
    "table_buffer": lambda: fitted(Buffered),
    "permutation": lambda: fitted(Permuted),
    "table_numpy": lambda: fitted(FromNumpy),
    "table_random": lambda: fitted(Shuffled),
    "table_own_generator": lambda: fitted(Seeded),
    "table_persistent": lambda: fitted(Persistent),
    "set_ordered": lambda: fitted(OrderedBySet, steps=2),
    "weight_copied": lambda: fitted(Anchored),
    "weight_in_list": lambda: fitted(AnchoredInList),
    "weight_in_closure": lambda: fitted(AnchoredInHook),
    "default_dtype_left": lambda: fitted(with_bfloat16_left, measure=weighed),
    "grad_mode_left": lambda: fitted(with_gradients_off),
    "threads_left": lambda: fitted(with_threads_left),
    "init_weights": _task(Drawn(Net)),
    "init_zeroes_child": _task(ZeroesChild(gated)),
    "init_resets_attention": _task(ResetsAttention(Attending)),
    "init_without_reset": _task(Resets(Scaled)),
}
