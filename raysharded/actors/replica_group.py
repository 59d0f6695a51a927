"""The workers that hold the same, over a process group that is torch's neither by name nor by default."""

from __future__ import annotations

import contextlib
import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from raysharded.actors.collectives import Finish


class Replicas:
    """The workers that hold one shard, by replica; a `raysharded.actors.replicas.ReplicaGroup`."""

    def __init__(self, group: Any, size: int, timeout: datetime.timedelta, finish: Finish) -> None:
        self._group, self.size, self._timeout, self._finish = group, size, timeout, finish

    def all_to_all(self, received: torch.Tensor, send: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> None:
        options = dist.AllToAllOptions()
        options.timeout = self._timeout
        self._finish(self._group.alltoall_base(received, send, out_sizes, in_sizes, options))

    def all_gather(self, received: torch.Tensor, own: torch.Tensor) -> None:
        options = AllgatherOptions()
        options.timeout = self._timeout
        self._finish(self._group._allgather_base(received, own, options))

    def all_reduce(self, values: torch.Tensor) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        options.timeout = self._timeout
        self._finish(self._group.allreduce([values], options))

    def abort(self) -> None:
        """Free those that wait; of an NCCL group."""
        with contextlib.suppress(RuntimeError):
            self._group.abort()
