"""The sum of a shard's gradient over all replicas in canonical order: each replica adds up one part for all.

Every replica has the partial sums of its block of microbatches, cut into as many parts as there are replicas. Each
replica gets one part from all others and adds it along the tree; then the sums are gathered. The traffic is that of a
ring all-reduce if every block is one subtree, and one part more for each further subtree.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from raysharded.actors.numerics.summation_tree import Node, TreeSum


class ReplicaGroup(Protocol):
    """The workers that hold one shard, by replica."""

    @property
    def size(self) -> int:
        """Number of replicas."""
        ...

    def all_to_all(self, received: torch.Tensor, send: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> None:
        """Exchange flat device tensors; sizes in elements, by replica."""
        ...

    def all_gather(self, received: torch.Tensor, own: torch.Tensor) -> None:
        """Gather `own` of all members, which have one length, into `received`."""
        ...

    def all_reduce(self, values: torch.Tensor) -> None:
        """Sum over all members, in place, in the backend's order."""
        ...


def sum_over_replicas(
    group: ReplicaGroup,
    total: TreeSum[torch.Tensor],
    sums: Sequence[Sequence[Node]],
    output: torch.Tensor,
    accumulator: torch.dtype,
) -> None:
    """Fill `output` (flat, on the device) with the sum of all microbatches' gradients of this shard.

    `total`: this replica's partial sums; empty afterwards. `sums[q]`: the nodes of replica `q`'s sums, from left to
    right. They are added in `accumulator` and rounded once, to the dtype of `output`. Every holder of the shard must
    call it, for the same shards in the same order.
    """
    replicas, numel = group.size, output.numel()
    part = -(-numel // replicas)
    own = [value.view(-1) for _, value in total.pop_all()]
    send = _by_receiver(own, replicas, part, output.new_empty(0, dtype=accumulator))
    counts = [len(nodes) for nodes in sums]
    received = send.new_empty((sum(counts), part))
    group.all_to_all(received.view(-1), send, [count * part for count in counts], [len(own) * part] * replicas)
    rows = iter(received)
    for nodes in sums:
        for node in nodes:
            total.add(node, next(rows))
    summed = total.root().to(output.dtype)
    gathered = summed.new_empty(replicas * part)
    group.all_gather(gathered, summed)
    output.copy_(gathered[:numel].view_as(output))


def _by_receiver(sums: Sequence[torch.Tensor], replicas: int, part: int, like: torch.Tensor) -> torch.Tensor:
    """The sums, padded with zeros and cut into parts of one length; flat, with all parts for one replica contiguous."""
    if len(sums) == 1 and len(sums[0]) == replicas * part:
        return sums[0]
    padded = like.new_zeros((len(sums), replicas * part))
    for row, value in zip(padded, sums, strict=True):
        row[: len(value)] = value
    return padded.view(len(sums), replicas, part).transpose(0, 1).reshape(-1)
