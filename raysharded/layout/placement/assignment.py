"""The assignment of workers to places with the largest sum of gains."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

Gains = Sequence[Sequence[tuple[int, int]]]
"""Per worker (place, gain): the value, above 0, of the worker in that place; each place at most once."""

NOWHERE = -1
"""The place of a worker with nothing to gain."""


def assign(gains: Gains, capacities: Sequence[int], max_looks: int) -> list[int] | None:
    """A place for each worker, at most `capacities[place]` workers in one, so that the sum of the gains is the largest.

    None if that takes more than `max_looks` reads of an entry of `gains` (deterministic, unlike a time).

    Workers are added one after the other. Each takes the shortest augmenting path by Dijkstra's algorithm, with prices
    that keep reduced costs at 0 or more (Kuhn, "The Hungarian method", 1955; Tomizawa, 1971; Edmonds and Karp, 1972).
    Prices only rise, and a place that is not full has none. So the result is optimal, in integers.
    """
    state = _Assignment(gains, capacities)
    for worker in range(len(gains)):
        if state.looks > max_looks:
            return None
        state.place(worker)
    return state.place_of


class _Assignment:
    """State of the search. Workers with the same gains are of one kind, which is searched once.

    Laws between calls: `profit[k] + price[p] >= gain(k, p)`, with equality where a worker of kind `k` is at `p`. All
    are 0 or more. `profit` is 0 if one of the kind is nowhere, `price` for a place that is not full.
    """

    def __init__(self, gains: Gains, capacities: Sequence[int]) -> None:
        kinds = {kind: number for number, kind in enumerate(dict.fromkeys(map(tuple, gains)))}
        self.kind_of = [kinds[tuple(some)] for some in gains]
        self.gains = list(kinds)
        self.free = list(capacities)
        self.price = [0] * len(capacities)
        self.profit = [max((gain for _, gain in some), default=0) for some in kinds]
        self.place_of = [NOWHERE] * len(gains)
        self.at: list[dict[int, list[int]]] = [{} for _ in capacities]
        self.looks = 0

    def place(self, worker: int) -> None:
        """Find a place for one more worker, moving others where that gains."""
        kind = self.kind_of[worker]
        if self.profit[kind] == 0:
            return
        distance = {kind: 0}
        leaves: dict[int, int] = {}  # kind -> the place that one of it would leave
        closed: dict[int, int] = {}  # place -> distance
        goes: dict[int, int] = {}  # place -> the kind of the worker that would go there
        nearest: dict[int, int] = {}
        queue: list[tuple[int, int]] = []
        out, leaver = self.profit[kind], kind  # the cheapest way to leave a worker nowhere
        found = NOWHERE
        reached = [kind]
        while True:
            for one in reached:
                base = distance[one] + self.profit[one]
                if base < out:
                    out, leaver = base, one
                self.looks += len(self.gains[one])
                for place, gain in self.gains[one]:
                    there = base + self.price[place] - gain
                    if place not in closed and there < nearest.get(place, out):
                        nearest[place], goes[place] = there, one
                        heapq.heappush(queue, (there, place))
            while queue and (queue[0][1] in closed or queue[0][0] > nearest[queue[0][1]]):
                heapq.heappop(queue)
            if not queue or queue[0][0] >= out:
                end = out
                break
            end, place = heapq.heappop(queue)
            if self.free[place] > 0:
                found = place
                break
            closed[place] = end
            reached = [one for one, workers in self.at[place].items() if workers and one not in distance]
            for one in reached:
                distance[one], leaves[one] = end, place
        for one, there in distance.items():
            self.profit[one] -= end - there
        for place, there in closed.items():
            self.price[place] += end - there
        self._move(worker, leaver if found == NOWHERE else goes[found], found, leaves, goes)

    def _move(self, worker: int, kind: int, place: int, leaves: dict[int, int], goes: dict[int, int]) -> None:
        """Move workers along a path, from its end to its start, which is `worker`."""
        if place != NOWHERE:
            self.free[place] -= 1
        while True:
            left = leaves.get(kind, NOWHERE)
            moved = worker if left == NOWHERE else self.at[left][kind].pop()
            self.place_of[moved] = place
            if place != NOWHERE:
                self.at[place].setdefault(kind, []).append(moved)
            if left == NOWHERE:
                return
            kind, place = goes[left], left
