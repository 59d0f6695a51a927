"""Parity: blocks that protect shards, and the rebuilding of lost shards. Pure.

With parity (k, m) each rank's buffer is cut into `k` parts, padded to one length. Stripe `t` of `W` is part `i` of rank
`t + i`, for `i` in `0 .. k-1`, and `m` parity blocks computed from these. Rank `t + k + j` holds block `j` (ranks wrap
around). So every rank is in `k` stripes with its own parts and in `m` with blocks of the same length: it holds `m / k`
of a shard.

The first holder of a stripe computes all of its parity blocks, and sends the others theirs. Each rank sends and
receives its shard's bytes, and `(m - 1) / k` of that. The `k + m` blocks of a stripe are on as many ranks, and any `k`
of them give all: a stripe survives the loss of any `m` of its ranks.

Stripes with rotating parity are those of RAID 5 (Patterson, Gibson, Katz: "A Case for Redundant Arrays of Inexpensive
Disks", 1988). They are over more disks than a stripe is wide: declustered (Holland, Gibson: "Parity Declustering for
Continuous Operation", 1992).

With tensor parallelism, or several workers on a node, the places in this rotation are not the ranks. First come the
first workers of all groups, or nodes, then their second ones, and so on. So no stripe has two blocks in one tensor
parallel group: the loss of a whole group, with its node, costs each stripe one block. Workers of a node keep
consecutive ranks, so that gradients are added inside nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from raysharded.config import Redundancy
from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.layout.mesh import Mesh
from raysharded.layout.sharding import ALIGNMENT, shard_map
from raysharded.layout.state import StateSpec


@dataclass(frozen=True, kw_only=True, slots=True)
class Parity:
    """`m` parity blocks for every `k` blocks of state. Raises ConfigError unless both are 1 or more."""

    k: int
    m: int
    tensor: int = 1
    """Tensor parallel degree of the layout."""
    apart: int = 1
    """`Mesh.apart` of the layout: a stripe's ranks are so far from each other, where its workers fill whole nodes."""

    def __post_init__(self) -> None:
        if self.k < 1 or self.m < 1:
            raise ConfigError(f"Parity(k={self.k}, m={self.m}): both must be 1 or more.")

    @property
    def width(self) -> int:
        """Number of ranks of one stripe."""
        return self.k + self.m

    def protects(self, mesh: Mesh) -> bool:
        """True if there are workers enough for it, and no other replica that holds the same."""
        return mesh.replicas == 1 and mesh.data.shards >= self.width

    def stripe_of(self, rank: int, part: int, world_size: int) -> int:
        """Stripe of a part of a rank's buffer."""
        return (self.place_of(rank, world_size) - part) % world_size

    def stripe_kept(self, rank: int, block: int, world_size: int) -> int:
        """Stripe whose parity block number `block` a rank holds."""
        return (self.place_of(rank, world_size) - self.k - block) % world_size

    def rank_in(self, stripe: int, number: int, world_size: int) -> int:
        """Rank that has block `number` of a stripe: parts of state from 0 on, then parity blocks from `k` on."""
        return self.rank_at((stripe + number) % world_size, world_size)

    def place_of(self, rank: int, world_size: int) -> int:
        """Place of a rank in the rotation: first come the ranks 0, `distance`, 2 `distance`, ..., then those from 1."""
        row, column = divmod(rank, self.distance)
        rows, longer = divmod(world_size, self.distance)
        return column * rows + min(column, longer) + row

    def rank_at(self, place: int, world_size: int) -> int:
        """The inverse of `place_of`."""
        rows, longer = divmod(world_size, self.distance)
        if place < longer * (rows + 1):
            column, row = divmod(place, rows + 1)
        else:
            column, row = divmod(place - longer * (rows + 1), rows)
            column += longer
        return row * self.distance + column

    @property
    def distance(self) -> int:
        """Distance of ranks whose places follow each other."""
        return max(self.tensor, self.apart)

    def __str__(self) -> str:
        return f"parity ({self.k}, {self.m})"


def parity_of(redundancy: Redundancy | None, tensor: int = 1, apart: int = 1) -> Parity | None:
    """Parity of a user's configuration in a mesh of this degree and distance; None without redundancy."""
    if redundancy is None:
        return None
    return Parity(k=redundancy.parity[0], m=redundancy.parity[1], tensor=tensor, apart=apart)


def block_bytes(spec: StateSpec, world_size: int, parity: Parity, tensor: int = 1) -> int:
    """Length of a block: a part of the largest buffer, which is the first rank's; a multiple of `ALIGNMENT`."""
    return length_of_block(shard_map(spec, world_size, 0, tensor).size_bytes, parity)


