"""Tensor parallelism in one process: a mesh with only one real worker, and the bytes it would send to the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore  # where torch has its process group of one process
from torch.utils._python_dispatch import TorchDispatchMode

from raysharded.actors.comm.device_mesh import forget
from raysharded.errors import ConfigError

_SHARES: dict[str, Callable[[int, int], int]] = {
    "all_reduce": lambda size, n: 2 * size * (n - 1) // n,
    "all_gather_into_tensor": lambda size, n: size * (n - 1),
    "reduce_scatter_tensor": lambda size, n: size * (n - 1) // n,
    "all_to_all_single": lambda size, n: size * (n - 1) // n,
    "shard_dim_alltoall": lambda size, n: size * (n - 1) // n,
    "broadcast": lambda size, n: size * (n - 1) // n,
}
"""Name of a collective -> the bytes that one of `n` workers sends in a ring, for its input."""
_NAMESPACES = ("_c10d_functional", "_dtensor")


@contextmanager
def tensor_mesh(degree: int) -> Iterator[DeviceMesh]:
    """The mesh of a tensor parallel group whose first worker is this process; the others do not exist.

    Raises ConfigError in a process that already has a process group.
    """
    if dist.is_initialized():
        raise ConfigError(
            "a task with parallelize is measured in a process without torch.distributed groups, but this one has some: "
            "call destroy_process_group() before, or plan in a separate process (raysharded plan)."
        )
    dist.init_process_group("fake", rank=0, world_size=degree, store=FakeStore())
    mesh = DeviceMesh("cpu", list(range(degree)), mesh_dim_names=("tensor",))
    try:
        yield mesh
    finally:
        forget(mesh)
        dist.destroy_process_group()


class CollectiveCount(TorchDispatchMode):
    """Counts the bytes sent by DTensor's collectives in `sent`, while it is entered."""

    def __init__(self, degree: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._degree = degree
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_of_dtensors(types):
            return NotImplemented
        packet = func._overloadpacket
        share = _SHARES.get(packet.__name__.rstrip("_")) if packet._qualified_op_name.startswith(_NAMESPACES) else None
        if share is not None:
            self.sent += share(args[0].nbytes, self._degree)
        return func(*args, **(kwargs or {}))


def is_of_dtensors(types: Any) -> bool:
    """True if a mode must leave an operation to DTensor; it then sees the resulting operations."""
    return any(issubclass(kind, DTensor) for kind in types)


def like_parameter(param: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """A parameter without values, on the CPU; for a DTensor, this worker's part."""
    learns = param.requires_grad
    if not isinstance(param, DTensor):
        return nn.Parameter(torch.empty(param.shape, dtype=dtype, device="cpu"), requires_grad=learns)
    part = torch.empty(param.to_local().shape, dtype=dtype, device="cpu")
    whole = DTensor.from_local(
        part, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
    )
    made = nn.Parameter(whole, requires_grad=learns)
    if learns:
        made.register_post_accumulate_grad_hook(_as_placed)
    return made


def _as_placed(param: torch.Tensor) -> None:
    """Place the gradient like its parameter: FSDP2 does so before it reduces it."""
    assert isinstance(param, DTensor)
    gradient = param.grad
    if isinstance(gradient, DTensor) and gradient.placements != param.placements:
        placed = gradient.redistribute(placements=param.placements)
        local = placed.to_local()
        if isinstance(local, AsyncCollectiveTensor):
            local = local.wait()
        param.grad = DTensor.from_local(
            local, param.device_mesh, param.placements, run_check=False, shape=param.shape, stride=param.stride()
        )
