"""Which worker computes which logical microbatch in which round: pure functions of (M, mesh).

Each shard group takes a contiguous block of the microbatches, so that what its workers have added before they meet the
other groups' are a few whole subtrees of `summation_tree.py`. Groups may have blocks of different lengths, and as many
rounds as they need.
"""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.actors.numerics.summation_tree import Node, aligned_nodes, coalesce_leaves
from raysharded.config import Accumulation
from raysharded.layout import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Who computes what in every step."""

    mode: Accumulation
    num_microbatches: int
    mesh: Mesh

    def num_rounds(self, replica: int) -> int:
        """Rounds of forward and backward per step that every worker of a group takes part in; at least one."""
        if self.mode == "sharded":
            start, stop = self._block(replica, self.mesh.replicas)
            return max(1, -(-(stop - start) // self.mesh.shards))
        return max(1, *(len(range(*self._block(rank, self.mesh.world_size))) for rank in self.mesh.group(replica)))

    def microbatch_of(self, rank: int, round_index: int) -> int | None:
        """The logical microbatch of `rank` in a round; None: it only joins the collectives.

        sharded: round-robin within the group, so that the leaves arrive in order; local: a contiguous block each.
        """
        mesh = self.mesh
        if self.mode == "sharded":
            start, stop = self._block(mesh.replica_of(rank), mesh.replicas)
            index = start + round_index * mesh.shards + mesh.shard_of(rank)
        else:
            start, stop = self._block(rank, mesh.world_size)
            index = start + round_index
        return index if index < stop else None

    def block(self, replica: int) -> tuple[int, int]:
        """The contiguous microbatches start .. stop-1 of a group."""
        return self._block(replica, self.mesh.replicas)

    def sums_of_rank(self, rank: int) -> list[Node]:
        """The partial sums that `rank` has after adding its own microbatches along the tree."""
        if self.mode == "local":
            return aligned_nodes(*self._block(rank, self.mesh.world_size), self.num_microbatches)
        rounds = range(self.num_rounds(self.mesh.replica_of(rank)))
        computed = [self.microbatch_of(rank, index) for index in rounds]
        return coalesce_leaves([index for index in computed if index is not None], self.num_microbatches)

    def sums_of_replica(self, replica: int) -> list[Node]:
        """The partial sums that a group has after adding its block along the tree."""
        return aligned_nodes(*self._block(replica, self.mesh.replicas), self.num_microbatches)

    def _block(self, part: int, parts: int) -> tuple[int, int]:
        """The contiguous microbatches of one of so many parts, as balanced as can be. Those of a group's ranks are the
        group's."""
        return self.num_microbatches * part // parts, self.num_microbatches * (part + 1) // parts


def microbatch_name(microbatch: int) -> str:
    """For errors; -1: that of a worker that has none."""
    return f"microbatch {microbatch}" if microbatch >= 0 else "the padding of a worker without a microbatch"