def length_of_block(largest_bytes: int, parity: Parity) -> int:
    """As `block_bytes`, for a largest buffer of this size."""
    return -(-largest_bytes // (parity.k * ALIGNMENT)) * ALIGNMENT


def part_range(size_bytes: int, part: int, length: int) -> tuple[int, int]:
    """Start and stop of a part of a buffer of `size_bytes`, in blocks of `length`.

    The part may be shorter, or empty; missing bytes count as zeros.
    """
    return min(part * length, size_bytes), min((part + 1) * length, size_bytes)


def rebuildable(parity: Parity, world_size: int, held: Collection[int], kept: Collection[int]) -> frozenset[int]:
    """Ranks not in `held` whose buffers can be computed.

    Available are the buffers of the ranks `held` and the parity blocks of the ranks `kept`.
    """
    missing, there = np.ones(world_size, np.int64), np.zeros(world_size, np.int64)
    missing[[parity.place_of(rank, world_size) for rank in held]] = 0
    there[[parity.place_of(rank, world_size) for rank in kept]] = 1
    lost = sum(np.roll(missing, -i) for i in range(parity.k))
    found = sum(np.roll(there, -parity.k - j) for j in range(parity.m))
    beyond = np.asarray(lost > found, np.int64)
    touched = sum(np.roll(beyond, i) for i in range(parity.k))
    places = np.flatnonzero((missing == 1) & (np.asarray(touched) == 0)).tolist()
    return frozenset(parity.rank_at(place, world_size) for place in places)


def survives(parity: Parity, world_size: int, left: Collection[int]) -> bool:
    """True if the ranks that are left hold the whole state between them."""
    return len(rebuildable(parity, world_size, left, left)) == world_size - len(left)


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """Block `number` of a stripe, and its holder: a part of rank `rank`'s buffer, or a parity block of that rank."""

    number: int
    rank: int
    holder: WorkerId


@dataclass(frozen=True, kw_only=True, slots=True)
class Repair:
    """One part of a lost rank's buffer, and `k` blocks of its stripe that give it."""

    rank: int
    part: int
    at: WorkerId
    """Worker that computes the part."""
    blocks: tuple[Block, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rebuild:
    """Buffers of one layout that are computed from others."""

    layout_id: int
    world_size: int
    parity: Parity
    holders: tuple[WorkerId | None, ...]
    """Holder of each rank's buffer."""
    keepers: tuple[WorkerId | None, ...]
    """Holder of each rank's parity blocks."""
    lost: tuple[tuple[int, WorkerId], ...]
    """(rank, worker that computes its buffer, and then holds it)"""
    tensor: int = 1
    """Tensor parallel degree of the layout."""

    def repairs(self) -> Iterator[Repair]:
        """All parts to compute, in an order that is the same on all workers.

        Blocks that the computing worker has itself are preferred, then parts of state.
        """
        k, world = self.parity.k, self.world_size
        for rank, at in self.lost:
            for part in range(k):
                stripe = self.parity.stripe_of(rank, part, world)
                there = []
                for number in range(self.parity.width):
                    whose = self.parity.rank_in(stripe, number, world)
                    holder = (self.holders if number < k else self.keepers)[whose]
                    if holder is not None:
                        there.append(Block(number=number, rank=whose, holder=holder))
                chosen = sorted(there, key=lambda block: (block.holder != at, block.number))[:k]
                yield Repair(rank=rank, part=part, at=at, blocks=tuple(sorted(chosen, key=lambda b: b.number)))


def plan_rebuild(
    parity: Parity,
    layout_id: int,
    world_size: int,
    held: Mapping[int, WorkerId],
    kept: Mapping[int, WorkerId],
    tensor: int = 1,
) -> Rebuild | None:
    """Plan that computes every buffer of a layout that can be computed; None if there is none.

    `held`, `kept`: the holders of the buffer, and of the parity blocks, of a rank. Each buffer is computed by a worker
    with the fewest to compute: the first one from the holder of the next rank's buffer on, where a mirror would be.
    """
    lost = sorted(rebuildable(parity, world_size, held.keys(), kept.keys()))
    if not lost:
        return None
    order = sorted(held) or sorted(kept)
    workers = [(held or kept)[rank] for rank in order]
    tasks = dict.fromkeys(workers, 0)
    chosen: list[tuple[int, WorkerId]] = []
    for rank in lost:
        first = int(np.searchsorted(order, rank))
        at = min((*workers[first:], *workers[:first]), key=lambda worker: tasks[worker])
        tasks[at] += 1
        chosen.append((rank, at))
    return Rebuild(
        layout_id=layout_id,
        world_size=world_size,
        parity=parity,
        holders=_by_rank(held, world_size),
        keepers=_by_rank(kept, world_size),
        lost=tuple(chosen),
        tensor=tensor,
    )


def _by_rank(workers: Mapping[int, WorkerId], world_size: int) -> tuple[WorkerId | None, ...]:
    return tuple(workers.get(rank) for rank in range(world_size))
