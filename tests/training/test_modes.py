"""Frozen parts that `build_model` left in eval keep that; all else trains in train mode; there is one notice."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import raysharded as rs
from raysharded import numerics
from raysharded.actors.model.modes import Modes
from raysharded.data.order import sample_ids
from raysharded.errors import InexactError
from raysharded.planning.tracing.measurement import measure
from tests.cases import tried_each_time
from tests.training.harness import Outcome, log_into, train

WIDTH, SAMPLES, MICROBATCHES, STEPS, SEED, LR = 4, 40, 3, 3, 5, 0.1


class Block(nn.Module):
    """With a dropout that has no parameters, and perhaps a batch norm whose statistics are its own."""

    def __init__(self, *, norm: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        fill(self.linear)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        if norm:
            self.norm.get_buffer("running_mean").fill_(0.25)
            self.norm.get_buffer("running_var").fill_(2.0)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(x + torch.tanh(self.linear(x))))  # type: ignore[no-any-return]


class Net(nn.Module):
    """A backbone of two blocks, a dropout and a head."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.ModuleList([Block(norm=norm) for _ in range(2)]))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(WIDTH, 2)
        fill(self.head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        blocks = self.backbone[0]
        assert isinstance(blocks, nn.ModuleList)
        for block in blocks:
            x = block(x)
        return self.head(self.drop(x))  # type: ignore[no-any-return]


def fill(linear: nn.Linear) -> None:
    """Set weights that are not drawn."""
    with torch.no_grad():
        for param in linear.parameters():
            param.copy_(torch.linspace(-0.5, 1.0, param.numel()).reshape(param.shape))


def of_net(change: Callable[[Net], object], *, norm: bool = False) -> Net:
    net = Net(norm=norm)
    change(net)
    return net


# -- which modules keep their modes --


def frozen(net: Net) -> None:
    net.backbone.requires_grad_(False).eval()


def frozen_with_mc_dropout(net: Net) -> None:
    frozen(net)
    block(net, 0).drop.train()


def block(net: Net, place: int) -> Block:
    found = net.backbone[0]
    assert isinstance(found, nn.ModuleList)
    one = found[place]
    assert isinstance(one, Block)
    return one


def as_pretrained(net: Net) -> None:
    """All of it in eval, as `from_pretrained` returns it, with a frozen part."""
    net.backbone.requires_grad_(False)
    net.eval()


def a_pretrained_backbone(net: Net) -> None:
    """In eval as a whole, in a model in train mode; its first block is frozen."""
    net.backbone.eval()
    block(net, 0).requires_grad_(False)


def adapters(net: Net) -> None:
    """Trainable parameters beside frozen ones in each block."""
    net.backbone.eval()
    for place in range(2):
        block(net, place).linear.weight.requires_grad_(False)


def frozen_norms(net: Net) -> None:
    for module in net.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.eval().requires_grad_(False)


def one_frozen_block(net: Net) -> None:
    block(net, 1).requires_grad_(False).eval()


def a_dropout(net: Net) -> None:
    net.drop.eval()


def a_dropout_in_a_frozen_part(net: Net) -> None:
    net.backbone.requires_grad_(False)
    block(net, 0).drop.eval()


def nothing(net: Net) -> None:
    pass


CASES: dict[str, tuple[Callable[[Net], object], tuple[str, ...], str]] = {
    "frozen": (frozen, ("backbone",), ""),
    "frozen, with MC dropout": (frozen_with_mc_dropout, ("backbone",), ""),
    "pretrained": (as_pretrained, (), "left the model in eval mode"),
    "a pretrained backbone": (a_pretrained_backbone, (), "left 'backbone' in eval mode"),
    "adapters": (adapters, (), "left 'backbone' in eval mode"),
    "frozen norms": (frozen_norms, ("backbone.0.0.norm", "backbone.0.1.norm"), ""),
    "one frozen block": (one_frozen_block, ("backbone.0.1",), ""),
    "a dropout": (a_dropout, (), "left 'drop' in eval mode"),
    "a dropout in a frozen part": (a_dropout_in_a_frozen_part, ("backbone.0.0.drop",), ""),
    "nothing": (nothing, (), ""),
}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_frozen_as_a_whole_keeps_the_modes_it_was_left_in(name: str, wrapped: bool) -> None:
    change, kept, said = CASES[name]
    net = of_net(change, norm=True)
    left = {module: module.training for module in net.modules()}
    inside = {module for part in kept for module in net.get_submodule(part).modules()}
    if wrapped:
        blocks = net.backbone[0]
        assert isinstance(blocks, nn.ModuleList)
        for place in range(2):
            blocks[place] = checkpoint_wrapper(blocks[place])
    modes = Modes(net)
    assert modes.kept == kept
    remarks: list[str] = []
    modes.remark("T", lambda _, sentence: remarks.append(sentence))
    assert len(remarks) == bool(said)
    assert not said or f"T.build_model {said}. It has trainable parameters" in remarks[0]
    for before in (net.eval, net.train, net.drop.eval):  # the mode that a loss, or an evaluation, left
        before()
        modes.train()
        assert {m for m in left if m.training != (left[m] if m in inside else True)} == set()
    with modes.evaluating():
        assert not any(module.training for module in left)


class Overrides(Net):
    """Keeps a part with trainable parameters in eval, a common idiom."""

    def train(self, mode: bool = True) -> Overrides:
        super().train(mode)
        self.backbone.eval()
        return self


def test_a_train_that_the_model_overrides_has_its_way_without_a_remark() -> None:
    net = Overrides()
    net.train()
    modes = Modes(net)
    modes.remark("T", lambda *_: pytest.fail("there is nothing to remark"))
    modes.train()
    assert net.drop.training
    assert not any(module.training for module in net.backbone.modules())


class Counts(Net):
    """Its own `train` is called each time."""

    calls = 0

    def train(self, mode: bool = True) -> Counts:
        super().train(mode)
        self.calls += 1
        return self


def test_a_train_of_the_models_own_is_called_before_each_forward() -> None:
    net = Counts()
    modes = Modes(net)
    for _ in range(3):
        modes.train()
    assert net.calls == 3


class Merges(Net):
    """Adds low-rank weights to its head's in eval mode, and takes them away again, as loralib's layers do."""

    merged = False

    def train(self, mode: bool = True) -> Merges:
        super().train(mode)
        if self.merged is mode:
            self.head.weight.data += -0.125 if mode else 0.125
            self.merged = not mode
        return self


def test_an_eval_of_the_models_own_that_changes_a_parameter_is_refused_by_its_name() -> None:
    net, calls = Merges(), Counts()
    before = net.head.weight.detach().clone()
    sentence = r"eval\(\) of the model changes 1 parameters, first 'head\.weight'"
    with pytest.raises(InexactError, match=sentence), Modes(net).evaluating():
        pytest.fail("the evaluation has begun")
    assert net.training
    assert torch.allclose(net.head.weight, before)
    with Modes(calls).evaluating():
        assert not calls.training
    assert calls.calls == 2


def test_under_the_first_number_all_modules_are_trained_in_train_mode() -> None:
    net = of_net(frozen)
    Modes(net, 1).train()
    assert all(module.training for module in net.modules())


class Tells(rs.Task):
    """Reports the modes that its loss sees."""

    def __init__(self) -> None:
        self.seen: list[set[str]] = []

    def build_model(self) -> nn.Module:
        return of_net(frozen_with_mc_dropout)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LR)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.seen.append({name for name, module in model.named_modules() if module.training})
        return model(batch).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(("number", "holds"), [(2, False), (3, True)])
