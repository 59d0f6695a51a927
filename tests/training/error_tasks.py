"""Tasks that torch refuses with its own messages, and tasks that it used to refuse: see `test_task_errors.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs

WIDTH = 6


class Net(nn.Module):
    """Two linear layers in a `ModuleList`, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.head = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.encode(x))
        return y


class Regression(rs.Task):
    """The squared outputs of a model, trained by SGD."""

    def build_model(self) -> nn.Module:
        return Net()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        y: torch.Tensor = model(batch)
        return y.square().mean()


def rows() -> list[torch.Tensor]:
    """Samples as wide as the model."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(WIDTH, generator=generator) for _ in range(32)]


class Sparse(Regression):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, WIDTH, sparse=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.table((x > 0).long())
            return y

    def build_model(self) -> nn.Module:
        return self.Model()


class SparseCall(Regression):
    """`F.embedding` with `sparse=True` in forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(10, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.embedding((x > 0).long(), self.table, sparse=True)

    def build_model(self) -> nn.Module:
        return self.Model()


class OtherMethod(Regression):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert isinstance(model, Net)
        y = model.encode(batch)
        return y.square().mean()


class Submodule(Regression):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model.get_submodule("head")(batch)
        return y.square().mean()


class SubmoduleAfter(Regression):
    """Calls a part of a unit after the model's forward."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(batch)
        z = F.linear(y, model.get_parameter("layers.0.weight"))
        return z.square().mean()


class Penalty(Regression):
    """L2 over all parameters in the loss."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(batch)
        return y.square().mean() + 0.01 * sum(param.square().sum() for param in model.parameters())


class GradientPenalty(Regression):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        x = batch.clone().requires_grad_(True)
        y: torch.Tensor = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + slope.square().mean()


class TwoBackwards(Regression):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model(batch).square().mean().backward()
        y: torch.Tensor = model(batch)
        return y.square().mean()


class RetainedBackward(Regression):
    """Calls backward itself, and returns the same loss."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(batch).square().mean()
        y.backward()
        return y


class Closure(Regression):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(model.parameters())


class LoneMuon(Regression):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([param for param in model.parameters() if param.dim() == 2])


class AllMuon(Regression):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon(model.parameters())


class NothingReturned(Regression):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:  # type: ignore[return]  # it forgets to
        torch.optim.AdamW(model.parameters())


class Bare:
    """An object of a plain class."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class Objects(Regression):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Bare:
            return Bare(self.linear(x))

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Objects.Layer() for _ in range(2)])

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x).hidden
            return x

    def build_model(self) -> nn.Module:
        return self.Model()


class View(Regression):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.linear(x)[:, :WIDTH]
            return y

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([View.Layer() for _ in range(2)])

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
                x += 1.0
            return x

    def build_model(self) -> nn.Module:
        return self.Model()


class NothingAtAll(Regression):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return rs.Loss(torch.zeros(()), len(batch))


class RootObject(Regression):
    """One unit, the root, that returns an object."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> Bare:
            return Bare(self.head(x))

    def build_model(self) -> nn.Module:
        return self.Model()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(batch).hidden
        return y.square().mean()


class RootView(Regression):
    """One unit, the root, whose output is a view that the loss changes."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, 2 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(x)[:, :WIDTH]
            return y

    def build_model(self) -> nn.Module:
        return self.Model()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(batch)
        y += 1.0
        return y.square().mean()


class InputAlone(Regression):
    """Its loss has a graph, of the input, and none of the model."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        model(batch)
        return batch.requires_grad_(True).square().mean()


class Detached(Regression):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(batch)
        return y.detach().square().mean()


class MeanOverNothing(Regression):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(batch)
        return y[batch > 100.0].square().mean()


class Large(Regression):
    """Finite gradients whose squares are too large for float64."""

    def build_model(self) -> nn.Module:
        return Net().double()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(batch.double())
        return y.mean() * 1e200


class NoRate(Regression):
    def lr_scale(self, step: int) -> float:
        return None  # type: ignore[return-value]


class TextRate(Regression):
    def lr_scale(self, step: int) -> float:
        return "1"  # type: ignore[return-value]


class InPlace(Regression):
    class Model(Net):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(self.layers[0](x))
            y = x * 2
            x += 1.0
            z: torch.Tensor = self.layers[1](x)
            return y + z

    def build_model(self) -> nn.Module:
        return self.Model()


class Twice(Regression):
    """Keeps a part of the graph from one microbatch to the next."""

    def __init__(self) -> None:
        self.kept: Any = None

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(batch)
        loss = y.square().mean() + (0.0 if self.kept is None else self.kept)
        self.kept = loss
        return loss


class WithNone:
    """A dataset with `None` at some places."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return None if index % 5 == 3 else torch.zeros(WIDTH)


class Ragged:
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(WIDTH + index % 3)


class Stream:
    """A length, but no places."""

    def __len__(self) -> int:
        return 32

    def __iter__(self) -> Any:
        return iter(rows())

    def __getitem__(self, index: int) -> Any:
        raise NotImplementedError("a stream has no places")


class WrapsList(Regression):
    def wrap(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule("layers")]


class WrapRaises(Regression):
    def wrap(self, model: nn.Module) -> list[nn.Module]:
        return [dict(model.named_children())["blocks"]]
