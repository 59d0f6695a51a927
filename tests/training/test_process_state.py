"""Settings of the process that a task's constructors leave changed are restored, in each generation, with one
notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import BaseTorchDispatchMode, _get_current_dispatch_mode_stack

import raysharded as rs
from raysharded import numerics
from raysharded.actors.task_calls.process_state import put_back, refusing_changes
from raysharded.errors import TaskError
from tests.cases import tried_each_time
from tests.training.harness import Outcome, SmallTask, log_into, train

WIDTH = 3
_entered: list[Any] = []


def enter(guard: Any) -> None:
    guard.__enter__()
    _entered.append(guard)  # the mode is left when the guard is freed


def enter_modes() -> None:
    """Enter a device below another mode."""
    enter(torch.device("meta"))
    enter(torch.overrides.BaseTorchFunctionMode())


LEFT: dict[str, Callable[[], object]] = {
    "the default dtype at torch.float64 (before: torch.float32)": partial(torch.set_default_dtype, torch.float64),
    "grad mode at False": partial(torch.set_grad_enabled, False),
    "inference mode at True": lambda: enter(torch.inference_mode()),
    "the default device at meta": partial(torch.set_default_device, "meta"),
    "the default device at meta (before: cpu)": lambda: enter(torch.device("meta")),
    "the default device at meta, BaseTorchFunctionMode (before: cpu)": enter_modes,
    "deterministic algorithms (debug mode) at 0 (before: 2)": partial(torch.use_deterministic_algorithms, False),
    "deterministic algorithms (debug mode) at 1": partial(torch.use_deterministic_algorithms, True, warn_only=True),
    "cudnn.benchmark at True": lambda: setattr(torch.backends.cudnn, "benchmark", True),
    "the float32 matmul precision at medium": partial(torch.set_float32_matmul_precision, "medium"),
    "the dispatch modes at BaseTorchDispatchMode (before: none)": lambda: enter(BaseTorchDispatchMode()),
    "the number of threads at 3": partial(torch.set_num_threads, 3),
}


def settings() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.zeros(1).device,
        torch.get_deterministic_debug_mode(),
        torch.backends.cudnn.benchmark,
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        tuple(_get_current_dispatch_mode_stack()),
    )


@pytest.fixture
def deterministic() -> Iterator[None]:
    before = torch.get_deterministic_debug_mode()
    torch.use_deterministic_algorithms(True)
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("left", LEFT)
def test_a_setting_that_is_left_changed_is_put_back_and_named(left: str) -> None:
    said: list[tuple[str, str]] = []
    before = settings()
    with put_back() as changed:
        LEFT[left]()
    assert settings() == before
    changed.remark("T.build_model", lambda *remark: said.append(remark))
    ((about, sentence),) = said
    assert about == "left changed by T.build_model"
    assert f"T.build_model left {left}" in sentence
    param = torch.ones(2, requires_grad=True)
    (param * 2).sum().backward()
    assert param.grad is not None


@pytest.mark.usefixtures("deterministic")
def leave_all_and_raise() -> None:
    for leave in LEFT.values():
        leave()
    raise ZeroDivisionError


@pytest.mark.usefixtures("deterministic")
def test_all_of_them_are_put_back_when_the_constructor_raises() -> None:
    before = settings()
    with pytest.raises(ZeroDivisionError), put_back():
        leave_all_and_raise()
    assert settings() == before


def test_what_the_task_puts_back_itself_is_no_matter() -> None:
    with put_back() as changed, torch.no_grad(), torch.device("meta"):
        pass
    changed.remark("T", lambda *remark: pytest.fail(f"{remark}"))


def test_what_was_set_around_it_stays() -> None:
    with torch.no_grad(), torch.device("meta"):
        with put_back():
            torch.set_grad_enabled(True)
        assert not torch.is_grad_enabled()
        assert torch.zeros(1).is_meta


# -- in a run --


class Net(nn.Module):
    """Computes with a tensor that is made in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH * WIDTH, dtype=torch.float32).reshape(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T + torch.full((WIDTH,), 0.1)


class Leaving(rs.Task):
    """Leaves all of these settings changed."""

    def __init__(self, *, leaves: bool = True) -> None:
        self._leaves = leaves

    def build_model(self) -> nn.Module:
        net = Net()
        if self._leaves:
            for leave in LEFT.values():
                leave()
        return net

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self._leaves:
            torch.set_default_dtype(torch.bfloat16)
        return torch.optim.AdamW(model.parameters(), lr=0.1)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        y = model(batch)
        made_in = torch.zeros(1).dtype.itemsize
        return rs.Loss(y.square().sum(), len(batch), {"itemsize": (made_in, 1), "computed in": (y.dtype.itemsize, 1)})


DATA = [torch.tensor([float(index % 7 - place) for place in range(WIDTH)]) for index in range(40)]


def trained(workers: int, task: rs.Task, **settings: Any) -> Outcome:
    return train(workers, **{"task": task, "data": DATA, "microbatches": 3, "steps": 3, **settings})


KILL = [(1, 2, "backward")]


@cache
def without_leaving() -> Outcome:
    return trained(1, Leaving(leaves=False))


@pytest.mark.procs
@pytest.mark.parametrize(("workers", "kills"), tried_each_time([(2, KILL)], [(1, []), (2, KILL), (3, KILL)]))
def test_a_run_whose_task_leaves_settings_changed_is_as_one_whose_task_does_not(
    tmp_path: Path, workers: int, kills: Any
) -> None:
    log = tmp_path / "log"
    found = trained(workers, Leaving(), kills=kills, prepare=partial(log_into, str(log)))
    assert found.bits == without_leaving().bits
    assert {numbers["metrics"]["itemsize"] for numbers in found.numbers} == {4.0}
    said = log.read_text()
    assert said.count("Leaving.build_model left the default dtype at torch.float64") == 1
    assert said.count("Leaving.build_optimizer left the default dtype at torch.bfloat16") == 1


class LeavingDtype(Leaving):
    def build_model(self) -> nn.Module:
        net = Net()
        torch.set_default_dtype(torch.float64)
        return net

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.procs
def test_under_the_first_number_of_the_rule_they_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "newest", lambda: numerics.kept(""))
    found = trained(2, LeavingDtype(), steps=2, kills=[(1, 2, "backward")])
    assert {numbers["metrics"]["itemsize"] for numbers in found.numbers} == {8.0}
    assert {numbers["metrics"]["computed in"] for numbers in found.numbers} == {8.0}


