"""Attributes that a task keeps between steps: those that the loss depends on are refused, and others change nothing."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.task_calls.plain_attributes import PlainAttributes, as_built
from raysharded.actors.task_calls.used_variables import variables_of
from raysharded.errors import InexactError
from tests.cases import tried_each_time
from tests.training.harness import Outcome, SmallTask, train

SETTINGS: dict[str, Any] = {"microbatches": 3, "steps": 2}
EVALUATION = rs.EvalConfig(data=[np.arange(9) % 7 for _ in range(4)], every_steps=1, num_samples=4)


def scaled(found: Any, factor: float) -> rs.Loss:
    return rs.Loss(found.total * factor, found.weight)


class KeepsStep(SmallTask):
    """Its loss warms up by the step that `lr_scale` was called with."""

    step = 0

    def lr_scale(self, step: int) -> float:
        self.step = step
        return 1.0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return scaled(super().loss(model, batch), 1.0 + self.step)


class CountsUpdates(SmallTask):
    """A step hook counts updates in the model, as fairseq does, and the loss depends on them."""

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.blocks[0].num_updates = 0  # type: ignore[union-attr, index]
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = super().build_optimizer(model)
        block: Any = model.blocks[0]  # type: ignore[index]

        def count(*_: object) -> None:
            block.num_updates += 1

        optimizer.register_step_post_hook(count)
        return optimizer

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return scaled(super().loss(model, batch), 1.0 + model.blocks[0].num_updates)  # type: ignore[index, union-attr]


class FollowsEvaluation(SmallTask):
    """Its loss has a weight that follows the held-out loss."""

    def __init__(self) -> None:
        self.weights = {"main": torch.ones(())}

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return scaled(super().loss(model, batch), float(self.weights["main"]))

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        found: Any = super().loss(model, batch)
        self.weights["main"].fill_(float(found.total / found.weight))
        return found  # type: ignore[no-any-return]


class Annealed(nn.Module):
    """A loss with a temperature in a buffer."""

    temperature: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, found: rs.Loss) -> rs.Loss:
        return scaled(found, float(self.temperature))


class HoldsALoss(SmallTask):
    """Its criterion, which is no part of the model, has a buffer that follows the step."""

    def __init__(self) -> None:
        self.criteria = {"main": Annealed()}

    def lr_scale(self, step: int) -> float:
        self.criteria["main"].temperature.fill_(1.0 / (1 + step))
        return 1.0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        return self.criteria["main"](super().loss(model, batch))


class WarmUp:
    """A helper that keeps a step."""

    def __init__(self) -> None:
        self.step = 0


class HoldsAHelper(SmallTask):
    """An object that it holds keeps the step, and the loss depends on it."""

    def __init__(self) -> None:
        self.warm_up = WarmUp()

    def lr_scale(self, step: int) -> float:
        self.warm_up.step = step
        return 1.0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return scaled(super().loss(model, batch), 1.0 + self.warm_up.step)


GLOBAL_STEP = 0


class KeepsAGlobalStep(SmallTask):
    """Its loss warms up by a variable of this module, as scripts have one."""

    def lr_scale(self, step: int) -> float:
        global GLOBAL_STEP
        GLOBAL_STEP = step
        return 1.0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return warmed_up(super().loss(model, batch))


def warmed_up(found: Any) -> rs.Loss:
    return scaled(found, 1.0 + GLOBAL_STEP)


def of_a_closure() -> rs.Task:
    kept = {"step": 0}

    class KeepsInAClosure(SmallTask):
        """Its methods share a dict of the function that made it."""

        def lr_scale(self, step: int) -> float:
            kept["step"] = step
            return 1.0

        def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
            return scaled(super().loss(model, batch), 1.0 + kept["step"])

    return KeepsInAClosure()


REFUSED: list[tuple[Callable[[], rs.Task], str]] = [
    (KeepsStep, "self.step"),
    (CountsUpdates, "model.blocks.0.num_updates"),
    (FollowsEvaluation, "self.weights"),
    (HoldsAHelper, "self.warm_up.step"),
    (HoldsALoss, r"self.criteria\['main'\].temperature"),
    (KeepsAGlobalStep, "tests.training.test_attribute_proof.GLOBAL_STEP"),
    (of_a_closure, r"of_a_closure.<locals>.KeepsInAClosure: kept"),
]


@pytest.mark.procs
@pytest.mark.parametrize(
    ("task", "name", "workers"),
    tried_each_time(
        [(*REFUSED[0], 1), (*REFUSED[1], 1), (*REFUSED[2], 2), (*REFUSED[4], 1), (*REFUSED[5], 1)],
        [(*case, workers) for case in REFUSED for workers in (1, 2)],
    ),
)
def test_an_attribute_that_the_loss_depends_on_is_refused_by_name(
    task: Callable[[], rs.Task], name: str, workers: int
) -> None:
    with pytest.raises(InexactError, match=rf"step 2: the loss, or its gradient, depends on .*: {name}\."):
        train(workers, task=task(), evaluation=EVALUATION, **SETTINGS)


class Logs(SmallTask):
    """Keeps numbers to print them, a schedule that it computes once, and a table that belongs to a number."""

    def __init__(self) -> None:
        self.calls, self.step = 0, 0
        self.history: list[float] = []
        self.rates: list[float] | None = None
        self.table: torch.Tensor | None = None
        self.warm_up = WarmUp()

    def lr_scale(self, step: int) -> float:
        self.step = self.warm_up.step = step
        if self.rates is None:
            self.rates = [rs.warmup_cosine(one, warmup_steps=2, total_steps=10) for one in range(11)]
        return self.rates[step]

    def loss(self, model: nn.Module, batch: torch.Tensor) -> Any:
        self.calls += 1
        found: Any = super().loss(model, batch)
        self.history.append(float(found.total.detach()))
        self.last = found.total.detach()
        return found

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Any:
        self.evaluated = len(self.history)
        return super().loss(model, batch)


def seconds(outcome: Outcome) -> list[int]:
    """The steps that computed something twice."""
    return [fields["step"] for fields in outcome.of("step") if "prove" in fields["seconds"]]


@pytest.mark.procs
@pytest.mark.parametrize("workers", tried_each_time([2], [1, 2]))
def test_attributes_that_are_only_printed_change_no_bit_and_are_proven_in_steps_1_2_4(workers: int) -> None:
    plain = train(1, task=SmallTask(), evaluation=EVALUATION, microbatches=3, steps=5)
    logs = train(workers, task=Logs(), evaluation=EVALUATION, microbatches=3, steps=5)
    assert logs.bits == plain.bits
    assert (seconds(plain), seconds(logs)) == ([1], [1, 2, 4])


@pytest.mark.procs
def test_without_proofs_attributes_are_not_compared() -> None:
    train(1, task=KeepsStep(), engine=rs.EngineConfig(prove_first_step=False), **SETTINGS)


# -- what is plain, and what is put back --


@dataclass
class Held:
    number: Any = 1
    text: Any = "a"
    items: Any = None
    other: Any = None


def changed(one: object) -> list[str]:
    """The names of changes since `one` was noted."""
    return [change.name for change in NOTED[id(one)].changes()]


NOTED: dict[int, PlainAttributes] = {}


def noted(one: Any) -> Any:
    NOTED[id(one)] = PlainAttributes({"self": one})
    return one


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (1, 2),
        (1, True),
        (0.0, -0.0),
        (None, 3.0),
        ([1, 2], [1, 2, 3]),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        ((1, (2,)), (1, (3,))),
        (np.float32(1), np.float32(2)),
        (np.arange(3), np.arange(3) + 1),
        (torch.ones(3), torch.zeros(3)),
    ],
)
def test_a_changed_value_is_named_and_is_as_built_inside_alone(before: Any, after: Any) -> None:
    held = noted(Held(items=before))
    assert changed(held) == []
    held.items = after
    held.added = 5
    assert changed(held) == ["self.added", "self.items"]
    with as_built(NOTED[id(held)].changes()):
        assert repr(held.items) == repr(before)
        assert type(held.items) is type(before)
        assert not hasattr(held, "added")
        held.made_inside = held.items
    assert held.items is after
    assert held.added == 5


def test_contents_that_change_in_place_are_seen_and_stay() -> None:
    held = noted(Held(items=[1, {"a": torch.zeros(2)}]))
    held.items[1]["a"] += 1
    held.items.append(4)
    with as_built(NOTED[id(held)].changes()):
        assert repr(held.items) == repr([1, {"a": torch.zeros(2)}])
        held.items.append(9)
    assert repr(held.items) == repr([1, {"a": torch.ones(2)}, 4])
    with as_built(NOTED[id(held)].changes()):
        assert len(held.items) == 2


@pytest.mark.parametrize("value", [object(), nn.Linear(1, 1), torch.zeros(5000), list(range(300)), nn.Parameter()])
def test_an_object_with_another_attribute_of_another_kind_is_left_as_it_is(value: object) -> None:
    held = noted(Held())
    held.number, held.other = 2, value
    assert changed(held) == []


def test_modes_and_hooks_of_modules_are_no_attributes_and_a_new_buffer_leaves_the_module_as_it_is() -> None:
    module = noted(nn.Linear(2, 2))
    module.eval()
    module.register_forward_hook(lambda *_: None)
    assert changed(module) == []
    module.count = 1
    assert changed(module) == ["self.count"]
    module.register_buffer("table", torch.zeros(3))
    assert changed(module) == []


# -- what objects hold --


class Owner:
    """An object with parts of many kinds."""

    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


class Background(threading.Thread):
    """A thread of the user's, with a number."""

    number = 1


