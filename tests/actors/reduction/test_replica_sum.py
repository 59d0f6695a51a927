"""Adding up over replicas: threads as replicas, whose sums are exchanged as process groups exchange them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, strategies as st

from raysharded.actors.numerics.microbatch_schedule import Schedule
from raysharded.actors.numerics.summation_tree import TreeSum
from raysharded.actors.reduction.replica_sum import sum_over_replicas
from raysharded.layout import Mesh


class Board:
    """The place for the messages of the replicas of one shard; counts them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=20)
        self.slots: list[torch.Tensor] = [torch.empty(0)] * size
        self.bytes_sent = [0] * size


class OneReplica:
    """A `ReplicaGroup` of threads."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board, self._rank, self.size = board, rank, board.size

    def _meet(self, send: torch.Tensor) -> list[torch.Tensor]:
        self._board.slots[self._rank] = send
        self._board.barrier.wait()
        found = list(self._board.slots)
        self._board.barrier.wait()
        return found

    def all_to_all(self, received: torch.Tensor, send: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> None:
        assert sum(in_sizes) == send.numel()
        own = send.numel() // self.size
        self._board.bytes_sent[self._rank] += (self.size - 1) * own * send.element_size()
        everybody = self._meet(send)
        parts = [each.view(self.size, -1)[self._rank] if each.numel() else each for each in everybody]
        assert [len(part) for part in parts] == out_sizes
        received.copy_(torch.cat(parts))

    def all_gather(self, received: torch.Tensor, own: torch.Tensor) -> None:
        self._board.bytes_sent[self._rank] += (self.size - 1) * own.numel() * own.element_size()
        received.copy_(torch.cat(self._meet(own)))

    def all_reduce(self, values: torch.Tensor) -> None:
        raise AssertionError("that would be another order")


def leaves_of(num_microbatches: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_microbatches * 1000 + numel)
    return [
        torch.randn(numel, generator=generator).mul(10 ** (i % 5)).to(dtype).float() for i in range(num_microbatches)
    ]


def add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return a.add_(b)


def summed(leaves: list[torch.Tensor], replicas: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], Board]:
    """The sum that each replica gets, and the board of the exchange."""
    numel, board = leaves[0].numel(), Board(replicas)
    schedule = Schedule(mode="sharded", num_microbatches=len(leaves), mesh=Mesh(replicas=replicas, shards=1))
    sums = [schedule.sums_of_replica(replica) for replica in range(replicas)]

    def one(replica: int) -> torch.Tensor:
        total: TreeSum[torch.Tensor] = TreeSum(len(leaves), add)
        for index in range(schedule.num_rounds(replica)):
            leaf = schedule.microbatch_of(replica, index)
            if leaf is not None:
                total.add((0, leaf), leaves[leaf].clone())
        output = torch.empty(numel, dtype=dtype)
        sum_over_replicas(OneReplica(board, replica), total, sums, output, torch.float32)
        return output

    with ThreadPoolExecutor(replicas) as pool:
        return list(pool.map(one, range(replicas))), board


@given(
    num_microbatches=st.integers(1, 17),
    replicas=st.integers(2, 5),
    numel=st.integers(1, 40),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_all_replicas_get_the_bits_of_one_worker(
    num_microbatches: int, replicas: int, numel: int, dtype: torch.dtype
) -> None:
    leaves = leaves_of(num_microbatches, numel, dtype)
    alone: TreeSum[torch.Tensor] = TreeSum(num_microbatches, add)
    for index, leaf in enumerate(leaves):
        alone.add((0, index), leaf.clone())
    expected = alone.root().to(dtype)
    for output in summed(leaves, replicas, dtype)[0]:
        assert torch.equal(output, expected)


@pytest.mark.parametrize("replicas", [2, 4, 8])
def test_blocks_of_whole_subtrees_cost_the_bytes_of_a_ring_all_reduce(replicas: int) -> None:
    numel = 64
    _, board = summed(leaves_of(16, numel, torch.float32), replicas, torch.float32)
    assert board.bytes_sent == [2 * (replicas - 1) * numel * 4 // replicas] * replicas
