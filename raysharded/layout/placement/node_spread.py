"""Placement by node: a lost node must not take a shard and its mirror along, and shard groups stay together.

The workers of a shard group communicate most. Neighbours are separated by exchanging two at a time, for the smallest
loss.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from raysharded.ids import WorkerId
from raysharded.layout.placement.overlaps import Gains


def keep_apart(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str]) -> tuple[WorkerId, ...]:
    """The workers of `order`, with as few neighbours on one node as possible; last and first are neighbours.

    Workers that `nodes` does not name are on one node together.

    Law: `count_neighbours` of the result is `max(0, 2 * largest - W)`, where `largest` is the number of workers on the
    fullest node. `order` is kept if it has no more. Otherwise the first worker stays the first, and each further one is
    the earliest in `order` that still allows for the fewest.
    """
    if count_neighbours(order, nodes) == fewest_neighbours(order, nodes):
        return tuple(order)
    waiting: dict[str, deque[int]] = {}
    for number, worker in enumerate(order):
        waiting.setdefault(nodes.get(worker, ""), deque()).append(number)
    first = last = nodes.get(order[0], "")
    chosen = [waiting[first].popleft()]
    left = _Left(first, {node: len(numbers) for node, numbers in waiting.items()})
    earliest = [(numbers[0], node) for node, numbers in waiting.items() if numbers]
    heapq.heapify(earliest)
    allowed = fewest_neighbours(order, nodes)
    while len(chosen) < len(order):
        passed = []
        while True:
            number, node = heapq.heappop(earliest)
            if (node == last) + left.fewest_from(node) <= allowed:
                break
            passed.append((number, node))
        allowed -= node == last
        last = node
        left.take(node)
        chosen.append(waiting[node].popleft())
        if waiting[node]:
            passed.append((waiting[node][0], node))
        for entry in passed:
            heapq.heappush(earliest, entry)
    return tuple(order[number] for number in chosen)


def keep_together(by_shard: Sequence[WorkerId], nodes: Mapping[WorkerId, str], replicas: int) -> tuple[WorkerId, ...]:
    """Workers by rank of a mesh of `replicas` groups, from its workers by shard.

    `by_shard` has the holders of shard 0, as many as there are replicas, then those of shard 1, and so on. Each group
    gets a holder of each shard. Groups are filled one after the other, each from the node with the most holders left,
    then from the next. So workers of one node are in one group as far as possible. Workers that `nodes` does not name
    are on one node together. Ties are broken by the given order.
    """
    left = [list(by_shard[i : i + replicas]) for i in range(0, len(by_shard), replicas)]
    groups: list[list[WorkerId]] = []
    for _ in range(replicas):
        group: dict[int, WorkerId] = {}
        while len(group) < len(left):
            open_shards = [shard for shard in range(len(left)) if shard not in group]
            shards_of: dict[str, dict[int, WorkerId]] = {}
            for shard in open_shards:
                for worker in left[shard]:
                    shards_of.setdefault(nodes.get(worker, ""), {}).setdefault(shard, worker)
            most = max(shards_of, key=lambda node: len(shards_of[node]))
            group |= shards_of[most]
        for shard, worker in group.items():
            left[shard].remove(worker)
        groups.append([group[shard] for shard in range(len(left))])
    return tuple(worker for members in groups for worker in members)


def place_together(
    orders: Sequence[tuple[WorkerId, ...]], nodes: Mapping[WorkerId, str], replicas: int
) -> tuple[WorkerId, ...]:
    """Workers by rank, from the one of `orders` whose groups are then on the fewest nodes, the first of several.

    Orders are by shard, as for `keep_together`. None is tried after one that cannot be improved.
    """
    best: tuple[int, tuple[WorkerId, ...]] | None = None
    for order in dict.fromkeys(orders):
        placed = keep_together(order, nodes, replicas)
        splits = count_splits(placed, nodes, replicas)
        if best is None or splits < best[0]:
            best = (splits, placed)
        if splits <= fewest_splits(order, nodes, replicas):
            break
    assert best is not None
    return best[1]


def spared_first(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str], shards: int) -> list[WorkerId]:
    """The workers of `order`, those first that groups of `shards` can best do without.

    First come workers beyond whole groups on their node, from nodes with the fewest of them, and then the others. In
    both cases the last of `order` comes first.
    """
    on_node: dict[str, list[WorkerId]] = {}
    for worker in order:
        on_node.setdefault(nodes.get(worker, ""), []).append(worker)
    left_over = {
        worker: len(workers) % shards
        for workers in on_node.values()
        for worker in workers[len(workers) - len(workers) % shards :]
    }
    from_behind = order[::-1]
    return sorted(from_behind, key=lambda worker: left_over.get(worker, shards))


def fewest_splits(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str], replicas: int) -> int:
    """A lower bound of `count_splits` for these workers: each group is on as many of the largest nodes as it fills."""
    largest = max(Counter(nodes.get(worker, "") for worker in order).values())
    return replicas * (-(-len(order) // replicas // largest) - 1) if replicas > 1 else 0


def count_splits(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str], replicas: int) -> int:
    """Number of pieces of the groups of a mesh of `replicas` on nodes, beyond one each; 0 for a single group."""
    shards = len(order) // replicas
    groups = [order[first : first + shards] for first in range(0, len(order), shards)] if replicas > 1 else []
    return sum(len({nodes.get(worker, "") for worker in group}) - 1 for group in groups)


def spread_out(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str], window: int) -> tuple[WorkerId, ...]:
    """The workers of `order`, with few of any `window` consecutive ones on one node; the order wraps around.

    It is the given order, or the one that deals every node's workers out evenly if that has fewer. Workers that `nodes`
    does not name are on one node together.

    Law: with `n` nodes of as many workers each, no more than `ceil(window / n)`.
    """
    waiting: dict[str, list[WorkerId]] = {}
    for worker in order:
        waiting.setdefault(nodes.get(worker, ""), []).append(worker)
    place = {worker: number for number, worker in enumerate(order)}
    dealt = sorted(
        ((i + 0.5) / len(workers), place[workers[0]], worker)
        for workers in waiting.values()
        for i, worker in enumerate(workers)
    )
    even = tuple(worker for _, _, worker in dealt)
    return min(tuple(order), even, key=lambda one: most_together(one, nodes, window))


def most_together(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str], window: int) -> int:
    """Largest number of workers on one node among any `window` consecutive ones; the order wraps around."""
    where = [nodes.get(worker, "") for worker in order]
    length = min(window, len(where))
    counts = Counter(where[:length])
    most = max(counts.values(), default=0)
    for first in range(len(where)):
        counts[where[first]] -= 1
        entering = where[(first + length) % len(where)]
        counts[entering] += 1
        most = max(most, counts[entering])
    return most


def count_neighbours(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str]) -> int:
    """Number of workers on the same node as the next one; the last is followed by the first."""
    where = [nodes.get(worker, "") for worker in order]
    return sum(a == b for a, b in zip(where, [*where[1:], *where[:1]], strict=True))


def fewest_neighbours(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str]) -> int:
    """Least possible `count_neighbours` of these workers."""
    largest = max(Counter(nodes.get(worker, "") for worker in order).values(), default=0)
    return max(0, 2 * largest - len(order))


class _Left:
    """Numbers of workers of each node that are yet to be placed, in a row that ends beside one of node `first`."""

    def __init__(self, first: str, counts: Mapping[str, int]) -> None:
        self._first = first
        self._counts = dict(counts)
        self._total = sum(counts.values())
        self._nodes_with = Counter(count for node, count in counts.items() if node != first)
        self._most = max(self._nodes_with, default=0)

    def take(self, node: str) -> None:
        """Record that a worker of a node is placed."""
        count = self._counts[node]
        self._counts[node] -= 1
        self._total -= 1
        if node != self._first:
            self._nodes_with[count] -= 1
            self._nodes_with[count - 1] += 1
            self._most -= self._nodes_with[self._most] == 0

    def fewest_from(self, node: str) -> int:
        """Fewest neighbours on one node in a row of the remaining workers that begins with one of `node`.

        Of `n` workers of a node those that are at no end stand in `n - 1` gaps of others; at an end they need one gap
        less. A gap that the others cannot fill is a pair of neighbours.
        """
        alone = self._nodes_with[self._most] == 1 and self._counts[node] == self._most and node != self._first
        others = 2 * self._most - self._total - alone
        with_first = 2 * self._counts[self._first] + 1 - self._total - (node == self._first)
        return max(0, others, with_first)


def swap_apart(
    order: Sequence[WorkerId], nodes: Mapping[WorkerId, str], workers: Sequence[WorkerId], gains: Gains
) -> tuple[WorkerId, ...]:
    """`order` with neighbours on one node separated, as far as single exchanges can; last and first are neighbours.

    One neighbour after the other changes places with the worker that costs the least of `gains`, in which workers are
    numbered as in `workers`. Workers that `nodes` does not name are on one node together.
    """
    number = {worker: i for i, worker in enumerate(workers)}
    names = {name: i for i, name in enumerate(sorted({nodes.get(worker, "") for worker in workers}))}
    node_of = np.array([names[nodes.get(worker, "")] for worker in workers])
    at = np.array([number[worker] for worker in order])
    while len(at) > 3:
        node = node_of[at]
        pairs = np.flatnonzero(node == np.roll(node, -1))
        if not any(_separate(at, node, (int(i), int(i + 1) % len(at)), gains) for i in pairs):
            break
    return tuple(workers[i] for i in at)


def _separate(at: NDArray[np.int64], node: NDArray[np.int64], pair: tuple[int, int], gains: Gains) -> bool:
    """Exchange one of a pair for the worker that costs the least of those that make no new pair; True if there is one.

    Changes both `at` and `node`, which are by rank.
    """
    size, every = len(at), np.arange(len(at))
    before, behind = np.roll(node, 1), np.roll(node, -1)
    best: tuple[int, int, int] | None = None
    for one in pair:
        apart = (every - one) % size
        allowed = (apart > 1) & (apart < size - 1) & (before != node[one]) & (behind != node[one])
        allowed &= (node != before[one]) & (node != behind[one])
        other = np.flatnonzero(allowed)
        if len(other):
            here = np.full(len(other), one)
            mine = np.full(len(other), at[one])
            loss = gains.of(mine, here) + gains.of(at[other], other) - gains.of(mine, other) - gains.of(at[other], here)
            least = int(loss.argmin())
            best = min(filter(None, (best, (int(loss[least]), one, int(other[least])))))
    if best is None:
        return False
    _, one, other_one = best
    for column in (at, node):
        column[[one, other_one]] = column[[other_one, one]]
    return True
