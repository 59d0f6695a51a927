"""All of torch's optimizers, and custom and hooked optimizers of real programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from tests.corpus.program import WIDTH, Block, Fit, Net, Program, Programs, adamw, fitted, momentum, vectors


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def of_groups(optimizer: Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def stepped_by(name: str, settings: dict[str, Any], model: nn.Module) -> Optimizer:
    """One of torch.optim."""
    made: Optimizer = getattr(torch.optim, name)(trained(model), **settings)
    return made


def _torchs(name: str, **settings: Any) -> Callable[[], Program]:
    return partial(_fitted, partial(stepped_by, name, {"lr": 0.01, **settings}))


def _fitted(optimize: Callable[[nn.Module], Optimizer]) -> Program:
    return fitted(Net, optimize=optimize)


def tensor_rate(model: nn.Module) -> Optimizer:
    return AdamW(trained(model), lr=torch.tensor(0.01), foreach=False, weight_decay=0.1)


def muon(model: nn.Module) -> Optimizer:
    matrices = [param for param in trained(model) if param.dim() == 2]
    vectors_of = [param for param in trained(model) if param.dim() != 2]
    return Several(torch.optim.Muon(matrices, lr=0.01), AdamW(vectors_of, lr=0.01))


# -- several in one --


class Several(Optimizer):
    """Steps several optimizers, each with separate parameters."""

    def __init__(self, *optimizers: Optimizer) -> None:
        super().__init__([group for one in optimizers for group in one.param_groups], {})
        self.optimizers = optimizers

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never called with a closure
        for one in self.optimizers:
            one.step()


class Pickled(Several):
    """Gives all of its attributes when it is copied."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__


def combined(made: type[Several], model: nn.Module) -> Optimizer:
    matrices = [param for param in trained(model) if param.dim() > 1]
    vectors_of = [param for param in trained(model) if param.dim() <= 1]
    return made(AdamW(matrices, lr=0.01), SGD(vectors_of, lr=0.01, momentum=0.9))


class Lookahead(Optimizer):
    """Pulls SGD's result back to slow weights in every second step (Zhang et al., 2019)."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in of_groups(self):
            if "slow" not in self.state[param]:
                self.state[param]["slow"] = param.detach().clone()
                self.state[param]["step"] = torch.tensor(0.0)
        self.inner.step()
        for param in of_groups(self):
            kept = self.state[param]
            kept["step"] += 1
            if int(kept["step"]) % 2 == 0:
                kept["slow"].lerp_(param, 0.5)
                param.copy_(kept["slow"])


def lookahead(model: nn.Module) -> Optimizer:
    return Lookahead(SGD(trained(model), lr=0.05, momentum=0.9))


# -- by hand --


class Lion(Optimizer):
    """Steps by signs (Chen et al., 2023)."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                param.add_((0.9 * mean + 0.1 * param.grad).sign(), alpha=-group["lr"])
                mean.lerp_(param.grad, 0.01)


def lion(model: nn.Module) -> Optimizer:
    return Lion(trained(model))


class Clipping(SGD):
    """Clips by the norm before it steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_(of_groups(self), 0.1)
        super().step(closure)


class Noisy(SGD):
    """Adds noise that it draws."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in of_groups(self):
            param.add_(torch.randn_like(param), alpha=0.01)


class Sized(SGD):
    """Keeps the size of its gradients, to log it."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for param in of_groups(self):
            if param.grad is not None:
                self.state[param]["rms"] = param.grad.square().mean().sqrt()


def by_sgd(made: type[SGD], model: nn.Module) -> Optimizer:
    return made(trained(model), lr=0.05)


# -- hooks --


def clipped_by_hook(model: nn.Module) -> Optimizer:
    optimizer = AdamW(trained(model), lr=0.01)
    optimizer.register_step_pre_hook(clip)
    return optimizer


def clip(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    nn.utils.clip_grad_norm_(of_groups(optimizer), 0.1)


class Warming:
    """Scales gradients by a separate counter."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.steps += 1
        for param in of_groups(optimizer):
            if param.grad is not None:
                param.grad.mul_(min(1.0, self.steps / 10))


def warmed_by_hook(model: nn.Module) -> Optimizer:
    optimizer = SGD(trained(model), lr=0.1)
    optimizer.register_step_pre_hook(Warming())
    return optimizer


