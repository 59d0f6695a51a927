"""The order of ranks: the workers that stay in place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise, permutations, product

import pytest
from hypothesis import given, settings, strategies as st

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout import (
    Copy,
    Mesh,
    StateSpec,
    Target,
    TensorSpec,
    count_wire_bytes,
    keep_together,
    mirror_of,
    order_workers,
    tensor_specs,
)
from raysharded.layout.placement.assignment import NOWHERE, assign
from tests.cases import examples

SPEC = StateSpec(
    tensors=(
        TensorSpec(name="w", dtype="float32", shape=(60, 8)),
        TensorSpec(name="v", dtype="float32", shape=(840, 2)),
        TensorSpec(name="step", dtype="float32", shape=()),
    )
)


CUT = StateSpec(
    tensors=(
        *tensor_specs("wq", "float32", (24, 8), tensor_dim=0),
        *tensor_specs("wo", "float32", (12, 16), tensor_dim=1, strips=4),
        *tensor_specs("norm", "float32", (60, 2)),
        *tensor_specs("step", "float32", ()),
    )
)
"""For tensor parallelism of 2 or 4."""


def ids(*numbers: int) -> tuple[WorkerId, ...]:
    return tuple(WorkerId(n) for n in numbers)


def copies_of(workers: tuple[WorkerId, ...], lost: set[int], tensor: int = 1, apart: int = 1) -> tuple[Copy, ...]:
    alive = [None if w in lost else w for w in workers]
    size = len(workers)
    keeper = {mirror_of(rank, size, apart): alive[rank] for rank in range(size)} if size > 1 else {}
    snapshot = Copy(medium="snapshot", world_size=size, holders=tuple(alive), tensor=tensor)
    if not keeper:
        return (snapshot,)
    holders = tuple(keeper[r] for r in range(size))
    return snapshot, Copy(medium="mirror", world_size=size, holders=holders, tensor=tensor)


def test_joiners_take_the_vacated_ranks_when_the_size_is_unchanged() -> None:
    copies = copies_of(ids(5, 3, 8, 1), {3, 8})
    assert order_workers(SPEC, copies, ids(1, 5), ids(11, 10), True) == ids(5, 10, 11, 1)


def test_survivors_keep_their_order_when_the_run_grows() -> None:
    order = order_workers(SPEC, copies_of(ids(4, 2, 7), set()), ids(2, 4, 7), ids(9), False)
    assert [w for w in order if w != 9] == [4, 2, 7]


def test_a_single_worker_gets_rank_zero() -> None:
    assert order_workers(SPEC, (), (), ids(3), True) == ids(3)


@settings(max_examples=examples(20, of=60), deadline=None)
@given(st.data(), st.integers(1, 9), st.booleans())
def test_the_order_is_never_worse_than_survivors_first_and_depends_on_the_sets_alone(
    data: st.DataObject, size: int, mirrors: bool
) -> None:
    lost = data.draw(st.sets(st.integers(0, size - 1), max_size=size - 1))
    joiners = ids(*range(20, 20 + data.draw(st.integers(0, 4))))
    copies = copies_of(ids(*range(size)), lost)
    survivors = ids(*(w for w in range(size) if w not in lost))
    order = order_workers(SPEC, copies, survivors, joiners, mirrors)
    assert sorted(order) == sorted([*survivors, *joiners])
    assert order == order_workers(SPEC, copies, survivors[::-1], joiners[::-1], mirrors)

    def cost(workers: tuple[WorkerId, ...]) -> int:
        return count_wire_bytes(SPEC, copies, Target(workers=workers, mirrors=mirrors))

    assert cost(order) <= cost((*survivors, *joiners))


@settings(max_examples=examples(20, of=40), deadline=None)
@given(st.data(), st.sampled_from([1, 1, 1, 2]), st.booleans())
def test_no_order_of_all_moves_fewer_bytes(data: st.DataObject, replicas: int, mirrors: bool) -> None:
    """A world in which two generations may have left their buffers."""
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=2))
    lost = data.draw(st.sets(st.integers(0, 4), max_size=3))
    copies = sum((copies_of(ids(*data.draw(st.permutations(range(5)))[:size]), lost) for size in sizes), ())
    alive = ids(*(w for w in range(5) if w not in lost))
    num = max(1, data.draw(st.integers(1, 5 // replicas)))
    workers = ids(*data.draw(st.permutations([*alive, *range(5, 10)]))[: replicas * num])
    survivors = [w for w in workers if w in alive]
    joiners = [w for w in workers if w not in alive]
    order = order_workers(SPEC, copies, survivors, joiners, mirrors, replicas=replicas)

    def cost(order: tuple[WorkerId, ...]) -> int:
        return count_wire_bytes(SPEC, copies, Target(workers=order, mirrors=mirrors, replicas=replicas))

    by_shard = {tuple(frozenset(p[r::num]) for r in range(num)): p for p in permutations(workers)}  # one of each kind
    assert cost(order) == min(cost(p) for p in by_shard.values())


@settings(max_examples=examples(12, of=25), deadline=None)
@given(st.data(), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]))
def test_no_order_of_all_moves_fewer_bytes_with_tensor_parallelism(
    data: st.DataObject, before: int, tensor: int
) -> None:
    """Between any two degrees, and with mirrors that are farther apart."""
    old = ids(*data.draw(st.permutations(range(before * data.draw(st.integers(1, 4 // before))))))
    lost = data.draw(st.sets(st.integers(0, 3), max_size=2))
    copies = copies_of(old, lost, before)
    workers = ids(*data.draw(st.permutations([*(w for w in range(4) if w not in lost), *range(6, 10)]))[:4])
    mirrors, apart = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    survivors, joiners = [w for w in workers if w in old], [w for w in workers if w not in old]
    order = order_workers(CUT, copies, survivors, joiners, mirrors, tensor=tensor, apart=apart)

    def cost(order: tuple[WorkerId, ...]) -> int:
        return count_wire_bytes(CUT, copies, Target(workers=order, mirrors=mirrors, tensor=tensor, apart=apart))

    assert cost(order) == min(map(cost, permutations(workers)))


@settings(max_examples=examples(20, of=60), deadline=None)
@given(st.data(), st.sampled_from([2, 4]), st.sampled_from([1, 2]), st.integers(1, 4), st.booleans())
def test_as_many_tensor_parallel_groups_as_can_be_are_within_a_node(
    data: st.DataObject, tensor: int, replicas: int, shards: int, mirrors: bool
) -> None:
    world = replicas * shards * tensor
    nodes = {WorkerId(w): f"node {data.draw(st.integers(0, 3))}" for w in range(world)}
    old = ids(*data.draw(st.permutations(range(world))))
    copies = copies_of(
        old, data.draw(st.sets(st.integers(0, world - 1), max_size=2)), data.draw(st.sampled_from([1, 2]))
    )
    apart = data.draw(st.integers(1, max(1, shards * tensor - 1)))
    joining = data.draw(st.integers(0, 2))
    order = order_workers(CUT, copies, old[joining:], old[:joining], mirrors, nodes, replicas, tensor, apart)
    again = order_workers(
        CUT,
        copies,
        old[:joining:-1] + old[joining : joining + 1],
        old[:joining],
        mirrors,
        nodes,
        replicas,
        tensor,
        apart,
    )
    assert order == again
    assert sorted(order) == sorted(old)
    groups = [order[first : first + tensor] for first in range(0, world, tensor)]
    within = sum(len({nodes[worker] for worker in group}) == 1 for group in groups)
    assert within == sum(number // tensor for number in Counter(nodes.values()).values())


@settings(max_examples=examples(20, of=60), deadline=None)
@given(st.data(), st.sampled_from([1, 2]), st.lists(st.integers(1, 4), min_size=2, max_size=4))
def test_mirrors_are_on_other_nodes_if_they_are_as_far_apart_as_the_longest_run(
    data: st.DataObject, tensor: int, sizes: list[int]
) -> None:
    node_of = [node for node, size in enumerate(sizes) for _ in range(size * tensor)]
    world, apart = len(node_of), tensor * max(sizes)
    nodes = {WorkerId(w): f"node {node_of[w]}" for w in range(world)}
    old = ids(*data.draw(st.permutations(range(world))))
    copies = copies_of(old, data.draw(st.sets(st.integers(0, world - 1), max_size=2)), tensor)
    if apart == world:
        return
    order = order_workers(CUT, copies, old, (), True, nodes, tensor=tensor, apart=apart)
    where = [nodes[worker] for worker in order]
    assert sum(a != b for a, b in pairwise(where)) == len(sizes) - 1  # each node in one run
    if apart <= world - apart:
        assert all(where[rank] != where[mirror_of(rank, world, apart)] for rank in range(world))


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_new_node_takes_the_place_of_the_one_that_is_lost(tensor: int) -> None:
    """No other worker's rank changes, so only the two buffers of the new one are moved."""
    nodes = {WorkerId(w): f"node {w // 4}" for w in range(16)}
    copies = copies_of(ids(*range(12)), {4, 5, 6, 7}, tensor, apart=4)
    survivors, joiners = ids(0, 1, 2, 3, 8, 9, 10, 11), ids(12, 13, 14, 15)
    order = order_workers(CUT, copies, survivors, joiners, True, nodes, tensor=tensor, apart=4)
    assert order == ids(0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
    without = order_workers(CUT, copies, survivors, joiners, False, nodes, tensor=tensor)
    assert count_wire_bytes(CUT, copies, Target(workers=without, mirrors=False, tensor=tensor)) == count_wire_bytes(
        CUT, copies, Target(workers=order, mirrors=False, tensor=tensor)
    )


def test_replicas_of_tensor_parallel_groups_are_on_one_node_each() -> None:
    nodes = {WorkerId(w): f"node {w % 2}" for w in range(8)}
    order = order_workers(CUT, copies_of(ids(*range(8)), set(), 2), ids(*range(8)), (), False, nodes, 2, 2)
    assert [nodes[worker] for worker in order] in (["node 0"] * 4 + ["node 1"] * 4, ["node 1"] * 4 + ["node 0"] * 4)


@settings(max_examples=examples(66, of=200), deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 4))
def test_an_assignment_is_worth_the_most(data: st.DataObject, workers: int, places: int) -> None:
    row = st.dictionaries(st.integers(0, places - 1), st.integers(1, 6))
    gains = data.draw(st.lists(row, min_size=workers, max_size=workers))
    capacities = data.draw(st.lists(st.integers(0, 2), min_size=places, max_size=places))

    def fits(found: Sequence[int]) -> bool:
        return all(found.count(place) <= room for place, room in enumerate(capacities)) and all(
            place == NOWHERE or place in gain for gain, place in zip(gains, found, strict=True)
        )

    def worth(found: Sequence[int]) -> int:
        return sum(gain.get(place, 0) for gain, place in zip(gains, found, strict=True))

    found = assign([list(gain.items()) for gain in gains], capacities, 10**6)
    assert found is not None
    assert fits(found)
    assert worth(found) == max(map(worth, filter(fits, product(range(NOWHERE, places), repeat=workers))))


