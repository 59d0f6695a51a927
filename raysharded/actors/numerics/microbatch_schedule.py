"""Assignment of logical microbatches to workers and rounds: pure functions of (M, mesh).

Each shard group computes a contiguous block of the microbatches. So its sums, before they are added to other groups',
are a few whole subtrees of `summation_tree.py`. Groups may have blocks of different lengths and different numbers of
rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.actors.numerics.summation_tree import Node, aligned_nodes, coalesce_leaves
from raysharded.config import Accumulation
from raysharded.layout import Mesh


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The assignment of microbatches to workers in every step."""

    mode: Accumulation
    num_microbatches: int
    mesh: Mesh

    def num_rounds(self, replica: int) -> int:
        """Number of rounds per step that every worker of a group takes part in; at least one."""
        if self.mode == "sharded":
            start, stop = self._block(replica, self.mesh.replicas)
            return max(1, -(-(stop - start) // self.mesh.shards))
        return max(1, *(len(range(*self._block(rank, self.mesh.world_size))) for rank in self.mesh.group(replica)))

    def microbatch_of(self, rank: int, round_index: int) -> int | None:
        """The logical microbatch of `rank` in a round; None if the rank only joins the collectives.

        "sharded" is round-robin within the group, so that the leaves arrive in order. "local" is a contiguous block
        for each rank.
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
        """(start, stop) of a group's contiguous microbatches start .. stop-1."""
        return self._block(replica, self.mesh.replicas)

    def sums_of_rank(self, rank: int) -> list[Node]:
        """The partial sums of `rank` after it has added its microbatches along the tree."""
        if self.mode == "local":
            return aligned_nodes(*self._block(rank, self.mesh.world_size), self.num_microbatches)
        rounds = range(self.num_rounds(self.mesh.replica_of(rank)))
        computed = [self.microbatch_of(rank, index) for index in rounds]
        return coalesce_leaves([index for index in computed if index is not None], self.num_microbatches)

    def sums_of_replica(self, replica: int) -> list[Node]:
        """The partial sums of a group after it has added its block along the tree."""
        return aligned_nodes(*self._block(replica, self.mesh.replicas), self.num_microbatches)

    def _block(self, part: int, parts: int) -> tuple[int, int]:
        """(start, stop) of one of `parts` contiguous blocks, as equal as possible.

        The blocks of a group's ranks together are the group's block.
        """
        return self.num_microbatches * part // parts, self.num_microbatches * (part + 1) // parts


def microbatch_name(microbatch: int) -> str:
    """Name of a microbatch in errors; -1 is the padding of a worker without one."""
    return f"microbatch {microbatch}" if microbatch >= 0 else "the padding of a worker without a microbatch"