# -- what is called between the steps --

OF_BITS = [name for name in LEFT if not name.startswith(("grad", "inference", "the dispatch"))]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("left", OF_BITS)
def test_a_setting_that_changes_bits_and_is_left_by_an_evaluation_is_refused(left: str) -> None:
    name = left.partition(" at ")[0].partition(" (")[0]
    with put_back(), pytest.raises(TaskError, match=f"^T.evaluate left {name}"), refusing_changes("T.evaluate"):
        LEFT[left]()


def test_a_setting_that_is_set_back_and_one_that_changes_no_bit_are_allowed() -> None:
    with put_back(), refusing_changes("T.evaluate"):
        torch.set_default_dtype(torch.float64)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(False)


class Metric(SmallTask):
    """An evaluation in float64, which stays set or not."""

    def __init__(self, *, stays: bool) -> None:
        self._stays = stays

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> Any:
        torch.set_default_dtype(torch.float64)
        found = super().evaluate(model, batch)
        if not self._stays:
            torch.set_default_dtype(torch.float32)
        return found


class Scheduled(SmallTask):
    """A schedule that leaves another number of threads."""

    def lr_scale(self, step: int) -> float:
        torch.set_num_threads(3)
        return 1.0


@pytest.mark.procs
def test_a_run_whose_evaluation_or_schedule_leaves_a_setting_ends_with_its_name() -> None:
    evaluation = rs.EvalConfig(data=[torch.arange(9).numpy() % 7 for _ in range(4)], every_steps=1, num_samples=4)
    settings: dict[str, Any] = {"microbatches": 2, "steps": 1, "evaluation": evaluation}
    assert train(1, task=Metric(stays=False), **settings).bits == train(1, task=SmallTask(), **settings).bits
    with pytest.raises(TaskError, match=r"Metric.evaluate in step 1 left the default dtype at torch.float64"):
        train(1, task=Metric(stays=True), **settings)
    with pytest.raises(
        TaskError, match=r"Scheduled.lr_scale, or a step hook, in step 1 left the number of threads at 3"
    ):
        train(1, task=Scheduled(), **settings)
