"""Numbers that a task gives arrive unchanged; an invalid learning rate ends the step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded import numerics
from raysharded.actors.numerics.summation_tree import tree_sum
from raysharded.actors.optimizer.learning_rate import rate_of, scale_of
from raysharded.actors.step.forward_backward import Results, as_loss
from raysharded.actors.task_calls.remarks import Notes
from raysharded.actors.task_calls.task_numbers import half_precision
from raysharded.checkpoint import open_storage
from raysharded.data import MicrobatchLoader
from raysharded.errors import TaskError
from raysharded.ids import WorkerId
from raysharded.journal.log import read
from raysharded.testing import Fault, FaultPlan
from tests.actors.optimizer.test_shard_optimizer import Line as LineOf, shard_optimizer
from tests.cases import tried_each_time
from tests.training.harness import Collector, Outcome, log_into, make_driver, make_job, make_limits, train

WIDTH = 3


class Rows:
    """Small whole numbers."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([float(index % 7 - place) for place in range(WIDTH)], dtype=torch.float32)


class Line(nn.Module):
    """A weight that nobody draws, in float32 under any default."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, WIDTH * WIDTH, dtype=torch.float32).reshape(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.T


class Given(rs.Task):
    """Reports numbers that float32 does not have; `build_model` leaves another default dtype behind."""

    def __init__(self, scale: Callable[[int], Any] | None = None) -> None:
        self._scale = scale

    def build_model(self) -> nn.Module:
        model = Line()
        torch.set_default_dtype(torch.bfloat16)
        return model

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.125)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        metrics: dict[str, Any] = {
            "large": (123456789, 1),
            "tenth": (0.1 * 1013, 1013.0),
            "numpy": (np.float64(0.1), np.int64(1)),
        }
        return rs.Loss(model(batch).sum(), 1013, metrics)

    def lr_scale(self, step: int) -> Any:
        return 1.0 if self._scale is None else self._scale(step)


ROWS = [Rows()[index] for index in range(len(Rows()))]
"""Those samples as a list, which a thread of the worker reads."""


def trained(workers: int, task: rs.Task, **settings: Any) -> Outcome:
    return train(workers, **{"task": task, "data": ROWS, "microbatches": 4, "steps": 3, **settings})


# -- weights, losses, metrics --


@cache
def given() -> Outcome:
    return trained(1, Given())


@pytest.mark.procs
def test_python_numbers_arrive_as_they_are_under_any_default_dtype() -> None:
    for numbers in given().numbers:
        assert numbers["weight"] == 4 * 1013
        assert numbers["metrics"]["large"] == 123456789
        assert numbers["metrics"]["numpy"] == 0.1
        assert numbers["metrics"]["tenth"] == pytest.approx(0.1, rel=1e-15)


@pytest.mark.procs
@pytest.mark.parametrize("kills", tried_each_time([[(1, 2, "backward")]], [[], [(1, 2, "backward")]]))
def test_the_same_numbers_at_three_workers_of_which_one_is_lost(kills: Any) -> None:
    assert trained(3, Given(), kills=kills).bits == given().bits


@pytest.mark.parametrize(("number", "weight", "metric"), [(1, 1012.0, 1012.0), (2, 1013.0, 1013.0)])
def test_the_first_number_of_the_rule_takes_the_default_dtype(number: int, weight: float, metric: float) -> None:
    results = Results("T.loss in step 1", numbers=number)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        results.add(0, as_loss(rs.Loss(torch.tensor(6.0), 1013, {"m": (1013, 1.0)}), 2, "T.loss"))
    finally:
        torch.set_default_dtype(before)
    assert results.by_microbatch() == {0: [6.0, weight, metric, 1.0]}


def test_results_of_many_microbatches_are_read_in_their_order() -> None:
    results = Results("T.loss in step 1")
    for index in range(1000):
        results.add(3 * index, as_loss(rs.Loss(torch.tensor(float(index)), 1), 2, "T.loss"))
        if index == 700:
            assert results.by_microbatch()[3 * 700] == [700.0, 1.0]
    assert results.by_microbatch() == {3 * index: [float(index), 1.0] for index in range(1000)}


def uneven(batch: torch.Tensor) -> float:
    return float(batch.double().sum()) * 0.1


class Uneven(Given):
    """Values whose sum depends on the order in which they are added and rounded."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return rs.Loss(model(batch).sum().double() * 0 + uneven(batch), 1013, {"uneven": (uneven(batch), 1)})

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        return self.loss(model, batch)


MICROBATCHES = 16