def test_objects_of_the_users_classes_are_followed_through_attributes_and_containers() -> None:
    inner = Held()
    owner = noted(Owner(first=Owner(parts=[{"inner": inner}]), again=inner))
    inner.number = 5
    owner.first.added = 2
    assert changed(owner) == ["self.first.added", "self.again.number"]
    with as_built(NOTED[id(owner)].changes()):
        assert inner.number == 1
        assert not hasattr(owner.first, "added")
    assert (inner.number, owner.first.added) == (5, 2)


def test_objects_that_hold_each_other_are_followed_once() -> None:
    owner = noted(Owner(first=Owner()))
    owner.first.other = Owner(back=owner.first)
    NOTED[id(owner)] = PlainAttributes({"self": owner})
    owner.first.other.back.number = 3
    assert changed(owner) == ["self.first.number"]


@pytest.mark.parametrize("how", ["in place", "another one"])
def test_buffers_of_a_module_beside_the_model_are_followed_and_put_back(how: str) -> None:
    owner = noted(Owner(norm=nn.Sequential(nn.BatchNorm1d(2))))
    norm: Any = owner.norm[0]
    if how == "in place":
        norm.running_mean.add_(1.0)
    else:
        norm.running_mean = torch.ones(2)
    now = norm.running_mean
    assert changed(owner) == ["self.norm.0.running_mean"]
    with as_built(NOTED[id(owner)].changes()):
        assert norm.running_mean.tolist() == [0.0, 0.0]
        norm.running_mean.add_(7.0)
    assert norm.running_mean is now
    assert now.tolist() == [1.0, 1.0]
    with as_built(NOTED[id(owner)].changes()):
        assert norm.running_mean.tolist() == [0.0, 0.0]