def test_modes_that_a_loop_sets_ahead_of_an_evaluation_hold_from_the_third_number_on(number: int, holds: bool) -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout())
    modes = Modes(model, number)
    modes.take_over()
    model[0].eval()
    with modes.evaluating():
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model] == [not holds, True]


def test_the_planner_measures_a_forward_in_the_same_modes() -> None:
    task = Tells()
    measure(task, rs.EngineConfig(), [torch.zeros(WIDTH)])
    assert task.seen == [{"", "drop", "head", "backbone.0.0.drop"}]


# -- in a run --


class Rows:
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


class Fitted(rs.Task):
    """The head's size is a metric; so is which of the dropouts are on."""

    def __init__(
        self, change: Callable[[Net], object] = frozen, *, norm: bool = True, head_drops: bool = False
    ) -> None:
        self._change, self._norm, self._head_drops = change, norm, head_drops

    def build_model(self) -> nn.Module:
        net = of_net(self._change, norm=self._norm)
        if not self._head_drops:
            net.drop.p = 0.0
        return net

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return rs.Loss((model(batch) - 1).square().sum(), len(batch), metrics_of(model))


def metrics_of(model: nn.Module) -> dict[str, Any]:
    on = sum(module.training for module in model.modules() if isinstance(module, nn.Dropout))
    return {"dropouts": (on, 1)}