@pytest.mark.procs
def test_the_number_of_the_rule_tells_how_the_microbatches_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    newest = numerics.newest()
    evaluation = rs.EvalConfig(data=ROWS, every_steps=2, num_samples=50)
    batch = make_job("", steps=2, microbatches=MICROBATCHES).batch
    loader = MicrobatchLoader(ROWS, batch)
    values = [
        [uneven(torch.stack(list(loader.load(step, index).samples))) for index in range(MICROBATCHES)]
        for step in (1, 2)
    ]
    assert list(map(tree_sum, values)) != list(map(math.fsum, values))
    for number, add in ((2, tree_sum), (3, math.fsum)):
        monkeypatch.setattr(numerics, "newest", lambda at=number: newest.replace("numbers 3", f"numbers {at}"))
        outcome = trained(2, Uneven(), microbatches=MICROBATCHES, steps=2, evaluation=evaluation)
        found = [numbers["metrics"]["uneven"] for numbers in outcome.numbers]
        assert found == [add(each) / MICROBATCHES for each in values]
        size = batch.microbatch_size
        held_out = [uneven(torch.stack(ROWS[start : min(start + size, 50)])) for start in range(0, 50, size)]
        assert outcome.numbers[-1]["evaluation"]["uneven"] == add(held_out) / len(held_out)


@pytest.mark.procs
def test_microbatches_are_recorded_if_that_is_requested(tmp_path: Path) -> None:
    def recorded(workers: int, *kills: Fault) -> list[list[list[float]]]:
        listener, url, plan = Collector(), f"{tmp_path}/{workers}", FaultPlan(faults=kills, folder=str(tmp_path))
        job = make_job(
            url,
            task=Uneven(),
            data=ROWS,
            microbatches=MICROBATCHES,
            steps=2,
            faults=plan,
            records_microbatches=True,
        )
        make_driver(job, make_limits(job, workers, max_worker_losses=len(kills)), listener).run()
        assert all(plan.fired(kill) for kill in kills)
        return [fields["microbatches"] for kind, fields in listener.entries if kind == "step"]

    loader = MicrobatchLoader(ROWS, make_job("", microbatches=MICROBATCHES).batch)
    expected = [
        [[uneven(torch.stack(loader.load(step, index).samples)), 1013.0] for index in range(MICROBATCHES)]
        for step in (1, 2)
    ]
    assert recorded(1) == recorded(3, Fault(worker=WorkerId(1), step=2, phase="apply")) == expected
    assert [
        entry["microbatches"] for entry in read(open_storage(f"{tmp_path}/3")) if entry["kind"] == "step"
    ] == expected


# -- learning rates --

NUMBERS: dict[str, Any] = {
    "float": 0.5,
    "int": 0,
    "float32": np.float32(0.5),
    "array": np.array(0.5),
    "0-dim": torch.tensor(0.5),
    "of shape (1,)": torch.tensor([0.5]),
    "fraction": Fraction(1, 2),
    "warm-up": 0.0,
}


@pytest.mark.parametrize("name", NUMBERS)
def test_any_number_of_0_or_more_is_a_scale(name: str) -> None:
    task = Given(lambda _: NUMBERS[name])
    scale = scale_of(task, 3)
    rate = rate_of(task, 3, 0.1, scale, 2.0, number=2)
    assert type(rate) is float
    assert rate == 0.1 * float(NUMBERS[name]) * 2.0


def test_the_first_number_of_the_rule_rounds_a_rate_to_the_dtype_of_its_scale() -> None:
    task, scale = Given(), np.float32(0.1)
    assert rate_of(task, 1, 0.3, scale, 1.0, number=1) == np.float32(0.3) * np.float32(0.1)
    assert rate_of(task, 1, 0.3, scale, 1.0, number=2) == 0.3 * float(np.float32(0.1))


