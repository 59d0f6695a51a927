"""A process group of one process that believes to be one rank of many: FSDP2's true layout, without communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import raysharded as rs
from raysharded.actors.comm.device_mesh import DeviceMeshes, forget
from raysharded.actors.model.build import build_sharded
from raysharded.actors.model.sharded_model import ShardedModel


@contextmanager
def fake_mesh(world_size: int, rank: int = 0) -> Iterator[DeviceMesh]:
    """The mesh of a fake default group, ended on leaving: DTensor would remember its groups for the next alike."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        mesh = DeviceMesh("cpu", list(range(world_size)))
        yield mesh
    finally:
        forget(mesh)
        dist.destroy_process_group()


@contextmanager
def fake_axes(shards: int, degree: int, rank: int = 0) -> Iterator[DeviceMeshes]:
    """The axes of a fake shard group with tensor parallelism, ended on leaving."""
    with fake_mesh(shards * degree, rank):
        both = init_device_mesh("cpu", (shards, degree), mesh_dim_names=("data", "tensor"))
        axes = DeviceMeshes(data=both["data"], tensor=both["tensor"], alone=alone)
        try:
            yield axes
        finally:
            forget(both, both["data"], both["tensor"])


def alone() -> DeviceMesh:
    """The mesh of this rank only."""
    return DeviceMesh.from_group(dist.new_group([dist.get_rank()], use_local_synchronization=True), "cpu")


def build(task: rs.Task, world_size: int = 2, rank: int = 0, **engine: object) -> ShardedModel:
    """The task's model as one rank of many would build it."""
    with fake_mesh(world_size, rank) as mesh:
        return build_sharded(task, rs.EngineConfig(**engine), DeviceMeshes(data=mesh, alone=alone), torch.device("cpu"))  # type: ignore[arg-type]  # named by tests
