"""Which worker computes which logical microbatch in which round: pure functions of (M, world size)."""

from __future__ import annotations

from raysharded.actors.tree import Node, aligned_nodes
from raysharded.config import Accumulation


def num_rounds(num_microbatches: int, world_size: int) -> int:
    """Rounds of forward and backward that every worker takes part in per step."""
    return -(-num_microbatches // world_size)


def microbatch_of(
    mode: Accumulation, num_microbatches: int, world_size: int, rank: int, round_index: int
) -> int | None:
    """The logical microbatch of `rank` in a round; None: it only joins the collectives.

    sharded: round-robin, so that the leaves arrive in order; local: a contiguous block of at most `num_rounds` each.
    """
    if mode == "sharded":
        index = round_index * world_size + rank
        return index if index < num_microbatches else None
    start, stop = local_block(num_microbatches, world_size, rank)
    return start + round_index if start + round_index < stop else None


def local_block(num_microbatches: int, world_size: int, rank: int) -> tuple[int, int]:
    """The contiguous microbatches of `rank` under local accumulation, as balanced as can be."""
    return num_microbatches * rank // world_size, num_microbatches * (rank + 1) // world_size


def local_nodes(num_microbatches: int, world_size: int, rank: int) -> list[Node]:
    """The partial sums that `rank` has after adding its own block along the tree."""
    return aligned_nodes(*local_block(num_microbatches, world_size, rank), num_microbatches)