BAD: dict[str, tuple[Any, str]] = {
    "nan": (math.nan, r"returned nan: give a finite number, 0 or more"),
    "inf": (math.inf, r"returned inf: give"),
    "negative": (-1.0, r"returned -1\.0: give"),
    "negative tensor": (torch.tensor(-0.25), r"returned -0\.25: give"),
    "None": (None, r"returned None, which the learning rate cannot be multiplied with: give"),
    "text": ("1", r"returned '1', which"),
    "complex": (1j, r"returned 1j, which"),
    "two": (torch.ones(2), r"returned a tensor of shape \(2,\), which"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_scale_is_refused_with_the_step_and_what_it_is(name: str) -> None:
    value, message = BAD[name]
    with pytest.raises(TaskError, match=rf"^Given\.lr_scale\(7\) {message}"):
        scale_of(Given(lambda _: value), 7)


def test_a_product_that_is_no_rate_is_refused_with_its_factors() -> None:
    with pytest.raises(
        TaskError, match=r"learning rate of step 2 is inf: a group's own 1e\+200 times 1e\+200 of Given"
    ):
        rate_of(Given(), 2, 1e200, 1e200, 1.0, number=2)


def test_a_schedule_that_raises_is_named() -> None:
    scales: dict[int, float] = {}
    with pytest.raises(TaskError, match=r"^Given\.lr_scale\(4\) raised KeyError: 4"):
        scale_of(Given(scales.__getitem__), 4)


@dataclass(frozen=True)
class At:
    """A schedule with another value in one step."""

    values: Mapping[int, Any]

    def __call__(self, step: int) -> Any:
        return self.values.get(step, 1.0)


@pytest.mark.procs
@pytest.mark.parametrize("workers", tried_each_time([1], [1, 3]))
def test_a_rate_that_is_invalid_ends_the_run_in_its_step_and_not_in_the_next(workers: int) -> None:
    with pytest.raises(TaskError, match=r"Given\.lr_scale\(2\) returned nan: .*Step 2 was not applied"):
        trained(workers, Given(At({2: math.nan})))


@pytest.mark.procs
def test_a_rate_of_0_changes_nothing_and_any_kind_of_number_is_one_at_every_size() -> None:
    schedule = At({1: 0, 2: np.float32(0.5), 3: torch.tensor([0.25])})
    outcome = trained(1, Given(schedule))
    assert [numbers["lr"] for numbers in outcome.numbers] == [0.0, 0.0625, 0.03125]
    assert trained(2, Given(schedule), kills=[(1, 3, "apply")]).bits == outcome.bits


def test_a_bad_rate_leaves_the_gradient_and_the_weights_as_they_were() -> None:
    optimizer, model = shard_optimizer(LineOf(lambda params: torch.optim.SGD(params, lr=0.1), {1: math.nan}))
    assert isinstance(model, nn.Linear)
    before, model.weight.grad = model.weight.detach().clone(), torch.ones_like(model.weight)
    with pytest.raises(TaskError, match=r"Line\.lr_scale\(1\) returned nan"):
        optimizer.apply(1, 0.5)
    assert torch.equal(model.weight, before)
    assert torch.equal(model.weight.grad, torch.ones_like(before))


class Clipped(Given):
    def __init__(self, limit: Any) -> None:
        super().__init__()
        self.max_grad_norm = limit


@pytest.mark.procs
def test_a_limit_of_infinity_clips_nothing_and_one_of_numpy_clips_as_a_float() -> None:
    assert trained(1, Clipped(math.inf)).bits == given().bits
    assert trained(1, Clipped(np.float32(0.001))).bits == trained(1, Clipped(float(np.float32(0.001)))).bits


# -- half precision --


class Half(Given):
    """Its loss is summed in the dtype that the model computes in."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        y = model(batch)
        return rs.Loss(y.sum(), len(batch), {"mean": (y.detach().float().sum(), y.numel())})


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (rs.Loss(torch.tensor(1.0), 2), None),
        (
            rs.Loss(torch.tensor(1.0).bfloat16(), 2),
            r"T\.loss gave the loss in bfloat16: .* 2\^-8 .*`logits\.float\(\)`",
        ),
        (rs.Loss(torch.tensor(1.0), torch.tensor(2).half()), r"gave the weight in float16: .* 2\^-11 "),
        (
            rs.Loss(torch.tensor(1.0).bfloat16(), 2, {"a": (1, 1), "b": (torch.tensor(1).bfloat16(), 1)}),
            "gave the loss and the metric 'b' in bfloat16",
        ),
    ],
)
def test_what_came_in_half_precision_is_named_with_its_grid(loss: rs.Loss, said: str | None) -> None:
    results = Results("T.loss")
    results.note_half(as_loss(loss, 2, "T.loss"))
    assert bool(results.half) == (said is not None)
    if said is not None:
        assert re.search(said, half_precision("T.loss", results.half))


def test_a_remark_is_made_once_by_one_worker_and_known_to_the_others(caplog: pytest.LogCaptureFixture) -> None:
    first, second = Notes(), Notes()
    for sentence in ("one", "two"):
        first.say("a thing", sentence, aloud=True)
        second.say("a thing", sentence, aloud=False)
    second.say("a thing", "three", aloud=True)  # now it is the first worker
    second.say("another", "four", aloud=True)
    assert [record.getMessage() for record in caplog.records] == ["one", "four"]


@pytest.mark.procs
def test_a_run_reports_once_that_its_loss_is_in_half_precision(tmp_path: Path) -> None:
    log = tmp_path / "log"
    engine = rs.EngineConfig(param_dtype="bfloat16", accumulation="local")  # the first of 3 has no microbatch of 2
    kills = [(1, 2, "backward")]
    trained(3, Half(), microbatches=2, steps=2, engine=engine, kills=kills, prepare=partial(log_into, str(log)))
    said = [line for line in log.read_text().splitlines() if "in bfloat16" in line]
    assert len(said) == 1
    assert said[0].startswith("Half.loss in step 1 gave the loss in bfloat16: sums are rounded to steps of 2^-8")
