"""Step hooks that a loop registers behind `session.shard`, where no trial has seen them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from raysharded.actors.optimizer.step_hooks import HookCalls, Watched
from raysharded.actors.session.user_session import Session
from raysharded.errors import InexactError
from tests.cases import tried_each_time
from tests.session.loops import Loop, compute, optimizer_of, run
from tests.training.harness import Gpt

STEPS = 2


def shrinks(optimizer: torch.optim.Optimizer, *_: object) -> None:
    """By a norm over a worker's parts."""
    with torch.no_grad():
        for param in optimizer.param_groups[0]["params"]:
            param.mul_(1 / (1 + param.norm()))


def reads(optimizer: torch.optim.Optimizer, *_: object) -> None:
    assert all(param.norm() >= 0 for param in optimizer.param_groups[0]["params"])


class Hooked(Loop):
    """Registers a step hook of the optimizer behind `session.shard`."""

    def __init__(self, register: Callable[[torch.optim.Optimizer, Any], object]) -> None:
        super().__init__()
        self._register = register

    def __call__(self, session: Session) -> None:
        model = session.build(Gpt)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        session.shard(model, optimizer, scheduler=scheduler)
        self._register(optimizer, scheduler)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    compute(step, model, batch)
                optimizer.step()
                if scheduler.last_epoch < step.number:
                    scheduler.step()


@pytest.mark.procs
@pytest.mark.parametrize("workers", tried_each_time([2], [1, 2]))
def test_a_late_hook_that_changes_parameters_is_refused(workers: int) -> None:
    told = r"the step pre hook shrinks .*changed parameters in step 1, .* Register it before session\.shard\."
    with pytest.raises(InexactError, match=told):
        run(workers, Hooked(lambda optimizer, _: optimizer.register_step_pre_hook(shrinks)), steps=STEPS)


@pytest.mark.procs
def test_late_hooks_that_read_or_that_are_lines_behind_the_step_are_left_alone() -> None:
    """As those of a tool that logs norms; and a scheduler in a post hook, which is called behind the session's."""

    def registers(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        optimizer.register_step_pre_hook(reads)
        optimizer.register_step_post_hook(reads)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())

    hooked = run(2, Hooked(registers), steps=STEPS)
    assert hooked.bits == run(1, Hooked(lambda *_: None), steps=STEPS).bits


class Holding(torch.optim.Optimizer):
    """Steps another optimizer, which it holds."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.inner = torch.optim.SGD(params, lr=0.1)
        super().__init__(params, {})
        self.param_groups = self.inner.param_groups

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()


@pytest.mark.parametrize("kind", ["pre", "post"])
@pytest.mark.parametrize("of_session", [False, True])
def test_late_hooks_of_inner_optimizers_are_found_too(kind: str, of_session: bool) -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = Holding([param])
    calls = HookCalls(optimizer)
    if of_session:
        optimizer.register_step_pre_hook(lambda *_: None)
        calls.leave_present()
    calls.watch(Watched(gradients=lambda: [param.grad], params=lambda: [param]), frozenset(), lambda *_: None)

    def step(number: int) -> None:
        param.grad = torch.ones(3)
        with calls.in_step(number):
            optimizer.step()

    step(1)
    getattr(optimizer.inner, f"register_step_{kind}_hook")(reads)
    step(2)
    getattr(optimizer.inner, f"register_step_{kind}_hook")(shrinks)
    step(3)  # it is not compared
    with pytest.raises(InexactError, match=rf"the step {kind} hook shrinks .*changed parameters in step 4"):
        step(4)


def test_a_late_hook_of_a_task_is_found_too() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([param], lr=0.1)
    calls = HookCalls(optimizer)
    calls.watch(Watched(gradients=lambda: [param.grad], params=lambda: [param]), frozenset(), lambda *_: None)
    optimizer.register_step_post_hook(shrinks)
    param.grad = torch.ones(3)
    with pytest.raises(InexactError, match=r"shrinks .*Register it in build_optimizer"), calls.in_step(1):
        optimizer.step()
