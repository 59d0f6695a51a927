"""How many partial sums of the gradient are alive while a step's microbatches are reduced. Pure.

Follows `actors.reduction` with the tree of `actors.numerics.summation_tree`: with sharded accumulation a round's
leaves arrive in one buffer, are added to what was carried, and what waits for its sibling is copied out of that buffer.
In a group's last round its sums are exchanged with those of the other holders, unit by unit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from raysharded.actors.numerics.microbatch_schedule import Schedule
from raysharded.actors.numerics.summation_tree import TreeSum
from raysharded.config import Accumulation
from raysharded.layout import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Within:
    """What a reducer holds for the unit at hand, at a moment when that may be most."""

    sums: int
    """Sums as they are carried: of shard size, or of whole units with local accumulation."""
    chunks: float = 0
    """Of shard size, in the dtype that travels."""
    exchanged: float = 0
    """Of shard size, in the dtype of sums: what goes to other holders and comes from them."""
    filled: int = 0
    """As many more if the shard cannot be cut evenly for its holders: it is copied to fill it up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """What one reducer holds in one round. Sums are of shard size, and of whole units with local accumulation."""

    before: int
    """Sums carried into it."""
    after: int
    """Sums carried out of it."""
    moments: tuple[Within, ...]
    aliased: int = 0
    """Of those carried out, how many lie in memory that is counted elsewhere: the gradient or the reducer's input."""


def schedule_of(mesh: Mesh, num_microbatches: int, mode: Accumulation) -> Schedule:
    return Schedule(mode=mode, num_microbatches=num_microbatches, mesh=mesh)


@lru_cache(maxsize=4096)
def rounds_of(
    mesh: Mesh, num_microbatches: int, mode: Accumulation, copied: bool, rank: int, replicated: bool = False
) -> tuple[Round, ...]:
    """The rounds of one rank in order, for units that are cut over its group, or that every worker has whole.
    `copied`: leaves are converted to the sum's dtype, which takes memory."""
    schedule = schedule_of(mesh, num_microbatches, mode)
    exchange = _exchange(schedule, rank, copied, replicated)
    if replicated or mesh.shards == 1:
        return tuple(_alone(schedule, rank, copied, exchange))
    if mode == "local":
        return tuple(_local(schedule, rank, copied, exchange))
    return tuple(_sharded(schedule, rank, copied, exchange))


def own_sums(mesh: Mesh, num_microbatches: int, mode: Accumulation, rank: int, replicated: bool = False) -> int:
    """The partial sums that a rank has of its shard, or of what it has whole, when it exchanges them with the other
    holders."""
    schedule = schedule_of(mesh, num_microbatches, mode)
    return len(schedule.sums_of_rank(rank) if replicated else schedule.sums_of_replica(mesh.replica_of(rank)))


def _exchange(schedule: Schedule, rank: int, copied: bool, replicated: bool) -> tuple[Within, ...]:
    """What `sum_over_replicas` takes beside the rank's own sums; nothing where nobody else holds them."""
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
    """The exchange, while the rank's own sums take so much."""
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
        held = len(ages) if copied else sum(age < index for age in ages)  # the others are views of what arrived
        moments = [Within(sums=most if copied else before, chunks=len(arriving))]
        if index < rounds - 1:  # copies of all that wait, beside what they are copies of
            moments.append(Within(sums=held + len(ages), chunks=len(arriving)))
            found.append(Round(before=before, after=len(ages), moments=tuple(moments)))
        else:
            moments += _beside(exchange, held, 0 if copied else len(arriving))
            found.append(Round(before=before, after=0, moments=tuple(moments)))
    return found


def _alone(schedule: Schedule, rank: int, copied: bool, exchange: tuple[Within, ...]) -> list[Round]:
    """The leaf is the reducer's output, which the gradient keeps until the next round."""
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
    """The rounds in which the waiting sums were last added to."""
    ages: list[int] = []

    def note(age: int) -> int:
        ages.append(age)
        return age

    sums.map_waiting(note)
    return ages
