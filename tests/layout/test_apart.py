"""Neighbouring ranks on different nodes, wherever that can be."""

from __future__ import annotations

from collections import Counter
from itertools import permutations

from hypothesis import given, settings, strategies as st

from raysharded.ids import WorkerId
from raysharded.layout import (
    Copy,
    Target,
    count_neighbours,
    count_wire_bytes,
    fewest_neighbours,
    keep_apart,
    order_workers,
    spared_first,
)
from tests.cases import examples
from tests.layout.test_planner import ids, memory_copies, spec_of

PLACES = st.lists(st.sampled_from("abcd"), min_size=1, max_size=24)


def placed(places: list[str]) -> dict[WorkerId, str]:
    return {WorkerId(number): node for number, node in enumerate(places)}


@given(PLACES, st.randoms(use_true_random=False))
def test_there_are_as_few_neighbours_on_one_node_as_the_counts_allow(places: list[str], random: object) -> None:
    nodes = placed(places)
    order = list(nodes)
    random.shuffle(order)  # type: ignore[attr-defined] # a random.Random
    apart = keep_apart(order, nodes)
    assert sorted(apart) == sorted(order)
    assert count_neighbours(apart, nodes) == max(0, 2 * max(map(places.count, places)) - len(places))
    assert keep_apart(apart, nodes) == apart  # nothing to gain: kept


@settings(max_examples=examples(15, of=30))
@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=6))
def test_no_order_at_all_has_fewer(places: list[str]) -> None:
    nodes = placed(places)
    best = min(count_neighbours(order, nodes) for order in permutations(nodes))
    assert best == fewest_neighbours(list(nodes), nodes)


def test_on_one_node_or_with_nothing_known_the_order_is_kept() -> None:
    assert keep_apart(ids(3, 1, 2), {}) == ids(3, 1, 2)
    assert keep_apart(ids(3, 1, 2), dict.fromkeys(ids(1, 2, 3), "a")) == ids(3, 1, 2)


def test_two_nodes_alternate_and_the_first_worker_stays_the_first() -> None:
    nodes = dict(zip(ids(0, 1, 2, 3), "aabb", strict=True))
    assert keep_apart(ids(0, 1, 2, 3), nodes) == ids(0, 2, 1, 3)
    assert keep_apart(ids(2, 3, 0, 1), nodes) == ids(2, 0, 3, 1)


def test_ranks_are_chosen_among_orders_whose_neighbours_are_apart() -> None:
    spec = spec_of((100, 3), (7,))
    copies = (Copy(medium="snapshot", world_size=4, holders=ids(0, 1, 2, 3), layout_id=1),)
    nodes = dict(zip(ids(0, 1, 2, 3), "aabb", strict=True))
    order = order_workers(spec, copies, ids(0, 1, 2, 3), (), True, nodes)
    assert count_neighbours(order, nodes) == 0
    assert order_workers(spec, copies, ids(0, 1, 2, 3), (), False, nodes) == ids(0, 1, 2, 3)  # no mirrors: no need


@settings(max_examples=examples(20, of=40), deadline=None)
@given(st.data(), st.integers(2, 12), st.integers(1, 5))
def test_ranks_keep_apart_whom_they_can_and_move_no_more_than_a_plain_order(
    data: st.DataObject, size: int, num_nodes: int
) -> None:
    spec = spec_of((100, 3), (60, 2), (7,))
    nodes = {WorkerId(w): f"node {data.draw(st.integers(0, num_nodes - 1))}" for w in range(size)}
    lost = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    copies = memory_copies(keep_apart(ids(*range(size)), nodes), sorted(lost))
    survivors = ids(*(w for w in range(size) if w not in lost))
    order = order_workers(spec, copies, survivors, (), True, nodes)
    assert count_neighbours(order, nodes) == fewest_neighbours(survivors, nodes)
    plain = Target(workers=keep_apart(survivors, nodes), mirrors=True)
    assert count_wire_bytes(spec, copies, Target(workers=order, mirrors=True)) <= count_wire_bytes(spec, copies, plain)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=16), st.integers(1, 5))
def test_whole_groups_on_a_node_stay_as_long_as_others_are_enough(on: list[str], shards: int) -> None:
    nodes = {WorkerId(worker): node for worker, node in enumerate(on)}
    order = spared_first(list(nodes), nodes, shards)
    assert sorted(order) == sorted(nodes)
    kept = order[len(nodes) % shards :]
    whole = sum(count // shards for count in Counter(on).values())
    assert sum(count // shards for count in Counter(nodes[worker] for worker in kept).values()) == whole
