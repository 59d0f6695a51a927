"""The number of live partial sums of the gradient while a step's microbatches are reduced. Pure.

Follows `actors.reduction` with the tree of `actors.numerics.summation_tree`. With sharded accumulation a round's leaves
arrive in one buffer and are added to the carried sums. Sums that wait for their sibling are copied out of that buffer.
In a group's last round its sums are exchanged with those of the other holders, unit by unit. With several workers on a
node, leaves are added inside it first, and what arrives from other nodes are sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain

from raysharded.actors.numerics.microbatch_schedule import Schedule
from raysharded.actors.numerics.summation_tree import TreeSum, coalesce_leaves
from raysharded.config import Accumulation
from raysharded.layout import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Within:
    """A reducer's memory for the current unit, at a moment that may be the peak."""

    sums: int
    """Carried sums: of shard size, or of whole units with local accumulation."""
    chunks: float = 0
    """Chunks of shard size, in the dtype of the exchange."""
    exchanged: float = 0
    """Sums of shard size, in the sums' dtype, sent to and received from other holders."""
    filled: int = 0
    """Additional such sums if the holders' parts of the shard are uneven: a copy is padded."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """A reducer's memory in one round. Sums are of shard size; with local accumulation, of whole units."""

    before: int
    """Sums carried into the round."""
    after: int
    """Sums carried out of the round."""
    moments: tuple[Within, ...]
    aliased: int = 0
    """Sums carried out whose memory is counted elsewhere: the gradient or the reducer's input."""


def schedule_of(mesh: Mesh, num_microbatches: int, mode: Accumulation) -> Schedule:
    return Schedule(mode=mode, num_microbatches=num_microbatches, mesh=mesh)


def rounds_per_step(mesh: Mesh, num_microbatches: int) -> int:
    """Rounds of forward and backward of the group that has most."""
    schedule = Schedule(mode="sharded", num_microbatches=num_microbatches, mesh=mesh.data)
    return schedule.num_rounds(mesh.replicas - 1)  # blocks are balanced, so the last one is among the longest


@lru_cache(maxsize=4096)
def rounds_of(
    mesh: Mesh,
    num_microbatches: int,
    mode: Accumulation,
    copied: bool,
    rank: int,
    replicated: bool = False,
    per_node: int = 1,
) -> tuple[Round, ...]:
    """The rounds of one rank in order, for units that are sharded over its group, or for replicated ones. `copied`:
    leaves are converted to the sum's dtype, which takes memory. `per_node`: workers of a node, which add up first."""
    schedule = schedule_of(mesh, num_microbatches, mode)
    exchange = _exchange(schedule, rank, copied, replicated)
    if replicated or mesh.shards == 1:
        return tuple(_alone(schedule, rank, copied, exchange))
    if mode == "local":
        return tuple(_local(schedule, rank, copied, exchange))
    if 1 < per_node < mesh.shards:
        return tuple(_by_nodes(schedule, rank, copied, exchange, per_node))
    return tuple(_sharded(schedule, rank, copied, exchange))


def own_sums(mesh: Mesh, num_microbatches: int, mode: Accumulation, rank: int, replicated: bool = False) -> int:
    """The number of partial sums of its shard, or of replicated units, that a rank has when it exchanges them with the
    other holders."""
    schedule = schedule_of(mesh, num_microbatches, mode)
    return len(schedule.sums_of_rank(rank) if replicated else schedule.sums_of_replica(mesh.replica_of(rank)))


def _exchange(schedule: Schedule, rank: int, copied: bool, replicated: bool) -> tuple[Within, ...]:
    """Memory of `sum_over_replicas` besides the rank's sums; empty if there are no other holders."""
    mesh = schedule.mesh
    holders = mesh.world_size if replicated else mesh.replicas
    if holders == 1:
        return ()
    own = own_sums(mesh, schedule.num_microbatches, schedule.mode, rank, replicated)
    arriving = _sums_of_all(mesh, schedule.num_microbatches, schedule.mode, replicated) / holders
    sent = own if own > 1 else 0
    finished = 1 + (1 / holders if copied else 0)
    both = Within(sums=0, chunks=finished, exchanged=sent + arriving, filled=int(own == 1))
    return (both, Within(sums=0, exchanged=2 * own)) if own > 1 else (both,)


@lru_cache(maxsize=4096)
def _sums_of_all(mesh: Mesh, num_microbatches: int, mode: Accumulation, replicated: bool) -> int:
    ranks = range(mesh.world_size) if replicated else [mesh.group(replica)[0] for replica in range(mesh.replicas)]
    return sum(own_sums(mesh, num_microbatches, mode, rank, replicated) for rank in ranks)


def _beside(exchange: tuple[Within, ...], sums: int, chunks: float = 0) -> list[Within]:
    """The exchange's memory plus the rank's sums."""
    return [
        Within(sums=sums + e.sums, chunks=chunks + e.chunks, exchanged=e.exchanged, filled=e.filled) for e in exchange
    ]


