"""Neighbours on one node are separated by exchanging two workers at a time, for the smallest loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from raysharded.ids import WorkerId
from raysharded.layout.overlaps import Gains


def swap_apart(
    order: Sequence[WorkerId], nodes: Mapping[WorkerId, str], workers: Sequence[WorkerId], gains: Gains
) -> tuple[WorkerId, ...]:
    """`order` with neighbours on one node (the last is the first's) separated, as far as single exchanges can.

    One neighbour after the other changes places with whoever costs the least of `gains`, in which workers are numbered
    as in `workers`. Workers that `nodes` does not name are on one node together.
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
    """Exchange one of a pair for who costs the least of those that make no new pair; whether there is one.

    Both `at` and `node`, by rank, are changed.
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
