"""How many chunks of the gradient each worker sends where several are on a host, which add up first. Pure.

Follows `actors.reduction.gradient_exchange.Exchange`: in the first stage the workers of a host give each other what
they have, in the second what a host cannot add any further goes to the shards that it belongs to.
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
    """Chunks of one shard, by one worker to others in a step."""

    leaves: int = 0
    """As they are, to others on its host: gradients, with local accumulation sums."""
    sums: int = 0
    """In the dtype that sums are kept in: what the host has added up."""
    sums_between: int = 0
    """Of `sums`, to other hosts."""


def is_adding(nodes: Sequence[int]) -> bool:
    """Whether workers of a shard group whose shard `s` is on node `nodes[s]` add for others."""
    return 1 < len(set(nodes)) < len(nodes)


@lru_cache(maxsize=1024)
def sent_in_group(schedule: Schedule, replica: int, nodes: tuple[int, ...]) -> tuple[Sent, ...]:
    """By shard, what the workers of a group send in a step, where that of shard `s` is on node `nodes[s]`; those of a
    node follow each other, and `is_adding(nodes)`."""
    found: list[Sent] = []
    for _, run in groupby(nodes):
        host = range(len(found), len(found) + len(list(run)))
        own, sums = _of_host(schedule, replica, host)
        found += [_sent(each, sums, len(nodes), host, shard) for shard, each in zip(host, own, strict=True)]
    return tuple(found)


def _of_host(schedule: Schedule, replica: int, host: range) -> tuple[list[int], int]:
    """(by worker how many nodes of the tree it has in a step's exchanges, how many are left once they are added)."""
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
    """`sums`: what the host cannot add any further."""
    place, count = host.index(shard), len(host)
    part = range(shards * place // count, shards * (place + 1) // count)
    near = len(range(max(part.start, host.start), min(part.stop, host.stop)))
    return Sent(
        leaves=own * (shards - len(part)),
        sums=sums * (len(part) - (shard in part)),
        sums_between=sums * (len(part) - near),
    )
