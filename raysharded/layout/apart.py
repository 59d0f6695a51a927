"""Which workers are on one node: a node's death must not take a shard and its mirror along, and shard groups, whose
workers talk most, are to be together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from raysharded.ids import WorkerId


def keep_apart(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str]) -> tuple[WorkerId, ...]:
    """The workers of `order` in an order with as few neighbours on the same node as there can be, the last being the
    neighbour of the first; workers that `nodes` does not name are on one node together.

    Law: `count_neighbours` of the result is `max(0, 2 * largest - W)`, where `largest` is the number of workers on the
    node with most of them. `order` is kept if it has no more; otherwise the first worker stays the first, and each
    further one is the earliest in `order` that still allows for the fewest.
    """
    if count_neighbours(order, nodes) == fewest_neighbours(order, nodes):
        return tuple(order)
    waiting: dict[str, list[WorkerId]] = {}
    for worker in order:
        waiting.setdefault(nodes.get(worker, ""), []).append(worker)
    place = {worker: number for number, worker in enumerate(order)}
    chosen = [order[0]]
    first = last = nodes.get(order[0], "")
    waiting[first].pop(0)
    allowed = fewest_neighbours(order, nodes)
    while len(chosen) < len(order):
        left = Counter({node: len(workers) for node, workers in waiting.items() if workers})
        for node in sorted(left, key=lambda node: place[waiting[node][0]]):
            if (node == last) + _fewest_between(node, first, left - Counter({node: 1})) <= allowed:
                break
        allowed -= node == last
        last = node
        chosen.append(waiting[node].pop(0))
    return tuple(chosen)


def keep_together(by_shard: Sequence[WorkerId], nodes: Mapping[WorkerId, str], replicas: int) -> tuple[WorkerId, ...]:
    """The ranks of a mesh of `replicas` groups, by rank, from its workers by shard: `by_shard` has the holders of shard
    0, as many as there are replicas, then those of shard 1, and so on.

    Each group gets a holder of each shard. Groups are filled one after the other, each from the node with the most
    holders left, then from the next, so that workers of one node are in one group as far as that can be; workers that
    `nodes` does not name are on one node together. Ties are broken by the order given.
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


def spread_out(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str], window: int) -> tuple[WorkerId, ...]:
    """The workers of `order` so that few of any `window` that follow each other, round about, are on one node: the
    order given, or the one that deals every node's workers out evenly if that has fewer; workers that `nodes` does not
    name are on one node together.

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
    """The largest number of workers on one node among any `window` that follow each other, round about."""
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
    """How many workers are on the same node as the next one, the last being followed by the first."""
    where = [nodes.get(worker, "") for worker in order]
    return sum(a == b for a, b in zip(where, [*where[1:], *where[:1]], strict=True))


def fewest_neighbours(order: Sequence[WorkerId], nodes: Mapping[WorkerId, str]) -> int:
    """The least that `count_neighbours` can be for these workers."""
    largest = max(Counter(nodes.get(worker, "") for worker in order).values(), default=0)
    return max(0, 2 * largest - len(order))


def _fewest_between(last: str, first: str, left: Mapping[str, int]) -> int:
    """The fewest neighbours on the same node from a worker on `last` through those `left` to one on `first`.

    A node's workers must be separated by others; at an end they need one separator less.
    """
    total = sum(left.values()) + 2
    fewest = 0
    for node in {*left, last, first}:
        count = left.get(node, 0) + (node == last) + (node == first)
        blocks = total - count - 1 + (node == last) + (node == first)
        fewest = max(fewest, count - max(blocks, 0))
    return fewest
