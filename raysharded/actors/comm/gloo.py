"""gloo groups that are connected when made, and their use as torch's default group or as one of its other groups.

Torch has one default group at a time, made by `init_process_group`. A model is wrapped for a mesh, which needs a group.
Wrapping the next generation's model in the background needs that generation's group before the current one is
destroyed. So the group is made first and known only to the mesh. It becomes the default group later.

`ConnectedGroup` does in two steps what torch 2.13 to 2.15 do in `_new_process_group_helper` and `init_process_group`
(torch/distributed/distributed_c10d.py). Torch has no public API for this.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from raysharded.actors.device.accelerator import accelerator
from raysharded.actors.device.device_waits import waits_for_peers

BACKEND = "raysharded_gloo"
"""Torch's name for the backend that returns the handed-over group."""


class _HandedOver(threading.local):
    group: Any = None

    def __call__(self, store: object, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        return self.group


_handed_over = _HandedOver()
dist.Backend.register_backend(BACKEND, _handed_over, devices=["cpu"])


def hand_over(group: Any) -> None:
    """Use this group for the next groups that torch makes in this thread; None releases it."""
    _handed_over.group = group


@waits_for_peers
def connect(
    store: Any, rank: int, size: int, address: str, connect_timeout_s: float, timeout: datetime.timedelta
) -> Any:
    """A gloo group, connected to all members. `address`: this machine's address; `timeout`: applies once connected."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)]
    options._timeout = datetime.timedelta(seconds=connect_timeout_s)
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(timeout)
    return group


class ConnectedGroup:
    """A torch process group around a connected backend of this worker's shard group."""

    def __init__(self, backend: Any, name: str, store: Any, rank: int, size: int, device: torch.device) -> None:
        """`device`: cpu, or the GPU that NCCL was connected on. `name`: unique among this process's groups."""
        self._name, self._store, self._rank, self._device = c10d.GroupName(name), store, rank, device
        self._on_gpu = accelerator().has(device)
        kind = accelerator().backend_type if self._on_gpu else dist.ProcessGroup.BackendType.GLOO
        self.group = dist.ProcessGroup(store, rank, size)
        self.group._set_default_backend(kind)
        if self._on_gpu:
            self.group.bound_device_id = device
        self.group._register_backend(torch.device(device.type), kind, backend)
        self.group._set_group_name(self._name)
        self.group._set_group_desc("default_pg")
        _register_process_group(self._name, self.group)  # meshes find it by its name

    def mesh(self, name: str) -> DeviceMesh:
        """A 1-D mesh of all members with this dimension name; works before the group is the default group, too."""
        ranks, names = torch.arange(self.group.size(), dtype=torch.int), (name,)
        mesh = DeviceMesh(self._device.type, ranks, mesh_dim_names=names, _init_backend=False, _rank=self._rank)
        mesh._dim_group_names = [self._name]
        mesh._pg_registry[self._name] = self.group
        return mesh

    def forget(self) -> None:
        """Unregister the group, which will never be the default group."""
        with contextlib.suppress(RuntimeError):
            _unregister_process_group(self._name)

    def make_default(self) -> None:
        """Make the group torch's default group. Raises RuntimeError if torch has one already."""
        if dist.is_initialized():
            raise RuntimeError("the groups of the generation before were not closed")
        backend = accelerator().backend if self._on_gpu else "gloo"
        world, group = c10d._world, self.group
        world.pg_map[group] = (backend, self._store)
        world.pg_names[group] = self._name
        world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(backend)))
        world.pg_group_ranks[group] = {rank: rank for rank in range(group.size())}
        tag: Any = f"ptd:{self._name}"
        world.pg_to_tag[group] = tag
        for each in ("", tag):
            world.tags_to_pg.setdefault(each, []).append(group)
        self.forget()
        _register_process_group(
            self._name, group
        )  # again: destroying the previous default group, if there was one, has dropped all names
        c10d._update_default_pg(group)
