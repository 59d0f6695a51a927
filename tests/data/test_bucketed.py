"""Bucketed samples: each once per epoch, of similar lengths in a microbatch, by the position alone; padding."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import raysharded as rs
from raysharded.data import padded
from raysharded.errors import ConfigError
from tests.cases import examples

SIZE = 4


def _lengths(number: int, seed: int = 0) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(10, 2000, number)]


@settings(max_examples=examples(12, of=30))
@given(number=st.integers(1, 100), size=st.integers(1, 7), window=st.integers(1, 9), seed=st.integers(0, 3))
def test_every_epoch_has_each_sample_once_in_another_order(number: int, size: int, window: int, seed: int) -> None:
    lengths = _lengths(number)
    data = rs.Bucketed(range(number), lengths, microbatch_size=size, window=window, seed=seed)
    epochs = [[data[epoch * number + place] for place in range(number)] for epoch in range(3)]
    assert all(sorted(epoch) == list(range(number)) for epoch in epochs)
    if number > 50:
        assert epochs[0] != epochs[1]
    copy = pickle.loads(pickle.dumps(data))
    backwards = [copy[position] for position in reversed(range(number))]
    assert list(reversed(backwards)) == epochs[0]


def test_a_microbatch_has_samples_of_similar_lengths() -> None:
    number = 128 * SIZE * 4
    lengths = np.asarray(_lengths(number))
    data = rs.Bucketed(range(number), lengths.tolist(), microbatch_size=SIZE)
    bucketed = lengths[[data[position] for position in range(number)]].reshape(-1, SIZE)
    random = lengths.reshape(-1, SIZE)

    def padding(microbatches: Any) -> float:
        return float(1 - microbatches.sum() / (microbatches.max(1) * SIZE).sum())

    assert padding(bucketed) < 0.02 < 0.3 < padding(random)
    means = bucketed.mean(1)
    assert abs(float(np.corrcoef(means[:-1], means[1:])[0, 1])) < 0.15, "neighbours of all lengths"


def test_later_epochs_keep_their_buckets_with_any_number_of_samples() -> None:
    number = 128 * SIZE * 4 + 1
    lengths = np.asarray(_lengths(number))
    data = rs.Bucketed(range(number), lengths.tolist(), microbatch_size=SIZE)
    first = -(-number // SIZE) * SIZE
    found = lengths[[data[position] for position in range(first, first + number // SIZE * SIZE)]].reshape(-1, SIZE)
    assert 1 - found.sum() / (found.max(1) * SIZE).sum() < 0.02


def test_the_order_depends_on_all_that_its_digest_covers() -> None:
    lengths = _lengths(30)
    changes: list[dict[str, Any]] = [{}, {"seed": 1}, {"window": 3}, {"microbatch_size": 2}]
    found = [rs.Bucketed(range(30), lengths, **{"microbatch_size": SIZE, **one}).order_digest for one in changes]
    found.append(rs.Bucketed(range(30), lengths[::-1], microbatch_size=SIZE).order_digest)
    assert len(set(found)) == len(found)
    assert min(found) > 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lengths": [1, 2]}, "2 lengths for 3 samples"),
        ({"lengths": [1, 2, -1]}, "a whole number of 0 or more for each sample"),
        ({"lengths": [1.5, 2.0, 3.0]}, "a whole number of 0 or more for each sample"),
        ({"microbatch_size": 0}, "microbatch_size=0: give a whole number of 1 or more"),
        ({"window": True}, "window=True"),
        ({"seed": 0.5}, "seed=0.5"),
    ],
)
def test_wrong_input_is_one_sentence(wrong: dict[str, Any], words: str) -> None:
    given_: dict[str, Any] = {"lengths": [3, 2, 1], "microbatch_size": 2, **wrong}
    with pytest.raises(ConfigError, match=words):
        rs.Bucketed([1, 2, 3], **given_)


def test_rows_are_padded_to_the_longest_and_to_a_multiple() -> None:
    samples: list[dict[str, Any]] = [{"a": [1, 2, 3], "b": np.asarray([4, 5, 6])}, {"a": [7], "b": [8], "c": "x"}]
    found = padded(samples, {"a": 0, "b": -100}, multiple_of=2)
    assert found["a"].tolist() == [[1, 2, 3, 0], [7, 0, 0, 0]]
    assert found["b"].tolist() == [[4, 5, 6, -100], [8, -100, -100, -100]]
    assert {array.dtype for array in found.values()} == {np.dtype(np.int64)}
    for wrong in ({"a": [1]}, {"a": [1], "b": [1, 2]}, {"a": [[1]], "b": [[1]]}):
        with pytest.raises(ConfigError, match="padded: sample 2 of the microbatch has"):
            padded([*samples, wrong], {"a": 0, "b": -100})
    for no_integers in ([0.5], ["1"]):
        with pytest.raises(ConfigError, match=r"padded: a of sample 2 .* dtype .*: give integers"):
            padded([*samples, {"a": no_integers, "b": [1]}], {"a": 0, "b": -100})
    assert padded([{"a": [], "b": []}], {"a": 7, "b": 8})["a"].tolist() == [[7]]