def test_a_buffer_that_is_gone_is_there_as_built() -> None:
    owner = noted(Owner(norm=nn.BatchNorm1d(2)))
    del owner.norm.running_mean
    with as_built(NOTED[id(owner)].changes()):
        assert owner.norm.running_mean.tolist() == [0.0, 0.0]
    assert not hasattr(owner.norm, "running_mean")


def test_the_models_modules_are_not_followed_from_a_task_that_holds_them() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2))
    owner: Any = Owner(model=model, other=nn.BatchNorm1d(2))
    attributes = PlainAttributes({"self": owner}, of_model=[*model.modules()])
    owner.model[0].running_mean.add_(1.0)
    owner.model[0].count = 3
    assert attributes.changes() == []
    owner.other.running_mean.add_(1.0)
    assert [one.name for one in attributes.changes()] == ["self.other.running_mean"]


@pytest.mark.parametrize(
    "part",
    [
        Background(),
        Owner(lock=threading.Lock()),
        Owner(logger=logging.getLogger("raysharded")),
        Counter("ab"),
        type("Made", (), {}),
        PlainAttributes({}),
    ],
    ids=["a thread", "with a lock", "with a logger", "of Python", "a class", "of raysharded"],
)
def test_objects_of_packages_and_those_that_a_thread_may_use_are_left_as_they_are(part: Any) -> None:
    owner = noted(Owner(part=part))
    part.number = 2
    assert changed(owner) == []


