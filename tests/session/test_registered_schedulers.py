"""Schedulers whose state does not go back with the step are refused, of all optimizers inside the registered one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, SequentialLR, StepLR

from raysharded.actors.optimizer.registered_state import Stateful
from raysharded.actors.session.loop_checks import require_registered
from raysharded.errors import InexactError


class Both(torch.optim.Optimizer):
    """Steps two optimizers."""

    def __init__(self) -> None:
        first, second = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
        self.adamw, self.sgd = torch.optim.AdamW([first], lr=0.1), torch.optim.SGD([second], lr=0.2)
        super().__init__([first, second], {})
        self.param_groups = self.adamw.param_groups + self.sgd.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.adamw.step()
        self.sgd.step()


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer, with its groups."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        self.base = base
        super().__init__(base.param_groups, {})
        self.param_groups = base.param_groups


class Holder:
    """Holds schedulers, and has such parts of their state in its own."""

    def __init__(
        self, schedulers: list[LRScheduler], save: Callable[[list[LRScheduler]], Any] = lambda _: None
    ) -> None:
        self.schedulers, self.save, self.loaded = schedulers, save, 0

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.save(self.schedulers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded += 1


class ByEpoch(Holder):
    """Has one number of its scheduler in its state."""

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.schedulers[0].last_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedulers[0].last_epoch = state["epoch"]


class ByCount(Holder):
    """Counts steps by itself, and sets its scheduler by them."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": 0}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedulers[0].last_epoch = state["count"]
        for group in self.schedulers[0].optimizer.param_groups:
            group["lr"] = 7.0


def test_schedulers_of_all_inner_optimizers_are_to_be_registered() -> None:
    both = Both()
    of_adamw, of_sgd = CosineAnnealingLR(both.adamw, 10), StepLR(both.sgd, 3)
    partly: list[dict[str, Stateful]] = [{}, {"a": of_adamw}]
    for things in partly:
        with pytest.raises(InexactError, match=r"of the optimizer is not registered: .*ahead of session\.shard"):
            require_registered(both, things)
    with pytest.raises(InexactError, match="a CosineAnnealingLR of the optimizer is not registered"):
        require_registered(both, {"b": of_sgd})
    require_registered(both, {"a": of_adamw, "b": of_sgd})


def test_a_scheduler_of_a_wrapped_optimizer_is_to_be_registered() -> None:
    wrapper = Lookahead(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
    scheduler = StepLR(wrapper.base, 2)
    with pytest.raises(InexactError, match="a StepLR of the optimizer is not registered"):
        require_registered(wrapper, {})
    require_registered(wrapper, {"scheduler": scheduler})


@pytest.mark.parametrize("save", [lambda _: None, lambda held: {"others": [one.state_dict() for one in held[1:]]}])
def test_an_object_that_holds_a_scheduler_without_its_state_does_not_register_it(save: Callable[[Any], Any]) -> None:
    both = Both()
    holder = Holder([CosineAnnealingLR(both.adamw, 10), StepLR(both.sgd, 3)], save)
    with pytest.raises(InexactError, match=r"held by the registered 'state', whose state_dict\(\) does not have its"):
        require_registered(both, {"state": holder})
    assert holder.schedulers[0].last_epoch == 0
    assert holder.loaded >= 1


@pytest.mark.parametrize(
    "save",
    [
        lambda held: [one.state_dict() for one in held],
        lambda held: {"deeper": ({str(place): one.state_dict() for place, one in enumerate(held)},)},
    ],
)
def test_an_object_with_the_state_of_the_schedulers_that_it_holds_registers_them(save: Callable[[Any], Any]) -> None:
    both = Both()
    holder = Holder([CosineAnnealingLR(both.adamw, 10), StepLR(both.sgd, 3)], save)
    require_registered(both, {"state": holder})
    assert holder.loaded == 0, "nothing of the user's is loaded if its state shows it"


def test_one_state_may_stand_for_several_schedulers_that_are_equal() -> None:
    """As torchtitan's container, which has the state of its first one."""
    both = Both()
    both.sgd.param_groups[0]["lr"] = 0.1
    alike: list[LRScheduler] = [LambdaLR(one, lambda done: 1 / (1 + done)) for one in (both.adamw, both.sgd)]
    require_registered(both, {"schedulers": Holder(alike, lambda held: held[0].state_dict())})


@pytest.mark.parametrize("kind", [ByEpoch, ByCount])
def test_an_object_that_sets_its_scheduler_as_it_is_loaded_registers_it(kind: type[Holder]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    scheduler = CosineAnnealingLR(optimizer, 10)
    before = scheduler.state_dict()
    require_registered(optimizer, {"state": kind([scheduler])})
    assert scheduler.state_dict() == before
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_parts_of_a_registered_scheduler_are_registered() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    parts: list[LRScheduler] = [StepLR(optimizer, 2), SequentialLR(optimizer, [StepLR(optimizer, 5)], [])]
    require_registered(optimizer, {"scheduler": SequentialLR(optimizer, parts, [3])})
