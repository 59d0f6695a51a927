"""Idioms that many programs share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import raysharded as rs
from tests.corpus.language_models import _GPT2, TEXTS
from tests.corpus.program import WIDTH, Block, Fit, Net, Program, Programs, fitted, vectors
from tests.corpus.stock import VOCABULARY, Stock, next_token, tokens_lost


class Tied(nn.Module):
    """An embedding and a head that are one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(x)
        return logits


def next_of(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    return tokens_lost(model(batch[:, :-1]), batch[:, 1:])


class Assigned(Block):
    """Its weight is assigned through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.weight.data = torch.eye(WIDTH) * 0.5
        self.linear.bias.data = self.linear.bias.data.clone().zero_()


class Depths(nn.Module):
    """Stochastic depth, rates that rise with the depth."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.4, 3)]
        assert self.rates[-1] > 0.3
        self.blocks = nn.ModuleList([Block() for _ in self.rates])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for rate, block in zip(self.rates, self.blocks, strict=True):
            kept = (torch.rand(len(x), 1) >= rate).float() / (1 - rate) if self.training else 1.0
            x = x + kept * (block(x) - x)
        y: torch.Tensor = self.head(x)
        return y


class Zeroed(Block):
    """Begins as the identity."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.linear.weight)
        with torch.no_grad():
            self.linear.bias.zero_()


class Applied(Net):
    """Draws its weights by `apply` when all modules are made."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.2)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.LayerNorm):
            module.weight.data.fill_(1.0)


class Resized(Stock):
    """With three tokens more than its configuration has."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.resize_token_embeddings(VOCABULARY + 3)  # type: ignore[operator]
        return model


def resized() -> Program:
    return Program(task=Resized("GPT2LMHeadModel", _GPT2, next_token), data=TEXTS)


def parametrized(change: Callable[[nn.Linear], nn.Module]) -> nn.Module:
    model = Net()
    for block in model.blocks:
        change(block.linear)  # type: ignore[arg-type]
    return model


class Lazy(nn.Module):
    """A layer that is made when its input is known."""

    def __init__(self) -> None:
        super().__init__()
        self.lazy, self.head = nn.LazyLinear(8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.lazy(x).tanh())
        return y


def counted(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    y, counts = model(batch), batch[:, 0] > 0
    each = (y - 1).square().mean(1)
    return rs.Loss(
        each.sum(), len(batch), {"positive": ((each * counts).sum(), counts.sum()), "largest": (y.detach().max(), 1)}
    )


def mixed_up(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    share = float(np.random.beta(0.4, 0.4))
    return (model(share * batch + (1 - share) * batch[torch.randperm(len(batch))]) - share).square().mean()


def in_autocast(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(batch)
    return (y.float() - 1).square().mean()


class Recomputing(Net):
    """Its forward computes the blocks again in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        y: torch.Tensor = self.head(x)
        return y


class Reentrant(Net):
    """Computes the blocks again, in the reentrant way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        y: torch.Tensor = self.head(x)
        return y


class Asserting(Block):
    """Checks its draws."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.trunc_normal_(self.linear.weight, std=0.2, a=-1.0, b=1.0)
        assert self.linear.weight.abs().max() <= 1.0


class Directed(nn.Module):
    """Adapters of a frozen weight, and of its rows' lengths (Liu et al., 2024)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4, requires_grad=False)
        self.length = nn.Parameter(torch.ones(WIDTH, 1))
        self.down, self.up = nn.Parameter(torch.randn(2, WIDTH) * 0.2), nn.Parameter(torch.zeros(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        moved = self.weight + self.up @ self.down
        return x + torch.tanh(x @ (self.length * moved / moved.norm(dim=1, keepdim=True)).T)


class Weighted(Net):
    """Keeps the weights of its classes."""

    shares: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shares", torch.tensor([1.0, 2.0, 0.5]))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        assert labels is not None
        return F.cross_entropy(
            super().forward(x), labels, self.shares, ignore_index=-100, label_smoothing=0.1, reduction="sum"
        )


def smoothed(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    labels = (batch[:, 0].abs() * 50).long() % 4
    return rs.Loss(model(batch, labels.masked_fill(labels == 3, -100)), (labels != 3).sum())


def by_layers(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, Net)
    groups: list[dict[str, Any]] = [{"params": list(model.first.parameters()), "lr": 1e-3}]
    for depth, block in enumerate(model.blocks):
        groups.append({"params": list(block.parameters()), "lr": 2e-3 * 2**depth})
    return torch.optim.AdamW([*groups, {"params": list(model.head.parameters())}], lr=1e-2)


class Rotary(nn.Module):
    """Positions by cosines and sines that the constructor computes."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 8)
        angles = torch.outer(torch.arange(16.0), 1 / 10000 ** (torch.arange(0, 8, 2) / 8)).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.embedding(tokens)).chunk(3, -1)
        length = tokens.shape[1]
        q, k = (x * self.cos[:length] + x.roll(4, -1) * self.sin[:length] for x in (q, k))
        attended = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        logits: torch.Tensor = self.head(attended)
        return logits


class Listed(nn.Module):
    """Parameters in a list and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4) for _ in range(2)])
        self.biases = nn.ParameterDict({"up": torch.zeros(WIDTH), "down": torch.zeros(1)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ weight + self.biases["up"])
        return x - self.biases["down"]


class Parallel(nn.Module):
    """Widens and narrows again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


class Cut(Fit):
    """Declares its cut by tensor parallelism."""

    def parallelize(self, model: nn.Module, mesh: DeviceMesh) -> Mapping[str, ParallelStyle]:
        return {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}


def tensor_parallel() -> Program:
    return Program(task=Cut(partial(Net, Parallel)), data=vectors())


def _of(make: Callable[[], nn.Module], measure: Any = None, data: Any = None, **others: Any) -> Callable[[], Program]:
    given = {**({"measure": measure} if measure else {}), **({"data": data} if data else {})}
    return lambda: fitted(make, **given, **others)


PROGRAMS: Programs = {
    "idiom_tied_head": _of(Tied, next_of, TEXTS),
    "idiom_data_assigned": _of(partial(Net, Assigned)),
    "idiom_item_in_constructor": _of(Depths),
    "idiom_zero_init": _of(partial(Net, Zeroed)),
    "idiom_apply": _of(Applied),
    "idiom_resized_embeddings": resized,
    "idiom_weight_norm": _of(partial(parametrized, parametrizations.weight_norm)),
    "idiom_orthogonal": _of(partial(parametrized, parametrizations.orthogonal)),
    "idiom_lazy_linear": _of(Lazy),
    "idiom_accumulated_metrics": _of(Net, counted),
    "idiom_mixup": _of(Net, mixed_up),
    "idiom_autocast": _of(Net, in_autocast),
    "idiom_checkpoint": _of(Recomputing),
    "idiom_checkpoint_reentrant": _of(Reentrant, whole=True),
    "idiom_asserts": _of(partial(Net, Asserting)),
    "idiom_dora": _of(partial(Net, Directed)),
    "idiom_label_smoothing": _of(Weighted, smoothed),
    "idiom_layerwise_rates": _of(Net, optimize=by_layers),
    "idiom_rope_cache": _of(Rotary, next_of, TEXTS),
    "idiom_parameter_list": _of(Listed),
    "idiom_tensor_parallel": tensor_parallel,
}
