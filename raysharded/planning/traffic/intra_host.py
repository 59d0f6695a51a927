"""Number of gradient chunks that each worker sends if several workers share a host and add up first. Pure.

Follows `actors.reduction.gradient_exchange.Exchange`. In the first stage the workers of a host exchange their chunks.
In the second, sums that a host cannot add any further go to their shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

from raysharded.actors.numerics.microbatch_schedule import Schedule
from raysharded.actors.numerics.summation_tree import aligned_nodes, coalesce_nodes


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """Chunks of one shard that one worker sends to others in a step."""

    leaves: int = 0
    """Unreduced chunks to others on its host: gradients; with local accumulation, sums."""
    sums: int = 0
    """Chunks in the sums' dtype, already added on the host."""
    sums_between: int = 0
    """The part of `sums` that goes to other hosts."""


def is_adding(nodes: Sequence[int]) -> bool:
    """True if workers of a shard group add for others; shard `s` is on node `nodes[s]`."""
    return 1 < len(set(nodes)) < len(nodes)


@lru_cache(maxsize=1024)
def sent_in_group(schedule: Schedule, replica: int, nodes: tuple[int, ...]) -> tuple[Sent, ...]:
    """Traffic of the workers of a group in a step, by shard; shard `s` is on node `nodes[s]`. Shards of a node are
    adjacent, and `is_adding(nodes)` holds."""
    found: list[Sent] = []
    for _, run in groupby(nodes):
        host = range(len(found), len(found) + len(list(run)))
        own, sums = _of_host(schedule, replica, host)
        found += [_sent(each, sums, len(nodes), host, shard) for shard, each in zip(host, own, strict=True)]
    return tuple(found)


def _of_host(schedule: Schedule, replica: int, host: range) -> tuple[list[int], int]:
    """(for each worker, its number of tree nodes in a step's exchanges; the number of nodes left after the host has
    added)."""
    group = schedule.mesh.group(replica)
    if schedule.mode == "local":
        own = [schedule.sums_of_rank(group[shard]) for shard in host]
        return [len(nodes) for nodes in own], len(
            coalesce_nodes((n for nodes in own for n in nodes), schedule.num_microbatches)
        )
    start, stop = schedule.block(replica)
    rounds = range(start, stop, len(group))
    leaves = [range(min(first + host.start, stop), min(first + host.stop, stop)) for first in rounds]
    sums = sum(len(aligned_nodes(each.start, each.stop, schedule.num_microbatches)) for each in leaves)
    return [sum(place < len(each) for each in leaves) for place in range(len(host))], sums


def _sent(own: int, sums: int, shards: int, host: range, shard: int) -> Sent:
    """The traffic of one worker. `sums`: the sums that the host cannot add any further."""
    place, count = host.index(shard), len(host)
    part = range(shards * place // count, shards * (place + 1) // count)
    near = len(range(max(part.start, host.start), min(part.stop, host.stop)))
    return Sent(
        leaves=own * (shards - len(part)),
        sums=sums * (len(part) - (shard in part)),
        sums_between=sums * (len(part) - near),
    )