def _sharded(schedule: Schedule, rank: int, copied: bool, exchange: tuple[Within, ...]) -> list[Round]:
    mesh = schedule.mesh
    replica = mesh.replica_of(rank)
    rounds = schedule.num_rounds(replica)
    sums: TreeSum[int] = TreeSum(schedule.num_microbatches, lambda newer, _: newer)
    found = []
    for index in range(rounds):
        leaves = [schedule.microbatch_of(member, index) for member in mesh.group(replica)]
        arriving = [leaf for leaf in leaves if leaf is not None]
        before = len(_waiting(sums))
        most = before
        for leaf in arriving:
            most = max(most, len(_waiting(sums)) + 1)
            sums.add((0, leaf), index)
        ages = _waiting(sums)
        held = len(ages) if copied else sum(age < index for age in ages)  # the others are views of received data
        moments = [Within(sums=most if copied else before, chunks=len(arriving))]
        if index < rounds - 1:  # copies of all waiting sums, besides their originals
            moments.append(Within(sums=held + len(ages), chunks=len(arriving)))
            found.append(Round(before=before, after=len(ages), moments=tuple(moments)))
        else:
            moments += _beside(exchange, held, 0 if copied else len(arriving))
            found.append(Round(before=before, after=0, moments=tuple(moments)))
    return found


def _by_nodes(schedule: Schedule, rank: int, copied: bool, exchange: tuple[Within, ...], per_node: int) -> list[Round]:
    """As `_sharded`, with sums inside nodes first: a worker adds up its node's leaves for a part of the shards."""
    mesh, num_leaves = schedule.mesh, schedule.num_microbatches
    group = mesh.group(mesh.replica_of(rank))
    nodes = [group[start : start + per_node] for start in range(0, len(group), per_node)]
    own = next(place for place, node in enumerate(nodes) if rank in node)
    part = -(-mesh.shards // len(nodes[own]))
    rounds = schedule.num_rounds(mesh.replica_of(rank))
    carried: TreeSum[int] = TreeSum(num_leaves, lambda newer, _: newer)
    found = []
    for index in range(rounds):
        computed = [[schedule.microbatch_of(member, index) for member in node] for node in nodes]
        leaves = [[leaf for leaf in of_node if leaf is not None] for of_node in computed]
        sums = [coalesce_leaves(of_node, num_leaves) for of_node in leaves]
        before = len(_waiting(carried))
        for node in chain.from_iterable(sums):
            carried.add(node, index)
        ages, received = _waiting(carried), sum(map(len, sums))
        arriving, kept = len(leaves[own]) * part, len(sums[own]) * part
        sent = kept if len(sums[own]) > 1 else 0
        most = _most_waiting(leaves[own], num_leaves) * part
        moments = [
            Within(sums=before + most * copied, chunks=arriving),
            Within(sums=before + kept * copied + sent + received, chunks=0 if copied else arriving),
        ]
        held = sum(age < index for age in ages) + received
        if index < rounds - 1:
            moments.append(Within(sums=held + len(ages)))
            found.append(Round(before=before, after=len(ages), moments=tuple(moments)))
        else:
            moments += _beside(exchange, held)
            found.append(Round(before=before, after=0, moments=tuple(moments)))
    return found


def _most_waiting(leaves: Sequence[int], num_leaves: int) -> int:
    """The most sums that live at once while these leaves are added up."""
    sums: TreeSum[int] = TreeSum(num_leaves, lambda newer, _: newer)
    most = 0
    for leaf in leaves:
        most = max(most, len(_waiting(sums)) + 1)
        sums.add((0, leaf), 0)
    return most


def _alone(schedule: Schedule, rank: int, copied: bool, exchange: tuple[Within, ...]) -> list[Round]:
    """Rounds of a single shard: the leaf is the reducer's output, which the gradient keeps until the next round."""
    rounds = schedule.num_rounds(schedule.mesh.replica_of(rank))
    sums: TreeSum[int] = TreeSum(schedule.num_microbatches, lambda newer, _: newer)
    found = []
    for index in range(rounds):
        before = len(_waiting(sums))
        leaf = schedule.microbatch_of(rank, index)
        if leaf is not None:
            sums.add((0, leaf), index)
        ages = _waiting(sums)
        most = before + (leaf is not None)
        moments = [Within(sums=before, chunks=1), Within(sums=most if copied else before)]
        if index < rounds - 1:
            alias = 0 if copied or leaf is None else 1
            found.append(Round(before=before, after=len(ages), moments=tuple(moments), aliased=alias))
        else:
            moments += _beside(exchange, len(ages) if copied else sum(age < index for age in ages))
            found.append(Round(before=before, after=0, moments=tuple(moments)))
    return found


def _local(schedule: Schedule, rank: int, copied: bool, exchange: tuple[Within, ...]) -> list[Round]:
    mesh = schedule.mesh
    rounds = schedule.num_rounds(mesh.replica_of(rank))
    sums: TreeSum[int] = TreeSum(schedule.num_microbatches, lambda newer, _: newer)
    found = []
    for index in range(rounds):
        before = len(_waiting(sums))
        leaf = schedule.microbatch_of(rank, index)
        if leaf is not None:
            sums.add((0, leaf), index)
        own = len(_waiting(sums))
        most = before + (copied and leaf is not None)
        alias = 0 if copied or leaf is None else 1
        if index < rounds - 1:
            found.append(Round(before=before, after=own, moments=(Within(sums=most),), aliased=alias))
            continue
        arrived = sum(len(schedule.sums_of_rank(member)) for member in mesh.group(mesh.replica_of(rank)))
        stacked = own if own > 1 else 0
        meeting = Within(sums=own - alias + stacked, exchanged=arrived)
        after = [
            Within(sums=e.sums, chunks=e.chunks, exchanged=arrived + e.exchanged, filled=e.filled) for e in exchange
        ]
        found.append(Round(before=before, after=0, moments=(Within(sums=most), meeting, *after)))
    return found


def _waiting(sums: TreeSum[int]) -> list[int]:
    """The round in which each waiting sum was last updated."""
    ages: list[int] = []

    def note(age: int) -> int:
        ages.append(age)
        return age

    sums.map_waiting(note)
    return ages
