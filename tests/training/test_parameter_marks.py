"""Marks of build_model on parameters: attributes, hooks on gradients, and writes in forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.model.build import build_units_of
from raysharded.errors import InexactError, TaskError
from tests.cases import tried_each_time
from tests.training.harness import VOCABULARY, WIDTH, Gpt, GptTask, Outcome, samples, train

KEPT = 10
"""The first rows of the embedding, which are not trained."""


def mask_rows(gradient: torch.Tensor) -> torch.Tensor:
    assert gradient.shape == (VOCABULARY, WIDTH)
    mask = torch.ones(VOCABULARY, 1)
    mask[:KEPT] = 0.0
    return gradient * mask


class Marked(Gpt):
    """Some parameters are exempt from weight decay, as state space models mark theirs; rows of one are not trained."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        for block in self.blocks:
            assert isinstance(block.gains, nn.Parameter)
            block.gains._no_weight_decay = True  # type: ignore[attr-defined]
        if masked:
            self.embedding.weight.register_hook(mask_rows)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.kept = self.embedding.weight[:KEPT].detach().double().sum()
        return super().forward(tokens)


class MarkedTask(GptTask):
    def __init__(self, *, masked: bool = True) -> None:
        self._masked = masked

    def build_model(self) -> nn.Module:
        return Marked(masked=self._masked)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        marked = [param for param in model.parameters() if getattr(param, "_no_weight_decay", False)]
        others = [param for param in model.parameters() if not getattr(param, "_no_weight_decay", False)]
        assert len(marked) == 1
        groups = [{"params": others, "weight_decay": 0.0}, {"params": marked, "weight_decay": 0.5}]
        return torch.optim.SGD(groups, lr=0.1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        kept = model.kept
        assert isinstance(kept, torch.Tensor)
        return rs.Loss(loss.total, loss.weight, {"kept": (kept, 1.0)})


def run(workers: int, task: rs.Task, **settings: Any) -> Outcome:
    return train(workers, task=task, **({"microbatches": 4, "steps": 3} | settings))


@functools.cache
def alone() -> Outcome:
    return run(1, MarkedTask())


@pytest.mark.procs
def test_attributes_and_gradient_hooks_are_kept_at_every_size_and_after_a_loss() -> None:
    assert run(2, MarkedTask(), kills=[(1, 2, "backward")]).bits == alone().bits


@pytest.mark.procs
def test_rows_whose_gradient_a_hook_masks_are_not_trained() -> None:
    assert len({numbers["metrics"]["kept"] for numbers in alone().numbers}) == 1
    trained = run(1, MarkedTask(masked=False))
    assert len({numbers["metrics"]["kept"] for numbers in trained.numbers}) == 3


class Late(nn.Module):
    """Marks a parameter after it was registered, by the name that it had before."""

    def __init__(self, mark: Callable[[nn.Parameter], object]) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(3, 2))
        self.weight = weight
        mark(weight)


class LateTask(rs.Task):
    def __init__(self, mark: Callable[[nn.Parameter], object]) -> None:
        self._mark = mark

    def build_model(self) -> nn.Module:
        return Late(self._mark)


def test_a_mark_is_found_under_every_name_that_it_was_made_by() -> None:
    def mark(weight: nn.Parameter) -> None:
        weight.scale = 2.0  # type: ignore[attr-defined]
        weight.register_hook(torch.neg)

    units = build_units_of(LateTask(mark), rs.EngineConfig(), None)
    assert units.marks.attributes == {"weight": {"scale": 2.0}}
    assert units.marks.hooks == {"weight": (torch.neg,)}


def test_a_tensor_of_a_parameters_shape_is_refused_by_name() -> None:
    def mark(weight: nn.Parameter) -> None:
        weight.mask = torch.ones(3, 2)  # type: ignore[attr-defined]

    with pytest.raises(TaskError, match="left 'mask' on the parameter 'weight', a tensor of its shape"):
        build_units_of(LateTask(mark), rs.EngineConfig(), None)


def test_a_post_accumulate_hook_is_refused_with_the_step_hook() -> None:
    def mark(weight: nn.Parameter) -> None:
        weight.register_post_accumulate_grad_hook(lambda _: None)

    with pytest.raises(
        TaskError, match=r"post-accumulate hook on the parameter 'weight'.*a step hook of the optimizer"
    ):
        build_units_of(LateTask(mark), rs.EngineConfig(), None)


class Renormalised(Gpt):
    """Its embedding renormalises rows in forward, in training or in evaluation."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self._in_training = when == "training"
        self.extra = nn.Embedding(VOCABULARY, WIDTH, max_norm=1.0)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        added = 0.0 if self.training != self._in_training else self.extra(tokens).sum()
        return super().forward(tokens) + added + 0.0 * self.extra.weight.sum()


class RenormalisedTask(GptTask):
    def __init__(self, when: str) -> None:
        self._when = when

    def build_model(self) -> nn.Module:
        return Renormalised(self._when)


@pytest.mark.procs
@pytest.mark.parametrize(
    ("when", "workers"),
    tried_each_time([("training", 1), ("evaluation", 1)], [(w, n) for w in ("training", "evaluation") for n in (1, 3)]),
)
def test_a_forward_that_changes_a_parameter_is_refused_by_its_name(when: str, workers: int) -> None:
    evaluation = rs.EvalConfig(data=samples()[:4], every_steps=1, num_samples=4)
    with pytest.raises(InexactError, match=r"the forward changed the parameter 'extra\.weight'"):
        run(workers, RenormalisedTask(when), evaluation=evaluation, steps=1)
