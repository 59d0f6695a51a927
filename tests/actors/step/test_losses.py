"""The values that a task's loss may return, and the errors for all others."""

from __future__ import annotations

import math
import random
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from raysharded import Loss
from raysharded.actors.step.forward_backward import DRAWS, Results, as_loss
from raysharded.data.access import generators
from raysharded.errors import TaskError

TOTAL = torch.tensor(6.0)
A_TENSOR = torch.tensor([2.0])


@pytest.mark.parametrize(
    "weight", [0, 3, 2.5, np.float32(2), np.int64(2), np.array(2.0), np.array([2]), torch.tensor(3), A_TENSOR]
)
@pytest.mark.parametrize("metrics", [{}, {"hits": (1, A_TENSOR), "loss": [np.float64(2), 4.5]}])
def test_a_sum_its_weight_and_metrics_are_taken_as_they_are(weight: Any, metrics: Any) -> None:
    loss = Loss(TOTAL, weight, metrics)
    assert as_loss(loss, 2, "T.loss") is loss


@pytest.mark.parametrize(
    "pair",
    [
        torch.stack([torch.tensor(3.0), torch.tensor(4)]),
        torch.tensor([[3], [4]]),
        np.array([3.0, 4.0]),
        (np.array(3), np.array([4])),
        [Fraction(3), Decimal(4)],
    ],
    ids=["tensor", "column", "array", "arrays", "other numbers"],
)
def test_a_metric_is_any_two_numbers(pair: Any) -> None:
    results = Results("T.loss in step 4")
    results.add(0, as_loss(Loss(TOTAL, np.array(2.0), {"hits": pair}), 2, "T.loss"))  # type: ignore[arg-type]
    assert results.by_microbatch() == {0: [6.0, 2.0, 3.0, 4.0]}


def test_a_scalar_is_the_mean_over_the_samples() -> None:
    loss = as_loss(TOTAL, 2, "T.loss")
    assert (float(loss.total), loss.weight) == (12.0, 2.0)


@pytest.mark.parametrize(
    ("weight", "shown"),
    [
        (-1.0, r"-1\.0"),
        (float("nan"), "nan"),
        (None, "None"),
        ("8", "a str"),
        (torch.ones(2), r"a tensor of shape \(2,\)"),
        (np.ones(2), r"an array of shape \(2,\)"),
        (np.array("8"), r"an array of shape \(\)"),
        (np.array(-1.0), r"-1\.0"),
        (10**400, "a int"),
    ],
)
def test_a_weight_that_is_invalid_is_refused_with_what_it_is(weight: Any, shown: str) -> None:
    with pytest.raises(TaskError, match=rf"^T\.loss returned a Loss whose weight is {shown}; give the number of items"):
        as_loss(Loss(TOTAL, weight), 2, "T.loss")


@pytest.mark.parametrize(
    ("metrics", "shown"),
    [
        (None, "None as metrics"),
        (["a"], "a list as metrics"),
        ({"a": 0.5}, r"the metric 'a' as \(a float\)"),
        ({"a": TOTAL}, r"the metric 'a' as \(a tensor of shape \(\)\)"),
        ({"a": (1.0, 2.0, 3.0)}, r"the metric 'a' as \(a float, a float, a float\)"),
        ({"a": (torch.ones(3), 1.0)}, r"the metric 'a' as \(a tensor of shape \(3,\), a float\)"),
        ({"a": (1.0, "2")}, r"the metric 'a' as \(a float, a str\)"),
        ({"a": "12"}, r"the metric 'a' as \(a str\)"),
        ({"a": torch.ones(3)}, r"the metric 'a' as \(a tensor of shape \(3,\)\)"),
        ({"a": torch.ones(2, 2)}, r"the metric 'a' as \(a tensor of shape \(2, 2\)\)"),
    ],
)
def test_metrics_that_are_invalid_are_refused_by_name(metrics: Any, shown: str) -> None:
    with pytest.raises(TaskError, match=rf"^T\.loss returned {shown}; give "):
        as_loss(Loss(TOTAL, 1.0, metrics), 2, "T.loss")


def test_a_negative_weight_in_a_tensor_is_found_where_it_is_on_the_host() -> None:
    results = Results("T.loss in step 4")
    results.add(3, as_loss(Loss(TOTAL, torch.tensor(20.0)), 2, "T.loss"))
    assert results.by_microbatch() == {3: [6.0, 20.0]}
    results.add(5, as_loss(Loss(TOTAL, torch.tensor(-1.0)), 2, "T.loss"))
    with pytest.raises(TaskError, match=r"T\.loss in step 4, microbatch 5 returned a Loss whose weight is -1\.0"):
        results.values()


def test_a_negative_weight_is_named_beside_one_that_is_not_a_number() -> None:
    results = Results("T.loss in step 4")
    for index, weight in enumerate((math.nan, 1.0, -2.0)):
        results.add(index, Loss(TOTAL, torch.tensor(weight)))
    with pytest.raises(TaskError, match=r"microbatch 2 returned a Loss whose weight is -2\.0"):
        results.values()


@pytest.mark.parametrize("number", sorted(DRAWS))
def test_each_microbatch_of_each_step_and_purpose_draws_from_a_seed_of_its_own(number: int) -> None:
    before = generators.states()
    try:
        drawn = []
        for place in [
            (5, "train", 3, 4),
            (6, "train", 3, 4),
            (5, "evaluate", 3, 4),
            (5, "train", 2, 4),
            (5, "train", 3, 1),
        ]:
            DRAWS[number](*place)
            drawn.append((torch.rand(()).item(), *([random.random(), np.random.random()] if number > 1 else [])))
        assert all(len(set(values)) == len(drawn) for values in zip(*drawn, strict=True))
        DRAWS[number](5, "train", 3, 4)
        assert torch.rand(()).item() == drawn[0][0]
    finally:
        generators.restore(before)
