"""How many partial sums of the gradient are alive while a step's microbatches are reduced. Pure.

Follows `actors.reduction` with the tree of `actors.tree`: with sharded accumulation a round's leaves arrive in one
buffer, are added to what was carried, and what waits for its sibling is copied out of that buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from raysharded.actors.tree import TreeSum, aligned_nodes
from raysharded.config import Accumulation
from raysharded.layout import Mesh
from raysharded.planning.layouts import block_of, rounds_per_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one reducer holds in one round. Sums are of shard size, and of whole units with local accumulation."""

    before: int
    """Sums carried into it."""
    after: int
    """Sums carried out of it."""
    moments: tuple[tuple[int, int], ...]
    """(sums, chunks that arrived) at the moments within it when there may be most."""
    aliased: int = 0
    """Of those carried out, how many lie in memory that is counted elsewhere: the gradient or the reducer's input."""


@lru_cache(maxsize=4096)
def rounds_of(layout: Mesh, num_microbatches: int, mode: Accumulation, copied: bool) -> frozenset[Round]:
    """The different rounds of all replicas. `copied`: leaves are converted to the sum's dtype, which takes memory."""
    num_rounds = rounds_per_step(layout, num_microbatches)
    found: set[Round] = set()
    for replica in range(layout.replicas):
        start, stop = block_of(layout, replica, num_microbatches)
        if mode == "local" and layout.replicas == 1 and layout.shards > 1:
            for rank in range(layout.shards):
                block = num_microbatches * rank // layout.shards, num_microbatches * (rank + 1) // layout.shards
                found.update(_local(num_microbatches, *block, layout.shards, num_rounds, copied))
        else:
            keeps = layout.replicas > 1
            found.update(_sharded(num_microbatches, start, stop, layout.shards, num_rounds, copied, keeps))
    return frozenset(found)


def own_nodes(layout: Mesh, num_microbatches: int, replica: int) -> int:
    """The partial sums that a replica has after its last round."""
    return len(aligned_nodes(*block_of(layout, replica, num_microbatches), num_microbatches))


def _sharded(leaves: int, start: int, stop: int, shards: int, rounds: int, copied: bool, keeps: bool) -> list[Round]:
    """`keeps`: the last round's sums are carried out, too, to be exchanged between replicas."""
    sums: TreeSum[int] = TreeSum(leaves, lambda newer, _: newer)
    found = []
    for index in range(rounds):
        arriving = range(start + index * shards, min(start + (index + 1) * shards, stop))
        before = len(_waiting(sums))
        most = before
        for leaf in arriving:
            most = max(most, len(_waiting(sums)) + 1)
            sums.add((0, leaf), index)
        ages = _waiting(sums)
        last = index == rounds - 1 and not keeps
        if last:
            sums.pop_all()
        after = 0 if last else len(ages)
        if shards == 1:  # the leaf is the reducer's output, which the gradient keeps until the next round
            alias = 0 if copied or not arriving or last else 1
            moments = [(before, 1), (most if copied else before, 0)]
        else:
            alias = 0
            older = sum(age < index for age in ages)
            moments = [(most if copied else before, len(arriving))]
            if not last:  # copies of all that wait, beside what they are copies of
                moments.append(((len(ages) if copied else older) + after, len(arriving)))
        found.append(Round(before=before, after=after, moments=tuple(moments), aliased=alias))
    return found


def _local(leaves: int, start: int, stop: int, shards: int, rounds: int, copied: bool) -> list[Round]:
    sums: TreeSum[int] = TreeSum(leaves, lambda newer, _: newer)
    found = []
    for index in range(rounds):
        before = len(_waiting(sums))
        arriving = [start + index] if start + index < stop else []
        most = before + (len(arriving) if copied else 0)
        for leaf in arriving:
            sums.add((0, leaf), index)
        own = len(_waiting(sums))
        alias = 0 if copied or not arriving else 1
        if index < rounds - 1:
            found.append(Round(before=before, after=own, moments=((most, 0),), aliased=alias))
            continue
        blocks = ((leaves * rank // shards, leaves * (rank + 1) // shards) for rank in range(shards))
        arrived = sum(len(aligned_nodes(*block, leaves)) for block in blocks)
        stacked = own if own > 1 else 0
        found.append(Round(before=before, after=0, moments=((most, 0), (own - alias + stacked, arrived))))
    return found


def _waiting(sums: TreeSum[int]) -> list[int]:
    """The rounds in which the waiting sums were last added to."""
    ages: list[int] = []

    def note(age: int) -> int:
        ages.append(age)
        return age

    sums.map_waiting(note)
    return ages