# -- variables --

COUNT, LOG, TABLE = 0, [1], torch.zeros(5000)
HELPER = Held()


def deeper() -> int:
    return COUNT + len(LOG)


def use_a_module() -> tuple[Any, int]:
    return sys.modules, COUNT


class Uses:
    """Code that uses variables of this module through a function, a property, and a comprehension."""

    @property
    def total(self) -> int:
        return deeper()

    @staticmethod
    @torch.no_grad()
    def table() -> Any:
        return [TABLE[place] for place in range(2)], HELPER.number


def test_variables_that_code_uses_are_found_through_functions_properties_and_comprehensions() -> None:
    names = {one.name.rpartition(".")[2] for one in variables_of([Uses()])}
    assert {"COUNT", "LOG", "TABLE", "HELPER"} <= names
    assert not names & {"deeper", "Uses", "GLOBAL_STEP", "NOTED"}
    assert all(one.name.startswith(__name__) for one in variables_of([Uses()]))
    used = {one.name.rpartition(".")[2] for one in variables_of([use_a_module])}
    assert "COUNT" in used
    assert "sys" not in used


def test_variables_that_methods_of_a_held_object_use_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = PlainAttributes({"self": Owner(helper=[Uses()])}, code=[Owner()])
    monkeypatch.setattr(sys.modules[__name__], "COUNT", 4)
    assert [one.name for one in attributes.changes()] == [f"{__name__}.COUNT"]


def test_a_changed_variable_is_as_built_inside_alone_and_each_counts_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    attributes = PlainAttributes({}, code=[Uses()])
    monkeypatch.setattr(sys.modules[__name__], "COUNT", 4)
    monkeypatch.setattr(sys.modules[__name__], "TABLE", torch.ones(6000))
    monkeypatch.setattr(HELPER, "number", 7)
    LOG.append(2)
    try:
        found = attributes.changes()
        assert sorted(one.name.removeprefix(f"{__name__}.") for one in found) == ["COUNT", "HELPER.number", "LOG"]
        with as_built(found):
            assert (COUNT, LOG, HELPER.number) == (0, [1], 1)
            assert deeper() == 1
        assert (COUNT, LOG, HELPER.number) == (4, [1, 2], 7)
    finally:
        LOG.pop()


def test_a_closures_variable_may_have_no_value() -> None:
    def counting() -> Callable[[], int]:
        def count() -> int:
            return number

        attributes.append(PlainAttributes({}, code=[count]))
        number = 3
        return count

    attributes: list[PlainAttributes] = []
    count = counting()
    (change,) = attributes[0].changes()
    assert change.name.endswith("counting.<locals>: number")
    with as_built([change]), pytest.raises(NameError):
        count()
    assert count() == 3


def test_code_of_packages_and_of_raysharded_is_not_followed() -> None:
    assert variables_of([nn.Linear(1, 1), rs.Task(), np.mean, PlainAttributes({})]) == []
