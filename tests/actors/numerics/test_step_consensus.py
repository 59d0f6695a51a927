"""The agreement: each worker's contribution arrives at all of them, exactly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from raysharded.actors.numerics.grad_norm import NORM_WORDS, square_sum_words
from raysharded.actors.numerics.step_consensus import Agreed, Contribution, Flags, Pair, agree, require_weight
from raysharded.actors.numerics.summation_tree import tree_sum, tree_sums
from raysharded.errors import TaskError

NAMES = ("accuracy", "entropy")
FLOATS = st.floats(allow_nan=False, width=64)


def contribution(
    losses: dict[int, Pair],
    *,
    metrics: dict[int, list[Pair]] | None = None,
    gradient: torch.Tensor | None = None,
    digest: tuple[int, int] = (0, 0),
    num_reads: int = 0,
    flags: Flags | None = None,
) -> Contribution:
    return Contribution(
        losses=losses,
        metrics=metrics if metrics is not None else {index: [] for index in losses},
        metric_names=NAMES if metrics is not None else (),
        norm_words=square_sum_words([gradient])[0]
        if gradient is not None
        else torch.zeros(NORM_WORDS, dtype=torch.int64),
        read_digest=digest,
        num_reads=num_reads,
        flags=flags or Flags(),
    )


def agreed_by(contributions: list[Contribution], num_microbatches: int) -> Agreed:
    """The result that each of the workers gets, their sum simulated by plain addition."""
    sent: list[torch.Tensor] = []

    def remember(values: torch.Tensor) -> torch.Tensor:
        sent.append(values.clone())
        return values

    for own in contributions:
        agree(own, num_microbatches, remember)
    total = torch.stack(sent).sum(0)
    everyone: Callable[[torch.Tensor], torch.Tensor] = lambda _: total.clone()  # noqa: E731
    return agree(contributions[0], num_microbatches, everyone)


@given(
    values=st.lists(st.tuples(FLOATS, FLOATS, FLOATS, FLOATS, FLOATS, FLOATS), min_size=1, max_size=9),
    workers=st.integers(1, 5),
)
def test_floats_of_any_sign_and_size_arrive_exactly_from_any_number_of_workers(
    values: list[tuple[float, float, float, float, float, float]], workers: int
) -> None:
    count = len(values)
    shares = [
        contribution(
            {j: values[j][:2] for j in range(rank, count, workers)},
            metrics={j: [values[j][2:4], values[j][4:6]] for j in range(rank, count, workers)},
        )
        for rank in range(workers)
    ]
    agreed = agreed_by(shares, count)
    columns = [tree_sum([row[column] for row in values]) for column in range(6)]
    found = [agreed.loss_sum, agreed.weight, *agreed.metrics["accuracy"], *agreed.metrics["entropy"]]
    assert [repr(value) for value in found] == [repr(value) for value in columns]


@given(
    values=st.lists(st.lists(st.floats(width=64), min_size=3, max_size=3), min_size=1, max_size=70),
    large=st.integers(0, 1500),
)
def test_sums_by_levels_have_the_bits_of_the_tree(values: list[list[float]], large: int) -> None:
    rows = np.array(values + values * (large // len(values)), dtype=np.float64)
    expected = [tree_sum(column.tolist()) for column in rows.T]
    assert [repr(one) for one in tree_sums(rows)] == [repr(one) for one in expected]


def test_an_agreement_on_65536_microbatches_with_10_metrics_takes_less_than_a_quarter_of_a_second() -> None:
    """The processor time is the least of three."""
    count, names = 1 << 16, tuple(f"metric {number}" for number in range(10))
    own = replace(
        contribution({j: (1.0 + j, 2.0) for j in range(0, count, 4)}),
        metrics={j: [(0.5 * j, 1.0)] * 10 for j in range(0, count, 4)},
        metric_names=names,
    )
    taken = []
    for _ in range(3):
        began = time.thread_time()
        agreed = agree(own, count, lambda values: values)
        taken.append(time.thread_time() - began)
    assert agreed.weight == count / 2
    assert min(taken) < 0.25


def test_negative_losses_and_digests_beyond_the_sign_bit_survive() -> None:
    first = contribution({0: (-3.25, 2.0)}, digest=(2**64 - 1, 2**63), num_reads=2)
    second = contribution({1: (-1e-300, 0.5)}, digest=(5, 2**63 + 7), num_reads=3)
    agreed = agreed_by([first, second], 2)
    assert (agreed.loss_sum, agreed.weight) == (-3.25 + -1e-300, 2.5)
    assert agreed.read_digest == (4, 7)
    assert agreed.num_reads == 5


def test_a_loss_that_is_nan_is_seen_by_all() -> None:
    agreed = agreed_by([contribution({0: (1.0, 1.0)}), contribution({1: (math.nan, 1.0)})], 2)
    assert math.isnan(agreed.loss_sum)
    assert math.isnan(agreed.loss)


@pytest.mark.parametrize("name", ["non_finite_gradient", "boundary", "save_busy"])
def test_what_one_worker_raises_all_act_on(name: str) -> None:
    raised = Flags(**{name: True})
    shares = [contribution({0: (1.0, 1.0)}), contribution({}, flags=raised), contribution({}, flags=raised)]
    assert agreed_by(shares, 1).flags == raised


@given(workers=st.integers(1, 7))
def test_the_norm_is_that_of_the_whole_gradient(workers: int) -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    shares = [contribution({}, gradient=part) for part in gradient.tensor_split(workers)]
    whole = agreed_by([contribution({}, gradient=gradient)], 3)
    assert agreed_by(shares, 3).gradient_norm == whole.gradient_norm > 0


@pytest.mark.parametrize("weight", [0.0, -1.0, math.inf, math.nan])
def test_a_step_without_a_usable_weight_is_refused(weight: float) -> None:
    agreed = agreed_by([contribution({0: (1.0, weight)})], 1)
    with pytest.raises(TaskError, match="step 7"):
        require_weight(7, agreed)


def test_no_items_at_all_have_no_average() -> None:
    agreed = agreed_by([contribution({0: (0.0, 0.0)})], 1)
    assert agreed.weight == 0.0
    assert math.isnan(agreed.loss)
