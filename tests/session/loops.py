"""Training functions that own their loop: the tests' GPT, whose task trains with the same bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.task import TrainFunction
from tests.training.harness import Gpt, Outcome, SmallTask, train

MICROBATCHES = 4
STEPS = 6


class Average:
    """A running average of the loss, and the number of steps."""

    def __init__(self) -> None:
        self.value, self.count = 0.0, 0

    def add(self, loss: float) -> None:
        self.value = 0.9 * self.value + 0.1 * loss
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.count = state["value"], state["count"]


def schedule(done: int) -> float:
    """The schedule of `GptTask`, as torch's schedulers count."""
    return rs.warmup_cosine(done + 1, warmup_steps=2, total_steps=10)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """As `GptTask.build_optimizer`."""
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2)


def compute(step: UserStep, model: nn.Module, batch: torch.Tensor) -> None:
    """Forward and backward of a microbatch, as `GptTask.loss`."""
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    counts = targets % 5 != 0
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    hits = (logits.argmax(-1) == targets).sum()
    metrics: dict[str, Any] = {
        "accuracy": (hits, targets.numel()),
        "logit": (logits.float().sum(), logits.numel()),
    }
    step.backward((each * counts.flatten()).sum(), weight=counts.sum(), metrics=metrics)


class Loop:
    """The loop of the tests' GPT, with places for what a test does in it."""

    def __init__(self, model: Callable[[], nn.Module] = Gpt) -> None:
        self._make = model

    def __call__(self, session: Session) -> None:
        model = session.build(self._make)
        self.built(model)
        optimizer = self.optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        average = Average()
        session.shard(model, optimizer, scheduler=scheduler, average=average)
        for step in session.steps():
            with step:
                self.entered(session, step)
                for batch in step.microbatches():
                    self.computing(step, model, self.tokens_of(step, batch))
                self.computed(session, step, model)
                step.clip_grad_norm_(0.7)
                optimizer.step()
                scheduler.step()
                average.add(step.loss)
                self.applied(session, step, average)
            self.left(session, step, model, optimizer)

    def built(self, model: nn.Module) -> None: ...

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        return optimizer_of(model)

    def tokens_of(self, step: UserStep, batch: Any) -> torch.Tensor:
        return batch  # type: ignore[no-any-return]

    def entered(self, session: Session, step: UserStep) -> None: ...

    def computing(self, step: UserStep, model: nn.Module, batch: Any) -> None:
        compute(step, model, batch)

    def computed(self, session: Session, step: UserStep, model: nn.Module) -> None: ...

    def applied(self, session: Session, step: UserStep, average: Average) -> None: ...

    def left(self, session: Session, step: UserStep, model: nn.Module, optimizer: torch.optim.Optimizer) -> None: ...


def run(workers: int, loop: Callable[[Session], None] | None = None, *, steps: int = STEPS, **others: Any) -> Outcome:
    """As `harness.train`, with a training function."""
    task = TrainFunction(loop or Loop())
    return train(workers, task=task, microbatches=MICROBATCHES, steps=steps, **others)


@cache
def by_task(steps: int = STEPS) -> Outcome:
    """The run of the task with the same model, optimizer and clipping, on one worker."""
    return train(1, microbatches=MICROBATCHES, steps=steps)


@cache
def by_small_task(steps: int = STEPS) -> Outcome:
    """As `by_task`, of a loop with the model `Small`."""
    return train(1, task=SmallTask(), microbatches=MICROBATCHES, steps=steps)
