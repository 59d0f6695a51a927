"""Abortable collectives for FSDP2 and the reducers over a shard group of CPU workers.

Their waits come from `abortable_wait`. On GPUs FSDP2 keeps its own collectives: aborting NCCL's communicator releases
all waiting threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions
from torch.distributed.fsdp import FSDPModule

from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.device.device_waits import waits_for_peers

Finish = Callable[[Any], None]
"""Returns when a work is done. Raises the work's error, or CollectiveAborted."""
Reducing = Callable[[], AbstractContextManager[None]]
"""Context manager around each exchange of gradients and their addition."""


@waits_for_peers
def finish_plainly(work: Any) -> None:
    """Return when the work is done; raise its error."""
    work.wait()


class _Allocating:
    def __init__(self, finish: Finish) -> None:
        self._finish = finish

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class AllGather(_Allocating):
    """FSDP2's all-gather of one unit's parameters, done when the call returns."""

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, async_op: bool = False
    ) -> None:
        self._finish(group._allgather_base(output_tensor, input_tensor, AllgatherOptions()))


class ReduceScatter(_Allocating):
    """FSDP2's reduce-scatter of one unit's gradients, done when the call returns.

    An all-to-all and a local sum. gloo's own reduce-scatter is an all-reduce: it sends twice as much, and its work
    cannot be waited for in slices.
    """

    def __init__(self, finish: Finish, reducing: Reducing = nullcontext) -> None:
        super().__init__(finish)
        self._reducing = reducing

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        assert op == dist.ReduceOp.SUM, op  # as `build.allocate` sets it
        with self._reducing():
            received = torch.empty_like(input_tensor)
            all_to_all(received, input_tensor, group=group, finish=self._finish)
            torch.sum(received.view(group.size(), -1), 0, out=output_tensor.view(-1))


def install(units: Iterable[tuple[str, FSDPModule]], finish: Finish, reducing: Reducing) -> None:
    """Make FSDP2 use these collectives. Call before reducers are installed: they replace the reduce-scatter."""
    for _, unit in units:
        unit.set_custom_all_gather(AllGather(finish))  # type: ignore[arg-type]  # their classes are private
        unit.set_custom_reduce_scatter(ReduceScatter(finish, reducing))  # type: ignore[arg-type]


def all_to_all(
    received: torch.Tensor,
    send: torch.Tensor,
    out_sizes: list[int] | None = None,
    in_sizes: list[int] | None = None,
    *,
    group: Any,
    finish: Finish,
) -> None:
    """Exchange flat tensors. Sizes are in elements, by rank; None means equal sizes."""
    if accelerator().has(send.device):
        accelerator().all_to_all(received, send, out_sizes, in_sizes, group)
    else:
        finish(group.alltoall_base(received, send, out_sizes or [], in_sizes or [], dist.AllToAllOptions()))
