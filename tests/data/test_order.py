from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.data.order import positions_of_microbatch, positions_of_step, sample_ids
from raysharded.errors import DataError
from tests.cases import examples


def _epoch(seed: int, epoch: int, num_samples: int) -> list[int]:
    positions = epoch * num_samples + np.arange(num_samples, dtype=np.int64)
    ids: list[int] = sample_ids(seed, positions, num_samples).tolist()
    return ids


@given(seed=st.integers(-(2**70), 2**70), epoch=st.integers(0, 2**31), num_samples=st.integers(1, 1500))
def test_every_epoch_has_every_sample_exactly_once(seed: int, epoch: int, num_samples: int) -> None:
    assert sorted(_epoch(seed, epoch, num_samples)) == list(range(num_samples))


def test_every_small_dataset_is_permuted() -> None:
    for num_samples in range(1, 200):
        assert sorted(_epoch(3, 1, num_samples)) == list(range(num_samples))


@given(data=st.data(), num_samples=st.integers(1, 10**15))
@settings(max_examples=examples(25, of=50))
def test_a_sample_does_not_depend_on_what_else_is_requested(data: st.DataObject, num_samples: int) -> None:
    positions = np.asarray(data.draw(st.lists(st.integers(0, 2**62), min_size=1, max_size=20)), dtype=np.int64)
    together = sample_ids(5, positions, num_samples)
    alone = [int(sample_ids(5, positions[i : i + 1], num_samples)[0]) for i in range(len(positions))]
    assert together.tolist() == alone
    assert together.min() >= 0
    assert together.max() < num_samples


def test_the_order_is_the_same_for_ever() -> None:
    assert _epoch(0, 0, 10) == [5, 3, 8, 4, 2, 1, 7, 9, 0, 6]
    assert _epoch(0, 1, 10) == [0, 6, 4, 9, 5, 8, 7, 2, 3, 1]
    assert _epoch(-1, 0, 10) == [1, 7, 5, 9, 6, 2, 0, 8, 3, 4]
    positions = np.asarray([0, 1, 10**12 + 38, 9 * 10**17], dtype=np.int64)
    assert sample_ids(2**64 + 1, positions, 10**12 + 39).tolist() == [
        310183043936,
        373793616843,
        217043571841,
        264072186222,
    ]


def test_epochs_and_seeds_have_different_orders() -> None:
    orders = {tuple(_epoch(seed, epoch, 50)) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_all_orders_of_a_small_dataset_are_equally_frequent() -> None:
    epochs, num_samples, num_orders = 12_000, 4, 24
    ids = sample_ids(11, np.arange(epochs * num_samples), num_samples).reshape(epochs, num_samples)
    codes = ids @ (num_samples ** np.arange(num_samples))
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == num_orders
    expected = epochs / num_orders
    assert ((counts - expected) ** 2 / expected).sum() < 52  # chi-squared with 23 degrees of freedom, p = 0.0005


def test_neighbours_in_the_data_are_not_neighbours_in_the_order() -> None:
    num_samples = 10_000
    ids = np.asarray(_epoch(0, 0, num_samples))
    assert np.count_nonzero(np.abs(np.diff(ids)) == 1) < 20  # 2 are expected of a random order
    assert abs(np.corrcoef(np.arange(num_samples), ids)[0, 1]) < 0.05


def test_shape_is_kept_and_an_empty_request_gives_nothing() -> None:
    assert sample_ids(0, np.arange(6).reshape(2, 3), 4).shape == (2, 3)
    assert sample_ids(0, np.empty(0, dtype=np.int64), 4).tolist() == []


def test_impossible_requests_are_refused() -> None:
    with pytest.raises(DataError, match="0 samples"):
        sample_ids(0, np.arange(1), 0)
    with pytest.raises(ValueError, match="position -1"):
        sample_ids(0, np.asarray([3, -1]), 4)
    with pytest.raises(ValueError, match="from 1"):
        positions_of_step(0, 4)
    with pytest.raises(ValueError, match="microbatch 2 of step 1"):
        positions_of_microbatch(1, 2, 4, 2)


@given(steps=st.integers(1, 20), num_microbatches=st.integers(1, 8), size=st.integers(1, 8))
def test_steps_and_microbatches_cover_every_position_once(steps: int, num_microbatches: int, size: int) -> None:
    batch = num_microbatches * size
    by_step = [positions_of_step(step, batch) for step in range(1, steps + 1)]
    by_microbatch = [
        positions_of_microbatch(step, microbatch, batch, size)
        for step in range(1, steps + 1)
        for microbatch in range(num_microbatches)
    ]
    assert np.concatenate(by_step).tolist() == list(range(steps * batch))
    assert np.concatenate(by_microbatch).tolist() == list(range(steps * batch))
