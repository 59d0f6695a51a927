"""Exchanging gradients with and without adding on hosts first: threads as the workers of a shard group."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from raysharded.actors.numerics.microbatch_schedule import Schedule
from raysharded.actors.numerics.summation_tree import Node, TreeSum, aligned_nodes
from raysharded.actors.reduction.gradient_exchange import Exchange, Hosts, accumulator, add, add_siblings, hosts_of
from raysharded.config import Accumulation
from raysharded.layout import Mesh

CHUNK = 3


class Board:
    """The place for the workers' messages; counts the bytes from host to host."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self.nodes = nodes
        self._barrier = threading.Barrier(len(nodes), timeout=20)
        self._slots: list[list[torch.Tensor]] = [[] for _ in nodes]
        self._gives_sizes = [False] * len(nodes)
        self._counting = threading.Lock()
        self.bytes_between = 0

    def all_to_all(
        self,
        rank: int,
        received: torch.Tensor,
        send: torch.Tensor,
        out_sizes: list[int] | None,
        in_sizes: list[int] | None,
    ) -> None:
        world = len(self.nodes)
        assert (in_sizes is None) == (out_sizes is None)
        parts = send.split(in_sizes or [send.numel() // world] * world)
        assert sum(map(len, parts)) == send.numel()
        with self._counting:
            for node, part in zip(self.nodes, parts, strict=True):
                self.bytes_between += part.numel() * part.element_size() * (node != self.nodes[rank])
        self._slots[rank], self._gives_sizes[rank] = list(parts), in_sizes is not None
        self._barrier.wait()
        assert len(set(self._gives_sizes)) == 1  # or else the backend may take them for different collectives
        found = [slots[rank] for slots in self._slots]
        assert [len(part) for part in found] == (out_sizes or [received.numel() // world] * world)
        received.copy_(torch.cat(found))
        self._barrier.wait()


def gradients(num_microbatches: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_microbatches * 1000 + numel)
    return [torch.randn(numel, generator=generator).mul(10 ** (i % 5)).to(dtype) for i in range(num_microbatches)]


def alone(leaves: list[torch.Tensor]) -> torch.Tensor:
    total: TreeSum[torch.Tensor] = TreeSum(len(leaves), add)
    for index, leaf in enumerate(leaves):
        total.add((0, index), leaf.float().clone())
    return total.root()


def together(
    leaves: list[torch.Tensor], nodes: Sequence[int], hosts: Hosts, accumulation: Accumulation
) -> tuple[torch.Tensor, Board]:
    """The sums of all shards, one after the other, when the worker of shard `s` is on node `nodes[s]`."""
    shards, board, count = len(nodes), Board(nodes), len(leaves)
    schedule = Schedule(mode=accumulation, num_microbatches=count, mesh=Mesh(shards=shards))

    def one(shard: int) -> torch.Tensor:
        exchange = Exchange(num_leaves=count, shards=shards, shard=shard, hosts=hosts)
        total: TreeSum[torch.Tensor] = TreeSum(count, add)

        def deliver(own: list[torch.Tensor], of_shards: list[list[Node]], like: torch.Tensor) -> None:
            def all_to_all(*sent: object) -> None:
                board.all_to_all(shard, *sent)  # type: ignore[arg-type]  # as it was called

            for node, values in exchange.terms(all_to_all, own, of_shards, CHUNK, like):
                total.add(node, accumulator(values).clone())

        own_leaves = [schedule.microbatch_of(shard, index) for index in range(schedule.num_rounds(0))]
        if accumulation == "local":
            for leaf in own_leaves:
                if leaf is not None:
                    total.add((0, leaf), leaves[leaf].float().clone())
            own = [values for _, values in total.pop_all()]
            deliver(own, [schedule.sums_of_rank(rank) for rank in range(shards)], torch.empty(0))
        else:
            for index, leaf in enumerate(own_leaves):
                of_round = [schedule.microbatch_of(rank, index) for rank in range(shards)]
                own = [] if leaf is None else [leaves[leaf].clone()]
                deliver(own, [[] if j is None else [(0, j)] for j in of_round], leaves[0][:0])
        return total.root()

    with ThreadPoolExecutor(shards) as pool:
        return torch.cat(list(pool.map(one, range(shards)))), board


@given(
    num_microbatches=st.integers(1, 17),
    nodes=st.lists(st.integers(0, 3), min_size=2, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    accumulation=st.sampled_from(["sharded", "local"]),
)
def test_wherever_workers_are_the_sums_have_the_bits_of_one_worker(
    num_microbatches: int, nodes: list[int], dtype: torch.dtype, accumulation: Accumulation
) -> None:
    leaves = gradients(num_microbatches, CHUNK * len(nodes), dtype)
    expected = alone(leaves)
    for hosts in ((), hosts_of(nodes)):
        assert torch.equal(together(leaves, nodes, hosts, accumulation)[0], expected)


@pytest.mark.parametrize("accumulation", ["sharded", "local"])
@pytest.mark.parametrize(("on_each", "num_hosts"), [(2, 2), (4, 2), (2, 4)])
def test_one_sum_leaves_a_host_for_all_gradients_of_its_workers(
    on_each: int, num_hosts: int, accumulation: Accumulation
) -> None:
    nodes = [host for host in range(num_hosts) for _ in range(on_each)]
    leaves = gradients(2 * len(nodes), CHUNK * len(nodes), torch.float32)
    flat, by_host = (together(leaves, nodes, hosts, accumulation)[1] for hosts in ((), hosts_of(nodes)))
    rounds = 2 if accumulation == "sharded" else 1
    others = CHUNK * (num_hosts - 1) * on_each  # elements of the shards on other hosts
    assert flat.bytes_between == 4 * rounds * len(nodes) * others
    assert by_host.bytes_between == 4 * rounds * num_hosts * others


def test_who_is_alone_on_a_host_has_nobody_to_add_with() -> None:
    assert hosts_of([0, 1, 2]) == hosts_of([5, 5, 5]) == hosts_of([]) == ()
    assert hosts_of([7, 7, 2, 7]) == ((0, 1, 3), (2,))


@st.composite
def rows_of_nodes(draw: st.DrawFn) -> tuple[int, list[Node]]:
    """A number of leaves, and disjoint nodes of their tree in any order."""
    num_leaves = draw(st.integers(1, 40))
    nodes: list[Node] = []
    start = 0
    while start < num_leaves:
        stop = draw(st.integers(start + 1, min(num_leaves, start + 9)))
        if draw(st.booleans()):
            nodes += aligned_nodes(start, stop, num_leaves)
        else:
            nodes += [(0, leaf) for leaf in range(start, stop)]
        start = stop + draw(st.integers(0, 2))
    return num_leaves, draw(st.permutations(nodes)) if draw(st.booleans()) else nodes


@given(rows_of_nodes())
def test_siblings_that_are_added_level_by_level_give_the_bits_of_one_by_one(case: tuple[int, list[Node]]) -> None:
    num_leaves, nodes = case
    values = torch.stack(gradients(len(nodes), CHUNK, torch.float32))
    one_by_one: TreeSum[torch.Tensor] = TreeSum(num_leaves, add)
    for node, value in zip(nodes, values.clone(), strict=True):
        one_by_one.add(node, value)
    by_levels: TreeSum[torch.Tensor] = TreeSum(num_leaves, add)
    for node, value in add_siblings(nodes, values.clone()):
        by_levels.add(node, value)
    expected, found = one_by_one.pop_all(), by_levels.pop_all()
    assert [node for node, _ in found] == [node for node, _ in expected]
    assert all(torch.equal(one, other) for (_, one), (_, other) in zip(found, expected, strict=True))


class Additions(TorchDispatchMode):
    """Counts additions: on a device each is a launch."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "aten.add" in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("leaves", "most"), [(64, 6), (63, 10), (1024, 10)])
def test_a_rounds_leaves_are_added_in_as_many_operations_as_the_tree_has_levels(leaves: int, most: int) -> None:
    exchange = Exchange(num_leaves=leaves, shards=leaves, shard=0)
    total: TreeSum[torch.Tensor] = TreeSum(leaves, add)
    nodes: list[list[Node]] = [[(0, leaf)] for leaf in range(leaves)]
    own = torch.ones(leaves * CHUNK)
    with Additions() as additions:
        terms = exchange.terms(lambda received, *_: received.fill_(1.0), [own], nodes, CHUNK, own[:0])
        for node, values in terms:
            total.add(node, values)
    assert total.root().tolist() == [float(leaves)] * CHUNK
    assert additions.number <= most


def test_gradients_in_half_precision_are_copied_one_by_one() -> None:
    """All copies at once would take as much memory again as the exchange."""
    exchange, own = Exchange(num_leaves=8, shards=8, shard=0), torch.ones(8 * CHUNK, dtype=torch.bfloat16)
    nodes: list[list[Node]] = [[(0, leaf)] for leaf in range(8)]
    terms = exchange.terms(lambda received, *_: received.fill_(1.0), [own], nodes, CHUNK, own[:0])
    assert [node for node, _ in terms] == [(0, leaf) for leaf in range(8)]