def patched(model: nn.Module) -> Optimizer:
    optimizer = SGD(trained(model), lr=0.1)
    original = optimizer.step

    def step(closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return original(closure)

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def scheduled_by_hook(model: nn.Module) -> Optimizer:
    optimizer = SGD(trained(model), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def averaged_in_state(model: nn.Module) -> Optimizer:
    optimizer = AdamW(trained(model), lr=0.01)

    @torch.no_grad()
    def average(one: Optimizer, args: Any, kwargs: Any) -> None:
        for param in of_groups(one):
            one.state[param].setdefault("average", torch.zeros_like(param)).lerp_(param, 0.1)

    optimizer.register_step_post_hook(average)
    return optimizer


class Twins(nn.Module):
    """A net, and a frozen average of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.average = Net(), Net()
        self.average.requires_grad_(False)
        self.average.load_state_dict(self.net.state_dict())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.net(x) + 0.1 * self.average(x)
        return y


def moving_twin(model: nn.Module) -> Optimizer:
    assert isinstance(model, Twins)
    optimizer = AdamW(model.net.parameters(), lr=0.01)

    @torch.no_grad()
    def follow(*_: object) -> None:
        for mean, param in zip(model.average.parameters(), model.net.parameters(), strict=True):
            mean.lerp_(param, 0.5)

    optimizer.register_step_post_hook(follow)
    return optimizer


# -- hooks and marks on parameters --


def masking() -> nn.Module:
    """The first rows of a weight are not trained."""
    model = Net()
    mask = torch.ones(WIDTH, WIDTH)
    mask[:3] = 0
    model.first.weight.register_hook(lambda gradient: gradient * mask)
    return model


def after_accumulation() -> nn.Module:
    model = Net()

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    model.first.weight.register_post_accumulate_grad_hook(halve)
    return model


class Decaying(Block):
    """Some of its parameters are not to decay."""

    def __init__(self) -> None:
        super().__init__()
        self.decay = nn.Parameter(torch.ones(WIDTH))
        self.decay._no_weight_decay = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.decay.exp()


def by_marks(model: nn.Module) -> Optimizer:
    marked = [param for param in model.parameters() if getattr(param, "_no_weight_decay", False)]
    ids = set(map(id, marked))
    others = [param for param in model.parameters() if id(param) not in ids]
    groups: list[dict[str, Any]] = [{"params": others}, {"params": marked, "weight_decay": 0.0}]
    return AdamW(groups, lr=0.01, weight_decay=0.5)


def with_empty_group(model: nn.Module) -> Optimizer:
    groups: list[dict[str, Any]] = [{"params": []}, {"params": trained(model), "lr": 0.02}]
    return AdamW(groups, lr=0.01)


def biases_alone() -> nn.Module:
    model = Net()
    for name, param in model.named_parameters():
        param.requires_grad_(name.endswith("bias"))
    return model


def unit_frozen() -> nn.Module:
    model = Net()
    model.blocks[0].requires_grad_(False)
    return model


class Pooled(Net):
    """With a pooler that nobody calls."""

    def __init__(self) -> None:
        super().__init__()
        self.pooler = nn.Linear(WIDTH, WIDTH)


def half_trained() -> nn.Module:
    model = Net()
    model.head.requires_grad_(False)
    return model


def thawing(model: nn.Module) -> Optimizer:
    model.requires_grad_(True)
    return adamw(model)


# -- schedules --


class Scheduled(Fit):
    """Scales its rate by a table."""

    def __init__(self, scales: dict[int, Any]) -> None:
        super().__init__(Net)
        self.scales = scales

    def lr_scale(self, step: int) -> float:
        scale: float = self.scales.get(step, 1.0)
        return scale


def _scheduled(scales: dict[int, Any]) -> Callable[[], Program]:
    return lambda: Program(task=Scheduled(scales), data=vectors())


def _by(optimize: Callable[[nn.Module], Optimizer], make: Callable[[], nn.Module] = Net) -> Callable[[], Program]:
    return lambda: fitted(make, optimize=optimize)


def _made() -> Iterator[tuple[str, Callable[[], Program]]]:
    """Optimizers of torch.optim that need nothing else."""
    yield "adadelta", _torchs("Adadelta", lr=1.0)
    yield "adafactor", _torchs("Adafactor")
    yield "adagrad", _torchs("Adagrad")
    yield "adam", _torchs("Adam", amsgrad=True)
    yield "adamw", _by(tensor_rate)
    yield "adamw_fused", _torchs("AdamW", fused=True)
    yield "adamax", _torchs("Adamax", maximize=True)
    yield "asgd", _torchs("ASGD", t0=2)
    yield "lbfgs", _torchs("LBFGS")
    yield "muon", _by(muon)
    yield "nadam", _torchs("NAdam")
    yield "radam", _torchs("RAdam")
    yield "rmsprop", _torchs("RMSprop", centered=True, momentum=0.9)
    yield "rprop", _torchs("Rprop")
    yield "sgd", _torchs("SGD", momentum=0.9, nesterov=True, weight_decay=0.1)
    yield "sparse_adam", _torchs("SparseAdam")


PROGRAMS: Programs = {
    **dict(_made()),
    "hook_clips": _by(clipped_by_hook),
    "hook_counts": _by(warmed_by_hook),
    "patched_step": _by(patched),
    "combined": _by(partial(combined, Several)),
    "combined_getstate": _by(partial(combined, Pickled)),
    "lookahead": _by(lookahead),
    "gradient_hook": _by(adamw, masking),
    "post_accumulate_hook": _by(adamw, after_accumulation),
    "state_by_shard": _by(partial(by_sgd, Sized)),
    "scheduler_in_hook": _by(scheduled_by_hook),
    "clip_in_step": _by(partial(by_sgd, Clipping)),
    "noise_in_step": _by(partial(by_sgd, Noisy)),
    "lion": _by(lion),
    "ema_in_state": _by(averaged_in_state),
    "ema_twin": _by(moving_twin, Twins),
    "no_weight_decay": _by(by_marks, partial(Net, Decaying)),
    "empty_group": _by(with_empty_group),
    "bitfit": _by(adamw, biases_alone),
    "unit_frozen": _by(momentum, unit_frozen),
    "pooler_unused": _by(adamw, Pooled),
    "thawed_in_build_optimizer": _by(thawing, half_trained),
    "rate_nan": _scheduled({2: float("nan")}),
    "rate_none": _scheduled({2: None}),
    "rate_numpy": _scheduled({1: np.float32(0.5), 2: np.float64(0.25), 3: torch.tensor(0.5)}),
}
