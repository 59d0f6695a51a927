"""The one order in which the `M` microbatches of a step are added, independent of the workers that computed them.

Pairwise summation (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.1). Node (level, index)
covers the leaves `index * 2**level .. (index + 1) * 2**level - 1`, as far as they exist. It is the sum of its two
children, or its left child if the right one covers no leaf. The tree depends on `M` alone, and any node may be
computed anywhere: IEEE addition commutes, so the bits of the root are the same.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T")
Node = tuple[int, int]
"""(level, index)"""


def aligned_nodes(start: int, stop: int, num_leaves: int) -> list[Node]:
    """The fewest nodes that cover exactly the leaves `start .. stop-1`, from left to right.

    A node that reaches beyond the last leaf covers the leaves up to it.
    """
    nodes = []
    while start < stop:
        level = 0
        while True:
            width = 2 << level
            reaches = min(start + width, num_leaves)
            if start % width or reaches > stop or (start + (width >> 1) >= num_leaves):
                break
            level += 1
        nodes.append((level, start >> level))
        start = min(start + (1 << level), num_leaves)
    return nodes


class TreeSum(Generic[T]):
    """Sum of nodes, added in any order, along the one tree of `num_leaves` leaves.

    `combine(a, b)` returns the sum of two values and may overwrite `a`. Law: the root does not depend on the order of
    the calls to `add`, nor on the grouping of the leaves into aligned nodes.
    """

    def __init__(self, num_leaves: int, combine: Callable[[T, T], T]) -> None:
        self._num_leaves = num_leaves
        self._combine = combine
        self._waiting: dict[Node, T] = {}

    def add(self, node: Node, value: T) -> None:
        """Add the sum of the leaves under `node`; each leaf exactly once."""
        level, index = node
        while (1 << level) < self._num_leaves:
            sibling = (level, index ^ 1)
            if sibling in self._waiting:
                other = self._waiting.pop(sibling)
                value = self._combine(value, other)
            elif index % 2 or ((index + 1) << level) < self._num_leaves:
                self._waiting[(level, index)] = value
                return
            level, index = level + 1, index >> 1
        self._waiting[(level, 0)] = value

    def pop_all(self) -> list[tuple[Node, T]]:
        """The nodes that wait for their siblings, from left to right; empties the sum."""
        nodes = sorted(self._waiting.items(), key=lambda item: item[0][1] << item[0][0])
        self._waiting = {}
        return nodes

    def map_waiting(self, change: Callable[[T], T]) -> None:
        """Replace every waiting value, for example by a copy that outlives a communication buffer."""
        self._waiting = {node: change(value) for node, value in self._waiting.items()}

    def root(self) -> T:
        """The sum over all leaves; empties the sum. Raises ValueError while a leaf is missing."""
        nodes = self.pop_all()
        if len(nodes) != 1 or (1 << nodes[0][0][0]) < self._num_leaves:
            raise ValueError(f"{self._num_leaves} leaves, but only the nodes {[node for node, _ in nodes]} were added")
        return nodes[0][1]


def coalesce_nodes(nodes: Iterable[Node], num_leaves: int) -> list[Node]:
    """The nodes that remain, from left to right, after adding all siblings among these nodes."""
    total: TreeSum[int] = TreeSum(num_leaves, operator.add)
    for node in nodes:
        total.add(node, 1)
    return [node for node, _ in total.pop_all()]


def coalesce_leaves(leaves: Iterable[int], num_leaves: int) -> list[Node]:
    """Apply `coalesce_nodes` to leaves."""
    return coalesce_nodes(((0, leaf) for leaf in leaves), num_leaves)


def tree_sums(rows: NDArray[np.float64]) -> list[float]:
    """The sum of each column of [leaves, columns] along the tree: the bits of `tree_sum`, a level at a time."""
    with np.errstate(all="ignore"):  # as Python adds floats
        while len(rows) > 1:
            pairs = len(rows) // 2
            level = rows[0 : 2 * pairs : 2] + rows[1 : 2 * pairs : 2]
            rows = np.concatenate((level, rows[2 * pairs :]))
    sums: list[float] = rows[0].tolist()
    return sums


def tree_sum(values: list[float]) -> float:
    """The sum of the values along the tree, in float64."""
    total: TreeSum[float] = TreeSum(len(values), lambda a, b: a + b)
    for index, value in enumerate(values):
        total.add((0, index), value)
    return total.root()
