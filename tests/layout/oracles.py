"""The shards that torch itself cuts, for every rank of a mesh. Each function is run in a separate process, with a
process group that connects nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.distributed.fake_pg import FakeStore

Extent: TypeAlias = tuple[list[int], list[int], list[int]]
"""One tensor on one rank: FSDP2's shape of its shard, and DTensor's shape and first cell."""
Cells: TypeAlias = tuple[str, list[int], int | None, list[int], list[int]]
"""A parameter on one rank: name, whole shape, the dimension that its style cuts, shape, the numbers of its cells."""


def _join(rank: int, world_size: int) -> None:
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())


def extents(
    shapes: Sequence[tuple[int, ...]], meshes: Sequence[tuple[int, int]]
) -> list[tuple[int, int, int, list[Extent]]]:
    """(replicas, shards, rank, its part of each tensor) for every rank of every mesh of (replicas, shards)."""
    found = []
    for replicas, shards in meshes:
        for rank in range(replicas * shards):
            _join(rank, replicas * shards)
            model = nn.Module()
            for number, shape in enumerate(shapes):
                model.register_parameter(f"p{number}", nn.Parameter(torch.empty(shape, device="meta")))
            if replicas == 1:
                mesh = init_device_mesh("cpu", (shards,))
            else:
                mesh = init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard"))
            fully_shard(model, mesh=mesh)
            own: list[Extent] = []
            parameter: Any
            for parameter in model.parameters():
                size, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, parameter.placements)
                own.append((list(parameter._local_tensor.shape), list(size), list(offset)))
            found.append((replicas, shards, rank, own))
            dist.destroy_process_group()
    return found


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo, self.plain = nn.Linear(8, 13), nn.Linear(24, 7, bias=False), nn.Linear(3, 5)
        self.norm = nn.LayerNorm(9)
        self.tok, self.pos = nn.Embedding(11, 4), nn.Embedding(6, 8)
        self.conv = nn.Parameter(torch.empty(5, 8, 3))
        self.deep = nn.Parameter(torch.empty(7, 2, 4, 2))


_STYLES: dict[str, type[ParallelStyle]] = {
    "wq": ColwiseParallel,
    "wo": RowwiseParallel,
    "norm": SequenceParallel,
    "tok": RowwiseParallel,
    "pos": ColwiseParallel,
}


def cells(meshes: Sequence[tuple[int, int]]) -> list[tuple[int, int, int, list[Cells]]]:
    """(data shards, degree, rank, its part of each parameter) for every rank of every mesh of (data shards, tensor
    parallel degree), of a model with parallel styles below FSDP2."""
    found = []
    for shards, degree in meshes:
        for rank in range(shards * degree):
            _join(rank, shards * degree)
            mesh = init_device_mesh("cpu", (shards, degree), mesh_dim_names=("data", "tensor"))
            model = _Model()
            whole = {name: list(param.shape) for name, param in model.named_parameters()}
            with torch.no_grad():
                for param in model.parameters():
                    param.copy_(torch.arange(param.numel()).view(param.shape))  # each element is its own index
            styles = {name: style() for name, style in _STYLES.items()}
            parallelize_module(model, mesh["tensor"], styles, src_data_rank=None)
            for name, dim in (("conv", 1), ("deep", 2)):
                cut = distribute_tensor(getattr(model, name).detach(), mesh["tensor"], [Shard(dim)], src_data_rank=None)
                setattr(model, name, nn.Parameter(cut))
            dims = {}
            for name, param in model.named_parameters():
                (placement,) = getattr(param, "placements", [None])
                dims[name] = placement.dim if isinstance(placement, Shard) else None
            fully_shard(model, mesh=mesh["data"])
            own: list[Cells] = []
            sharded: Any
            for name, sharded in model.named_parameters():
                local = sharded._local_tensor.detach().long()
                own.append((name, whole[name], dims[name], list(local.shape), local.flatten().tolist()))
            found.append((shards, degree, rank, own))
            dist.destroy_process_group()
    return found
