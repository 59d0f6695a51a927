"""The one order of addition: every adder, in every order, gets the same bits."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, strategies as st

from raysharded.actors.numerics.microbatch_schedule import Schedule
from raysharded.actors.numerics.summation_tree import Node, TreeSum, aligned_nodes, tree_sum
from raysharded.config import Accumulation
from raysharded.layout import Mesh

COUNTS = st.integers(1, 40)
MESHES = st.builds(Mesh, replicas=st.integers(1, 5), shards=st.integers(1, 6))
MODES = st.sampled_from(["sharded", "local"])


def leaves_of(node: Node, num_leaves: int) -> range:
    level, index = node
    return range(index << level, min((index + 1) << level, num_leaves))


def recursive_sum(leaves: list[torch.Tensor]) -> torch.Tensor:
    """Pairwise summation as in the books, halves of a power of two: the definition that `TreeSum` must follow."""
    if len(leaves) == 1:
        return leaves[0]
    half = 1 << ((len(leaves) - 1).bit_length() - 1)
    return recursive_sum(leaves[:half]) + recursive_sum(leaves[half:])


def draw(num_leaves: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_leaves)
    return [torch.randn(17, generator=generator) * 10 ** (i % 7) for i in range(num_leaves)]


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.add_(b)


@given(num_leaves=COUNTS, data=st.data())
def test_the_sum_has_the_same_bits_in_every_order_of_arrival(num_leaves: int, data: st.DataObject) -> None:
    leaves = draw(num_leaves)
    total: TreeSum[torch.Tensor] = TreeSum(num_leaves, add)
    for index in data.draw(st.permutations(range(num_leaves))):
        total.add((0, index), leaves[index].clone())
    assert torch.equal(total.root(), recursive_sum(leaves))


def computed_by(schedule: Schedule, ranks: Iterable[int]) -> list[int]:
    """The microbatches of these workers, in the order of rounds and ranks."""
    mesh = schedule.mesh
    rounds = [(index, rank) for rank in ranks for index in range(schedule.num_rounds(mesh.replica_of(rank)))]
    found = [schedule.microbatch_of(rank, index) for index, rank in sorted(rounds)]
    return [index for index in found if index is not None]


@given(num_leaves=COUNTS, mesh=MESHES, mode=MODES, data=st.data())
def test_partial_sums_of_any_workers_and_groups_give_the_bits_of_the_leaves_in_order(
    num_leaves: int, mesh: Mesh, mode: Accumulation, data: st.DataObject
) -> None:
    leaves = draw(num_leaves)
    schedule = Schedule(mode=mode, num_microbatches=num_leaves, mesh=mesh)
    parts = [(schedule.sums_of_replica(replica), mesh.group(replica)) for replica in range(mesh.replicas)]
    if mode == "local" and data.draw(st.booleans()):
        parts = [(schedule.sums_of_rank(rank), range(rank, rank + 1)) for rank in range(mesh.world_size)]
    total: TreeSum[torch.Tensor] = TreeSum(num_leaves, add)
    for nodes, ranks in data.draw(st.permutations(parts)):
        own: TreeSum[torch.Tensor] = TreeSum(num_leaves, add)
        for index in computed_by(schedule, ranks):
            own.add((0, index), leaves[index].clone())
        partial_sums = own.pop_all()  # `nodes` are the receivers' names for them
        for node, (own_node, value) in zip(nodes, partial_sums, strict=True):
            assert leaves_of(node, num_leaves) == leaves_of(own_node, num_leaves)
            total.add(node, value)
    assert torch.equal(total.root(), recursive_sum(leaves))


@given(num_leaves=COUNTS, data=st.data())
def test_aligned_nodes_cover_a_range_exactly_once_and_are_as_few_as_can_be(
    num_leaves: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, num_leaves))
    stop = data.draw(st.integers(start, num_leaves))
    nodes = aligned_nodes(start, stop, num_leaves)
    assert [leaf for node in nodes for leaf in leaves_of(node, num_leaves)] == list(range(start, stop))
    total: TreeSum[int] = TreeSum(num_leaves, lambda a, b: a + b)
    for node in nodes:
        total.add(node, 1)
    assert len(total.pop_all()) == len(nodes)  # no two of them are the children of one node


@given(num_leaves=COUNTS)
def test_so_many_sums_wait_at_most_as_the_tree_is_high_when_leaves_arrive_in_order(num_leaves: int) -> None:
    total: TreeSum[float] = TreeSum(num_leaves, lambda a, b: a + b)
    for index in range(num_leaves):
        total.add((0, index), 1.0)
        waiting = total.pop_all()
        assert len(waiting) <= max(1, num_leaves.bit_length())
        for node, value in waiting:
            total.add(node, value)
    assert total.root() == num_leaves


def test_a_missing_leaf_is_an_error_that_names_what_was_added() -> None:
    total: TreeSum[float] = TreeSum(5, lambda a, b: a + b)
    for index in (0, 1, 4):
        total.add((0, index), 1.0)
    with pytest.raises(ValueError, match=r"5 leaves, but only the nodes \[\(1, 0\), \(2, 1\)\]"):
        total.root()


def test_floats_are_added_along_the_same_tree() -> None:
    values = [0.1 * 3**i for i in range(11)]
    assert tree_sum(values) == recursive_sum([torch.tensor(value, dtype=torch.float64) for value in values]).item()


@given(num_microbatches=COUNTS, mesh=MESHES, mode=MODES)
def test_every_microbatch_is_computed_once_by_one_worker(num_microbatches: int, mesh: Mesh, mode: Accumulation) -> None:
    schedule = Schedule(mode=mode, num_microbatches=num_microbatches, mesh=mesh)
    computed = [index for replica in range(mesh.replicas) for index in computed_by(schedule, mesh.group(replica))]
    assert sorted(computed) == list(range(num_microbatches))
    if mode == "sharded":  # they arrive in order, so that few sums wait
        assert computed == list(range(num_microbatches))
    rounds = [schedule.num_rounds(replica) for replica in range(mesh.replicas)]
    assert max(rounds) == -(-num_microbatches // mesh.world_size)  # no group needs more than flat sharding does
