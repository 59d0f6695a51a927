"""Optimizers whose step depends on the gradient of a worker's part: zero, large, or without elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.optimizer.shard_optimizer import ShardOptimizer
from raysharded.errors import InexactError
from tests.session.loops import Loop, run
from tests.training.harness import VOCABULARY, GptTask, train


class Own(torch.optim.Optimizer):
    """SGD with momentum, and a rule that decides for each parameter whether it is stepped."""

    def __init__(self, params: Iterable[nn.Parameter], momentum: float = 0.9) -> None:
        super().__init__(params, {"lr": 0.1, "momentum": momentum})

    def is_skipped(self, param: nn.Parameter, gradient: torch.Tensor) -> bool:
        return False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never called with a closure
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None and not self.is_skipped(param, param.grad):
                    change = param.grad
                    if group["momentum"]:
                        state = self.state[param]
                        if not state:
                            state["average"] = torch.zeros_like(param)
                        change = state["average"].mul_(group["momentum"]).add_(change)
                    self.change(param, change, group["lr"])

    def change(self, param: nn.Parameter, change: torch.Tensor, rate: float) -> None:
        param.sub_(change * rate)


class SkipsZero(Own):
    def is_skipped(self, param: nn.Parameter, gradient: torch.Tensor) -> bool:
        return not gradient.any()


class BeginsLate(Own):
    """Its results do not depend on the cut, but a worker's state begins with its part's first gradient."""

    def is_skipped(self, param: nn.Parameter, gradient: torch.Tensor) -> bool:
        return not self.state[param] and not gradient.any()


class SkipsSpikes(Own):
    def is_skipped(self, param: nn.Parameter, gradient: torch.Tensor) -> bool:
        return bool((gradient.abs() > 1e5).any())


class SkipsEmpty(Own):
    def is_skipped(self, param: nn.Parameter, gradient: torch.Tensor) -> bool:
        return not param.numel()


class SkipsZeroElements(Own):
    """Decides for each element alone: exact at every number of workers."""

    def change(self, param: nn.Parameter, change: torch.Tensor, rate: float) -> None:
        assert param.grad is not None
        param.copy_(torch.where(param.grad != 0, param - change * rate, param))


class SkipsZeroRows(Own):
    """Decides for each row, which workers have whole."""

    def change(self, param: nn.Parameter, change: torch.Tensor, rate: float) -> None:
        assert param.grad is not None
        rows = param.grad.flatten(1).any(dim=1) if param.dim() > 1 else param.grad != 0
        param[rows] -= change[rows] * rate


class NeedsElements(Own):
    """Raises for a part without elements, which changes no bit, and never comes where there are many rows."""

    def is_skipped(self, param: nn.Parameter, gradient: torch.Tensor) -> bool:
        return bool(gradient.max().isnan())


def without_momentum(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return SkipsZero(params, momentum=0.0)  # such a step changes nothing


class Tables(rs.Task):
    def __init__(self, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], rows: int = 12) -> None:
        self._make, self._rows = make, rows

    def build_model(self) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(self._rows, 4), nn.Linear(4, 3))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self._make(model.parameters())


def shard_optimizer(task: rs.Task) -> tuple[ShardOptimizer, nn.Parameter]:
    model = task.build_model()
    return ShardOptimizer(task, model, dict(model.named_parameters()), exact=True), model.get_parameter("0.weight")


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (SkipsZero, r"SkipsZero skips a parameter whose gradient is zero.* would show in the weights\. .*torch\.where"),
        (BeginsLate, r"BeginsLate skips a parameter whose gradient is zero.* would show in 'average' of the state"),
        (SkipsSpikes, r"SkipsSpikes treats a parameter with large numbers in its gradient unlike others"),
        (SkipsEmpty, r"SkipsEmpty skips a parameter without elements.* in 'average' of the state\. .* of empty ones"),
    ],
)
def test_a_step_that_depends_on_the_gradient_of_one_part_is_refused_with_its_rule(
    make: type[Own], sentence: str
) -> None:
    optimizer, _ = shard_optimizer(Tables(make))
    with pytest.raises(InexactError, match=sentence):
        optimizer.try_out()


@pytest.mark.parametrize("make", [Own, SkipsZeroElements, SkipsZeroRows, NeedsElements, without_momentum])
def test_a_step_that_decides_for_each_element_or_row_alone_is_accepted(
    make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
) -> None:
    optimizer, _ = shard_optimizer(Tables(make))
    optimizer.try_out()


def test_the_refused_rule_would_depend_on_the_number_of_workers() -> None:
    def trained(make: type[Own], rows: int) -> list[torch.Tensor]:
        """Parts of an embedding of which the second half is used in the first step alone."""
        parts = []
        for first in range(0, 12, rows):
            optimizer, part = shard_optimizer(Tables(make, rows))
            with torch.no_grad():
                part.fill_(1.0)
            for step in (1, 2):
                part.grad = torch.ones(12, 4)[first : first + rows]
                if step == 2:
                    part.grad[max(6 - first, 0) :] = 0.0
                optimizer.apply(step, 1.0)
            parts.append(part.detach())
        return parts

    assert not torch.equal(torch.cat(trained(SkipsZero, 12)), torch.cat(trained(SkipsZero, 6)))
    assert torch.equal(torch.cat(trained(Own, 12)), torch.cat(trained(Own, 6)))


def test_an_optimizer_of_half_precision_is_tried_with_finite_numbers() -> None:
    class Half(Tables):
        def build_model(self) -> nn.Module:
            return super().build_model().to(torch.float16)

    optimizer, _ = shard_optimizer(Half(SkipsZeroElements))
    optimizer.try_out()


class SkipsByLength(Own):
    """Skips a length that no trial has, and only the second of two workers."""

    def is_skipped(self, param: nn.Parameter, gradient: torch.Tensor) -> bool:
        return len(param) == VOCABULARY // 2


class LengthTask(GptTask):
    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return SkipsByLength(model.parameters())


LENGTHS = (
    r"step 1: the optimizer keeps other state on some workers than on others: worker \d+ has 'average' \(a tensor of "
    r"float32\) for 'embedding\.weight', where worker \d+ has nothing for 'embedding\.weight'"
)


@pytest.mark.procs
def test_workers_whose_optimizers_keep_other_state_are_named_in_the_first_step() -> None:
    with pytest.raises(InexactError, match=LENGTHS):
        train(2, task=LengthTask(), steps=2)


class LengthLoop(Loop):
    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return SkipsByLength(model.parameters())


@pytest.mark.procs
def test_workers_of_a_loop_whose_optimizers_keep_other_state_are_named_in_the_first_step() -> None:
    with pytest.raises(InexactError, match=LENGTHS):
        run(2, LengthLoop(), steps=2)
