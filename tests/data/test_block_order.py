"""Order 2: blocks, then a window."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.data import order
from raysharded.data.order import MAX_COLUMNS, WINDOW_BLOCKS, Blocks, sample_ids
from raysharded.errors import DataError
from tests.cases import examples

Ids = npt.NDArray[np.int64]
SIZES = st.sampled_from([2, 4, 8, 32])


@pytest.fixture
def small_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """A window of few blocks, so that small data have many."""
    monkeypatch.setattr(order, "WINDOW_BLOCKS", 6)
    monkeypatch.setattr(order, "MAX_COLUMNS", 10)


def _ids(positions: Ids, num_samples: int, samples: int, batch: int, seed: int = 5) -> Ids:
    return sample_ids(seed, positions, num_samples, 2, Blocks(samples, batch))


@pytest.mark.usefixtures("small_window")
@given(
    seed=st.integers(-(2**70), 2**70),
    epoch=st.integers(0, 2**31),
    num_samples=st.integers(1, 3000),
    samples=SIZES,
    batch=st.integers(1, 40),
)
@settings(max_examples=examples(33, of=100))
def test_every_epoch_has_every_sample_exactly_once(
    seed: int, epoch: int, num_samples: int, samples: int, batch: int
) -> None:
    ids = _ids(epoch * num_samples + np.arange(num_samples), num_samples, samples, batch, seed)
    assert np.array_equal(np.sort(ids), np.arange(num_samples))


@given(data=st.data(), num_samples=st.integers(1, 10**15), samples=SIZES, batch=st.integers(1, 10_000))
@settings(max_examples=examples(25, of=50))
def test_a_sample_does_not_depend_on_what_else_is_requested(
    data: st.DataObject, num_samples: int, samples: int, batch: int
) -> None:
    positions = np.asarray(data.draw(st.lists(st.integers(0, 2**62), min_size=1, max_size=20)), dtype=np.int64)
    together = _ids(positions, num_samples, samples, batch)
    assert together.tolist() == [
        int(_ids(positions[i : i + 1], num_samples, samples, batch)[0]) for i in range(len(positions))
    ]
    assert together.min() >= 0
    assert together.max() < num_samples


def test_data_without_blocks_or_with_too_few_have_the_first_order() -> None:
    positions = np.arange(3000)
    first = sample_ids(3, positions, 1000)
    assert np.array_equal(sample_ids(3, positions, 1000, 2), first)
    assert np.array_equal(sample_ids(3, positions, 1000, 2, Blocks(4, 8)), first)
    many = 8 * WINDOW_BLOCKS
    positions = np.arange(many)
    assert np.array_equal(_ids(positions[:-8], many - 8, 8, 8), sample_ids(5, positions[:-8], many - 8))
    assert not np.array_equal(_ids(positions, many, 8, 8), sample_ids(5, positions, many))


FROZEN = [
    (24_581, Blocks(8, 32), [1136, 8861, 19689, 1353, 24580, 12910, 830]),
    (1_000_000_000, Blocks(512, 256), [160116900, 257632262, 988238670, 938105578, 910345261, 917635493, 861295760]),
    (
        1_000_000_000_039,
        Blocks(32, 12288),
        [683202511809, 683202511826, 683202511814, 209600783927, 698269059413, 853626788688, 191162469311],
    ),
    (1_000_000, Blocks(2, 7), [710579, 464609, 388990, 888023, 965256, 376103, 470303]),
]


@pytest.mark.parametrize(("num_samples", "blocks", "expected"), FROZEN)
def test_the_order_is_the_same_for_ever(num_samples: int, blocks: Blocks, expected: list[int]) -> None:
    positions = np.asarray([0, 1, 2, 3, num_samples - 1, num_samples, 10**17 + 5], dtype=np.int64)
    assert sample_ids(11, positions, num_samples, 2, blocks).tolist() == expected


def _reads(ids: Ids, samples: int, kept: int) -> float:
    """Blocks read, over the least number, by a reader that keeps those last used."""
    least_recent: OrderedDict[int, None] = OrderedDict()
    reads = 0
    for block in (ids // samples).tolist():
        reads += block not in least_recent
        least_recent[block] = None
        least_recent.move_to_end(block)
        if len(least_recent) > kept:
            least_recent.popitem(last=False)
    return reads / (len(ids) / samples)


@pytest.mark.parametrize(("samples", "batch"), [(512, 32), (32, 256), (8, 256), (8, 48), (2, 31)])
def test_each_block_is_read_once(samples: int, batch: int) -> None:
    num_samples = samples * WINDOW_BLOCKS * (2 if samples > 100 else 5) + 3 * samples + 1
    ids = _ids(np.arange(num_samples), num_samples, samples, batch)
    kept = WINDOW_BLOCKS + WINDOW_BLOCKS // samples
    assert _reads(ids, samples, kept + 64) < 1.02
    assert _reads(sample_ids(5, np.arange(num_samples), num_samples), samples, kept + 64) > samples / 3


def test_workers_read_only_the_blocks_of_their_own_positions_of_a_step() -> None:
    samples, batch, workers = 8, 256, 8
    num_samples = samples * WINDOW_BLOCKS * 20
    positions = np.arange(num_samples).reshape(-1, batch)
    share = batch // workers
    for worker in (0, 3, 7):
        own = positions[:, worker * share : (worker + 1) * share].reshape(-1)
        assert _reads(_ids(own, num_samples, samples, batch), samples, WINDOW_BLOCKS // workers * 2) < 1.1


@pytest.mark.parametrize(("samples", "batch"), [(512, 32), (512, 256), (32, 32), (8, 256), (8, 1024)])
def test_a_batch_is_mixed_as_by_a_true_permutation(samples: int, batch: int) -> None:
    """Neighbours in the data are none in the order, and sources that follow each other in the data are mixed."""
    num_samples = samples * WINDOW_BLOCKS * 8
    steps = min(num_samples // batch, 100_000 // batch)
    spread = np.linspace(0, num_samples // batch - 1, steps, dtype=np.int64)  # all over the epoch
    drawn = _ids((spread[:, None] * batch + np.arange(batch)).reshape(-1), num_samples, samples, batch)
    true = np.random.default_rng(1).permutation(num_samples)[: steps * batch]

    def neighbours(ids: Ids) -> float:
        return float(abs(np.corrcoef(ids[:-1], ids[1:])[0, 1]))

    def in_one_block(ids: Ids) -> float:
        return float((ids[:-1] // samples == ids[1:] // samples).mean())

    def different_blocks(ids: Ids) -> float:
        return float(np.mean([len(np.unique(row)) for row in (ids // samples).reshape(steps, batch)])) / batch

    def deviation(ids: Ids) -> float:
        """Standard deviation of the share of the first of four sources in a batch."""
        return float((ids * 4 // num_samples == 0).reshape(steps, batch).mean(axis=1).std())

    assert neighbours(drawn) < 0.02
    assert in_one_block(drawn) < 0.001
    assert different_blocks(drawn) > different_blocks(true) - 0.03
    assert deviation(drawn) < 1.15 * deviation(true)


def test_impossible_blocks_are_refused() -> None:
    for blocks in (Blocks(3, 4), Blocks(0, 4), Blocks(4, 0)):
        with pytest.raises(DataError, match="power of two"):
            sample_ids(0, np.arange(4), 4, 2, blocks)


def test_a_position_far_away_takes_no_longer() -> None:
    num_samples = 10**12
    positions = np.asarray([0, 10**9, 10**12 - 1, 10**12, 9 * 10**17])
    assert len(set(_ids(positions, num_samples, 512, MAX_COLUMNS).tolist())) == len(positions)
