"""gloo groups that are connected as soon as they are made, and how torch takes one for a group of its own, or for its
default group.

`init_process_group` makes the default group and there can be one at a time; a model is wrapped for a mesh, which needs
a group. So that the model of the next generation can be wrapped beside the training of this one, its group is made
first, known to nobody but the mesh, and becomes the default one when that of the generation before has been destroyed.

`ConnectedGroup` does in two steps what torch 2.13 to 2.15 do in `_new_process_group_helper` and `init_process_group`
(torch/distributed/distributed_c10d.py); torch has no public way.
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

from raysharded.actors.comm.abortable_wait import waits_for_peers

BACKEND = "raysharded_gloo"
"""Of torch's groups that are to be the one that was handed over."""


class _HandedOver(threading.local):
    group: Any = None

    def __call__(self, store: object, rank: int, size: int, timeout: datetime.timedelta) -> Any:
        return self.group


_handed_over = _HandedOver()
dist.Backend.register_backend(BACKEND, _handed_over, devices=["cpu"])


def hand_over(group: Any) -> None:
    """Let the next groups that torch makes in this thread be this one; None: let go of it."""
    _handed_over.group = group


@waits_for_peers
def connect(
    store: Any, rank: int, size: int, address: str, connect_timeout_s: float, timeout: datetime.timedelta
) -> Any:
    """A gloo group, connected to all members; its time-out is another while it connects. `address`: this machine's."""
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # missing in torch's stubs
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    options._timeout = datetime.timedelta(seconds=connect_timeout_s)
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group._set_default_timeout(timeout)
    return group


class ConnectedGroup:
    """A group of torch's around a connected backend of this worker's shard group."""

    def __init__(self, backend: Any, name: str, store: Any, rank: int, size: int, device: torch.device) -> None:
        """`device`: cpu, or the one GPU that NCCL was connected on. `name`: new for every group of this process."""
        self._name, self._store, self._rank, self._device = c10d.GroupName(name), store, rank, device
        self._on_gpu = device.type == "cuda"
        kind = dist.ProcessGroup.BackendType.NCCL if self._on_gpu else dist.ProcessGroup.BackendType.GLOO
        self.group = dist.ProcessGroup(store, rank, size)
        self.group._set_default_backend(kind)
        if self._on_gpu:
            self.group.bound_device_id = device
        self.group._register_backend(torch.device(device.type), kind, backend)
        self.group._set_group_name(self._name)
        self.group._set_group_desc("default_pg")
        _register_process_group(self._name, self.group)  # meshes find it by its name

    def mesh(self, name: str) -> DeviceMesh:
        """The mesh of all its members, whose dimension has this name; before it is the default group, too."""
        ranks, names = torch.arange(self.group.size(), dtype=torch.int), (name,)
        mesh = DeviceMesh(self._device.type, ranks, mesh_dim_names=names, _init_backend=False, _rank=self._rank)
        mesh._dim_group_names = [self._name]
        mesh._pg_registry[self._name] = self.group
        return mesh

    def forget(self) -> None:
        """It will never be the default group."""
        with contextlib.suppress(RuntimeError):
            _unregister_process_group(self._name)

    def make_default(self) -> None:
        """From now on it is torch's default group; there must be none."""
        if dist.is_initialized():
            raise RuntimeError("the groups of the generation before were not closed")
        backend = "nccl" if self._on_gpu else "gloo"
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
        )  # again: all names go with the default group before, if there was one
        c10d._update_default_pg(group)
