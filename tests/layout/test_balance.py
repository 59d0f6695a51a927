"""Shares of senders: against the least maximum that any division has."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from raysharded.layout.reshard.balance import balance
from tests.cases import examples

MB = 10**6


def least_maximum(demand: list[int], options: list[set[int]], load: list[int]) -> float:
    """The most loaded set of senders, by sender: bytes that only they have must come from them, and no others need to
    (the max-flow min-cut theorem, Ford and Fulkerson, 1956)."""
    senders = range(len(load))
    sets = [set(some) for n in range(1, len(load) + 1) for some in combinations(senders, n)]
    return max(
        (sum(d for d, o in zip(demand, options, strict=True) if o and o <= some) + sum(load[s] for s in some))
        / len(some)
        for some in sets
    )


def ring(num: int, lost: set[int]) -> NDArray[np.int64]:
    """The owners of the bytes of each of so many workers: itself and the next one, if they are not lost."""
    rows = [[q, (q + 1) % num] for q in range(num)]
    return np.array([[-1 if worker in lost else worker for worker in row] for row in rows])


def loads(shares: NDArray[np.int64], options: NDArray[np.int64], load: NDArray[np.int64]) -> NDArray[np.int64]:
    total = load.copy()
    np.add.at(total, options[options >= 0], shares[options >= 0])
    return total


@settings(max_examples=examples(50, of=150), deadline=None)
@given(st.data(), st.integers(1, 7))
def test_no_sender_has_a_tenth_more_than_it_must(data: st.DataObject, senders: int) -> None:
    sets = st.sets(st.integers(0, senders - 1), max_size=4)
    groups = data.draw(st.lists(st.tuples(st.integers(0, 50).map(lambda n: n * MB), sets), max_size=12))
    load = np.array(data.draw(st.lists(st.sampled_from([0, 0, MB, 40 * MB]), min_size=senders, max_size=senders)))
    demand = np.array([size for size, _ in groups], np.int64)
    width = max((len(some) for _, some in groups), default=1)
    rows = [[*sorted(some), *[-1] * (width - len(some))] for _, some in groups]
    options = np.array(rows, np.int64).reshape(len(groups), width)
    shares = balance(demand, options, load)
    assert (shares >= 0).all()
    assert (shares[options < 0] == 0).all()
    wanted = np.where((options >= 0).any(axis=1), demand, 0)
    assert shares.sum(axis=1).tolist() == wanted.tolist()
    least = least_maximum(demand.tolist(), [some for _, some in groups], load.tolist())
    assert loads(shares, options, load).max() <= 1.1 * least + 100


def least_maximum_of_ring(demand: NDArray[np.int64], lost: set[int]) -> float:
    """As `least_maximum`, of sets of neighbours: they suffice, because sets apart from each other share nothing."""
    num = len(demand)
    alive = np.array([rank not in lost for rank in range(num)])
    wanted = np.where(alive | np.roll(alive, -1), demand, 0)
    bytes_before = np.append(0, np.cumsum(np.tile(wanted, 2)))
    live_before = np.append(0, np.cumsum(np.tile(alive, 2)))
    first = np.arange(num)
    at_start = np.where(alive, 0, wanted)[first - 1]  # only the first of the set has these bytes, of a lost worker
    least = float(wanted.sum() / alive.sum())
    for length in range(1, num):
        behind = first + length
        inside = bytes_before[behind - 1] - bytes_before[first]
        at_end = np.where(alive[behind % num], 0, wanted[(behind - 1) % num])
        live = live_before[behind] - live_before[first]
        least = max(least, float(((inside + at_start + at_end) / np.maximum(live, 1))[live > 0].max()))
    return least


@pytest.mark.parametrize("strips", [2, 10, 500])
@pytest.mark.parametrize("lost", [set(), {500}, {100, 108, 700}, set(range(200, 208)), {*range(0, 1000, 3)}])
def test_an_excess_is_passed_on_round_a_ring_of_mirrors(lost: set[int], strips: int) -> None:
    """Shards that are wanted more than others lie in strips."""
    num = 1000
    options, none = ring(num, lost), np.zeros(num, np.int64)
    demand = np.where(np.arange(num) * strips // num % 2, 3 * MB, 7 * MB)
    found = loads(balance(demand, options, none), options, none)
    assert found.max() <= 1.1 * least_maximum_of_ring(demand, lost)


def test_nothing_is_passed_on_where_every_sender_has_the_same() -> None:
    """A hundred replicas of eight shards: every holder of a shard sends as much as the others."""
    options = np.arange(800).reshape(8, 100)
    shares = balance(np.arange(8) * 100 * MB, options, np.zeros(800, np.int64))
    assert shares.tolist() == [[shard * MB] * 100 for shard in range(8)]