def test_a_search_that_takes_too_long_is_abandoned_and_the_best_simple_order_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gains = [[(0, 3), (1, 2)], [(0, 3), (1, 1)]]
    assert assign(gains, [1, 1], 100) == [1, 0]
    assert assign(gains, [1, 1], 0) is None
    copies = copies_of(ids(0, 1, 2, 3, 4, 5, 6), {2})
    monkeypatch.setattr("raysharded.layout.placement.rank_order._MAX_LOOKS", 0)
    survivors = ids(0, 1, 3, 4, 5, 6)
    order = order_workers(SPEC, copies, survivors, (), True)
    assert sorted(order) == sorted(survivors)
    target = Target(workers=survivors, mirrors=True)
    assert count_wire_bytes(SPEC, copies, replace(target, workers=order)) <= count_wire_bytes(SPEC, copies, target)


def test_replicas_keep_what_they_hold_when_one_worker_is_replaced() -> None:
    copies = (
        Copy(medium="snapshot", world_size=2, holders=ids(0, 1)),
        Copy(medium="snapshot", world_size=2, holders=(WorkerId(2), None)),
    )
    order = order_workers(SPEC, copies, ids(0, 1, 2), ids(9), True, replicas=2)
    assert {order.index(WorkerId(w)) % 2 for w in (0, 2)} == {0}
    assert {order.index(WorkerId(w)) % 2 for w in (1, 9)} == {1}
    moved = count_wire_bytes(SPEC, copies, Target(workers=order, mirrors=True, replicas=2))
    assert moved == count_wire_bytes(SPEC, copies[:1], Target(workers=ids(0, 9), mirrors=False))  # one shard


@settings(max_examples=examples(20, of=60), deadline=None)
@given(st.data(), st.integers(1, 4), st.integers(1, 4))
def test_workers_of_one_node_are_in_one_group_if_nodes_hold_groups(
    data: st.DataObject, replicas: int, shards: int
) -> None:
    nodes = {WorkerId(w): f"node {w // shards}" for w in range(replicas * shards)}
    of_shard = [data.draw(st.permutations(range(replicas))) for _ in range(shards)]
    by_shard = [WorkerId(replica * shards + shard) for shard in range(shards) for replica in of_shard[shard]]
    order = keep_together(by_shard, nodes, replicas)
    assert sorted(order) == sorted(by_shard)
    mesh = Mesh(replicas=replicas, shards=shards)
    for rank, worker in enumerate(order):
        assert worker % shards == mesh.shard_of(rank)  # moved within the holders of its shard only
    for replica in range(replicas):
        assert len({nodes[order[rank]] for rank in mesh.group(replica)}) == 1


def test_two_lists_that_name_one_worker_are_refused() -> None:
    with pytest.raises(ConfigError, match="each worker once"):
        order_workers(SPEC, (), ids(1), ids(1), True)