def trained(workers: int, task: rs.Task | None = None, **settings: Any) -> Outcome:
    evaluation = rs.EvalConfig(data=[Rows()[i] for i in range(4)], every_steps=1, num_samples=4)
    data = [Rows()[index] for index in range(SAMPLES)]
    given = {"task": task or Fitted(), "data": data, "microbatches": MICROBATCHES, "steps": STEPS}
    return train(workers, evaluation=evaluation, **{**given, **settings})


@cache
def alone() -> Outcome:
    return trained(1)


def in_plain_torch(steps: int = STEPS) -> tuple[list[float], list[float]]:
    """The losses of the steps, and of the evaluations after them."""
    net = of_net(frozen, norm=True)
    net.drop.p = 0.0
    optimizer = torch.optim.SGD(net.head.parameters(), lr=LR, momentum=0.5)
    losses, held_out = [], []
    for step in range(steps):
        size = 2 * MICROBATCHES
        rows = [Rows()[int(i)] for i in sample_ids(SEED, np.arange(step * size, (step + 1) * size), SAMPLES)]
        net.train()
        net.backbone.eval()
        loss = (net(torch.stack(rows)) - 1).square().sum() / size
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.eval()
        losses.append(loss.item())
        held_out.append((net(torch.stack([Rows()[i] for i in range(4)])) - 1).square().sum().item() / 4)
    return losses, held_out


@pytest.mark.procs
def test_a_frozen_backbone_with_batch_norm_trains_as_in_plain_torch() -> None:
    losses, held_out = in_plain_torch()
    assert alone().losses == pytest.approx(losses, rel=1e-5)
    assert [numbers["evaluation"]["loss"] for numbers in alone().numbers] == pytest.approx(held_out, rel=1e-5)
    assert {numbers["metrics"]["dropouts"] for numbers in alone().numbers} == {1.0}
    assert {numbers["evaluation"]["dropouts"] for numbers in alone().numbers} == {0.0}


@pytest.mark.procs
@pytest.mark.parametrize("kills", tried_each_time([[(1, 2, "backward")]], [[], [(1, 2, "backward")]]))
def test_it_is_the_same_at_three_workers_of_which_one_is_lost(kills: Any) -> None:
    engine = rs.EngineConfig(activation_checkpointing=True)
    assert trained(3, kills=kills, engine=engine).bits == alone().bits


@pytest.mark.procs
def test_a_model_in_eval_as_a_whole_trains_in_train_mode_with_one_notice(tmp_path: Path) -> None:
    log = tmp_path / "log"
    task = Fitted(as_pretrained, norm=False, head_drops=True)
    found = trained(2, task, kills=[(1, 2, "backward")], prepare=partial(log_into, str(log)))
    assert found.bits == trained(1, Fitted(frozen_alone, norm=False, head_drops=True)).bits
    assert {numbers["metrics"]["dropouts"] for numbers in found.numbers} == {3.0}
    assert log.read_text().count("Fitted.build_model left the model in eval mode") == 1


def frozen_alone(net: Net) -> None:
    net.backbone.requires_grad_(False)


@pytest.mark.procs
def test_a_run_that_began_under_the_first_number_trains_all_in_train_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "newest", lambda: numerics.kept(""))
    found = trained(1, Fitted(norm=False), steps=2)
    assert {numbers["metrics"]["dropouts"] for numbers in found.numbers} == {3.0}
