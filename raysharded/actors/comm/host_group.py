"""Groups besides torch's: all members of a generation, over gloo, for host memory; and the workers of one shard."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions

from raysharded.actors.comm.fsdp_collectives import Finish
from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.device.device_waits import on_device, wait_for, waits_for_peers


class HostGroup:
    """Collectives and messages among all members. An abort may release their callers: see `abortable_wait`."""

    def __init__(self, group: Any, timeout: datetime.timedelta, finish: Finish) -> None:
        self.group, self.rank, self.size = group, int(group.rank()), int(group.size())
        """The gloo group, this worker's rank in it, and the number of its members."""
        self._timeout, self._finish = timeout, finish

    def send(self, data: torch.Tensor, to: int, tag: int) -> Any:
        """Start to send a host tensor to a rank that receives as many bytes under this tag.

        Pass the result to `deliver`, and do not change the tensor until that returns.
        """
        return self.group.send([data], to, tag)

    def recv(self, data: torch.Tensor, source: int, tag: int) -> Any:
        """Start to receive the message with this tag from a rank into a host tensor. Pass the result to `deliver`."""
        return self.group.recv([data], source, tag)

    @waits_for_peers
    def deliver(self, message: Any) -> None:
        """Return when the message of `send` or `recv` is transferred; raises its error.

        Only in a thread that may be abandoned: see `abortable_wait`. A bare `wait` would have the time-out of
        connecting.
        """
        message.wait(self._timeout)

    def barrier(self) -> None:
        """Return when every member has called this."""
        self.sum_int64(torch.zeros(1, dtype=torch.int64))

    def sum_int64(self, values: torch.Tensor) -> torch.Tensor:
        """The element-wise sum of an int64 host tensor over all members, in place."""
        return self.begin_sum_int64(values)()

    def begin_sum_int64(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin `sum_int64`; returns a function that waits for it. Do not use the tensor before that has returned.

        All members call it at the same place among their collectives of this group.
        """
        work = self._begin_all_reduce(values, dist.ReduceOp.SUM)

        def arrived() -> torch.Tensor:
            self._finish(work)
            return values

        return arrived

    def max_int(self, value: int) -> int:
        """The largest of the members' values."""
        values = torch.tensor([value], dtype=torch.int64)
        self._finish(self._begin_all_reduce(values, dist.ReduceOp.MAX))
        return int(values.item())

    def broadcast(self, data: torch.Tensor) -> None:
        """Overwrite a uint8 host tensor, of equal length on every member, with rank 0's."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self._finish(self.group.broadcast([data], options))

    def room(self, size_bytes: int) -> torch.Tensor:
        """Host memory for `exchange`, uint8 [size_bytes], not initialized."""
        return torch.empty(size_bytes, dtype=torch.uint8)

    def exchange(self, received: torch.Tensor, send: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> None:
        """All-to-all of uint8 host tensors; sizes by member."""
        options = dist.AllToAllOptions()
        options.timeout = self._timeout
        self._finish(self.group.alltoall_base(received, send, out_sizes, in_sizes, options))

    def _begin_all_reduce(self, values: torch.Tensor, how: Any) -> Any:
        options = dist.AllreduceOptions()
        options.reduceOp, options.timeout = dist.ReduceOp(how), self._timeout
        return self.group.allreduce([values], options)


class Replicas:
    """Workers that hold one shard, by replica; a `raysharded.actors.reduction.replica_sum.ReplicaGroup`."""

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


class DeviceExchange(HostGroup):
    """A host group whose `exchange` goes through the accelerators: host, device, the peer's device, its host.

    Links between devices carry more than gloo does (docs/gpus.md). It takes as much memory on the device as it is given
    on the host.
    """

    def __init__(self, host: HostGroup, everyone: Replicas) -> None:
        """`everyone`: the same members, by the accelerator's communicator."""
        super().__init__(host.group, host._timeout, host._finish)
        self._everyone = everyone

    def room(self, size_bytes: int) -> torch.Tensor:
        """Page-locked host memory."""
        return accelerator().pinned(size_bytes)

    def exchange(self, received: torch.Tensor, send: torch.Tensor, out_sizes: list[int], in_sizes: list[int]) -> None:
        """As of any host group. Raises CollectiveAborted on abort."""
        device = accelerator().current()
        there = torch.empty_like(received, device=device)
        self._everyone.all_to_all(there, on_device(send, device), out_sizes, in_sizes)
        received.copy_(there, non_blocking=True)
        wait_for(accelerator().record(accelerator().current_stream(device)))
