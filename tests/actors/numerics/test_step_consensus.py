"""The agreement: each worker's contribution arrives at all of them, exactly."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from raysharded.actors.numerics.grad_norm import NORM_WORDS, square_sum_words
from raysharded.actors.numerics.step_consensus import Agreed, Contribution, Flags, agree, require_weight
from raysharded.actors.numerics.summation_tree import tree_sum, tree_sums
from raysharded.errors import TaskError

NAMES = ("accuracy", "entropy")
FLOATS = st.floats(allow_nan=False, width=64)
NUMBERS = pytest.mark.parametrize("numbers", [2, 3])
"""Numbers of the rule, one of each layout."""
Pair = tuple[float, float]


def contribution(
    losses: dict[int, Pair],
    *,
    metrics: dict[int, list[Pair]] | None = None,
    gradient: torch.Tensor | None = None,
    digest: tuple[int, int] = (0, 0),
    num_reads: int = 0,
    flags: Flags | None = None,
    uses: tuple[bool, ...] = (),
    presumed: tuple[bool, ...] = (),
) -> Contribution:
    metric_names = NAMES if metrics is not None else ()
    rows = [[*pair, *chain.from_iterable((metrics or {}).get(index, ()))] for index, pair in losses.items()]
    return Contribution(
        microbatches=tuple(losses),
        values=np.array(rows, dtype=np.float64).reshape(len(losses), 2 + 2 * len(metric_names)),
        metric_names=metric_names,
        norm_words=square_sum_words([gradient])[0]
        if gradient is not None
        else torch.zeros(NORM_WORDS, dtype=torch.int64),
        read_digest=digest,
        num_reads=num_reads,
        flags=flags or Flags(),
        uses=uses,
        presumed=presumed,
    )


class Exchange:
    """Workers that agree at the same time; each waits in its sums for the others."""

    def __init__(self, num_workers: int) -> None:
        self._barrier = threading.Barrier(num_workers, timeout=30.0)
        self._sent: list[torch.Tensor | None] = [None] * num_workers
        self.lengths: list[int] = []
        """Words of each sum."""

    def sum_of(self, rank: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def sum_over_workers(words: torch.Tensor) -> torch.Tensor:
            self._sent[rank] = words
            self._barrier.wait()
            total = torch.stack([one for one in self._sent if one is not None]).sum(0)
            if rank == 0:
                self.lengths.append(len(words))
            self._barrier.wait()
            return total

        return sum_over_workers


def agreed_by(
    contributions: list[Contribution], num_microbatches: int, numbers: int = 3, lengths: list[int] | None = None
) -> Agreed:
    """The result that all of the workers get."""
    exchange = Exchange(len(contributions))
    with ThreadPoolExecutor(len(contributions)) as pool:
        results = [
            pool.submit(agree, own, num_microbatches, exchange.sum_of(rank), numbers=numbers)
            for rank, own in enumerate(contributions)
        ]
        found = [repr(one.result()) for one in results]
    assert len(set(found)) == 1, "all workers have the same bits"
    if lengths is not None:
        lengths += exchange.lengths
    return results[0].result()


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
    columns = [[row[column] for row in values] for column in range(6)]
    for numbers, add in ((2, tree_sum), (3, exact_sum)):
        agreed = agreed_by(shares, count, numbers)
        found = [agreed.loss_sum, agreed.weight, *agreed.metrics["accuracy"], *agreed.metrics["entropy"]]
        assert [repr(value) for value in found] == [repr(add(column)) for column in columns]


def exact_sum(values: list[float]) -> float:
    """`math.fsum`, which takes no infinity of both signs, and no sum that is too large on the way."""
    infinite = {value for value in values if math.isinf(value)}
    if infinite:
        return math.nan if len(infinite) > 1 else infinite.pop()
    total = sum(map(Fraction, values), Fraction(0))
    try:
        return float(total)
    except OverflowError:
        return math.inf if total > 0 else -math.inf


@given(
    values=st.lists(st.lists(st.floats(width=64), min_size=3, max_size=3), min_size=1, max_size=70),
    large=st.integers(0, 1500),
)
def test_sums_by_levels_have_the_bits_of_the_tree(values: list[list[float]], large: int) -> None:
    rows = np.array(values + values * (large // len(values)), dtype=np.float64)
    expected = [tree_sum(column.tolist()) for column in rows.T]
    assert [repr(one) for one in tree_sums(rows)] == [repr(one) for one in expected]


LARGE = 1 << 16
"""Microbatches of a large step."""


def share_of_a_large_step(num_workers: int) -> Contribution:
    share = contribution({j: (1.0 + j, 2.0) for j in range(0, LARGE, num_workers)})
    values = np.tile(share.values, 11).astype(np.float32).astype(np.float64)
    return replace(share, values=values, metric_names=tuple(f"metric {number}" for number in range(10)))


def test_an_agreement_on_65536_microbatches_with_10_metrics_is_less_than_4_kilobytes() -> None:
    sent: list[int] = []

    def sum_over_workers(words: torch.Tensor) -> torch.Tensor:
        sent.append(words.nbytes)
        return words

    agreed = agree(share_of_a_large_step(8), LARGE, sum_over_workers, numbers=3)
    assert agreed.weight == LARGE / 8 * 2
    assert len(sent) == 1
    assert sent[0] < 4096


@NUMBERS
def test_an_agreement_on_65536_microbatches_with_10_metrics_takes_less_than_a_quarter_of_a_second(numbers: int) -> None:
    """The processor time is the least of three."""
    own, taken = share_of_a_large_step(4), []
    for _ in range(3):
        began = time.thread_time()
        agreed = agree(own, LARGE, lambda values: values, numbers=numbers)
        taken.append(time.thread_time() - began)
    assert agreed.weight == LARGE / 2
    assert min(taken) < 0.25


@NUMBERS
def test_microbatches_whose_loss_is_not_finite_are_named(numbers: int) -> None:
    bad = {3: math.nan, 64: math.inf, 99: -math.inf}
    shares = [
        contribution({j: (bad.get(j, 1.0), 1.0) for j in range(rank, 100, 3)}, uses=(True, rank == 1))
        for rank in range(3)
    ]
    agreed = agreed_by(shares, 100, numbers)
    assert agreed.bad_losses == tuple(bad)
    assert math.isnan(agreed.loss_sum)
    assert (agreed.weight, agreed.used) == (100.0, (True, True))


USES = st.lists(st.booleans(), min_size=4, max_size=4).map(tuple)


@given(workers=st.lists(st.tuples(USES, USES, st.booleans()), min_size=1, max_size=4))
def test_a_parameter_is_used_if_any_worker_used_it_at_any_presumptions(
    workers: list[tuple[tuple[bool, ...], tuple[bool, ...], bool]],
) -> None:
    shares = [
        contribution({rank: (1.0, 1.0)} if has_values else {}, uses=uses, presumed=presumed)
        for rank, (uses, presumed, has_values) in enumerate(workers)
    ]
    expected = tuple(map(any, zip(*(uses for uses, _, _ in workers), strict=True)))
    for numbers in (2, 3):
        agreed = agreed_by(shares, len(workers), numbers)
        assert agreed.used == expected
        assert agreed.weight == sum(has_values for _, _, has_values in workers)


@pytest.mark.parametrize(
    ("uses", "presumed", "num_sums"),
    [
        ([(True, False)] * 3, (True, True), 1),
        ([(True, False), (False, False), (True, False)], (True, False), 1),
        ([(True, False), (False, False), (True, False)], (True, True), 2),
        ([(True, False), (True, True)], (True, True), 2),
        ([(False, False)] * 2, (True, True), 1),
    ],
)
def test_parameters_are_counted_where_the_workers_did_not_use_the_same(
    uses: list[tuple[bool, ...]], presumed: tuple[bool, ...], num_sums: int
) -> None:
    lengths: list[int] = []
    shares = [contribution({rank: (1.0, 1.0)}, uses=one, presumed=presumed) for rank, one in enumerate(uses)]
    agreed_by(shares, len(uses), lengths=lengths)
    assert len(lengths) == num_sums


def test_the_words_of_the_older_numbers_are_those_of_the_versions_that_had_them() -> None:
    """Workers of an older version may be in the same sum."""
    own = contribution(
        {1: (-2.5, 3.0)},
        metrics={1: [(0.5, 1.0), (7.0, 2.0)]},
        digest=(5, 2**64 - 1),
        num_reads=9,
        flags=Flags(boundary=True),
        uses=(True, False),
    )
    sent: list[list[int]] = []

    def sum_over_workers(words: torch.Tensor) -> torch.Tensor:
        sent.append(words.tolist())
        return words

    agree(own, 2, sum_over_workers, numbers=2)
    slots = np.array([0.0] * 6 + [-2.5, 3.0, 0.5, 1.0, 7.0, 2.0]).view(np.int64).tolist()
    assert sent == [[0, 1, 0, 0, *[0] * NORM_WORDS, 5, -1, 9, 1, 0, *slots]]


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
