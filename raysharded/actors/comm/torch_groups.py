"""Connected backends as torch's process groups: as its default group, or beside it.

gloo's backends are connected when made. Torch makes a group with its backend: the backend of this module returns the
one that the calling thread has handed over.

Torch has one default group at a time, made by `init_process_group`. A model is wrapped for a mesh, which needs a group.
Wrapping the next generation's model in the background needs that generation's group before the current one is
destroyed. So the group is made first and known only to the mesh. It becomes the default group later. On an accelerator
every generation does so, as its communicators are connected in a thread that may be abandoned.

`ConnectedGroup` does in two steps what torch 2.13 to 2.15 do in `_new_process_group_helper` and `init_process_group`
(torch/distributed/distributed_c10d.py). Torch has no public API for this.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    _register_process_group,
    _unregister_all_process_groups,
    _unregister_process_group,
)
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
def connect_gloo(
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
        """`device`: cpu, or the accelerator's. `name`: unique among this process's groups."""
        self._name, self._store, self._rank, self._device = c10d.GroupName(name), store, rank, device
        self._on_gpu = accelerator().has(device)
        kind = accelerator().backend_type if self._on_gpu else dist.ProcessGroup.BackendType.GLOO
        self.group = dist.ProcessGroup(store, rank, size)
        self.group._set_default_backend(kind)
        if self._on_gpu and device.index is not None:
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
        self.make_known({rank: rank for rank in range(self.group.size())})
        self.forget()
        _register_process_group(
            self._name, self.group
        )  # again: destroying the previous default group, if there was one, has dropped all names
        c10d._update_default_pg(self.group)

    def make_known(self, ranks: Mapping[int, int]) -> None:
        """Let torch find the group. `ranks`: rank in the default group -> rank in this one."""
        backend = accelerator().backend if self._on_gpu else "gloo"
        world, group = c10d._world, self.group
        world.pg_map[group] = (backend, self._store)
        world.pg_names[group] = self._name
        world.pg_backend_config[group] = str(c10d.BackendConfig(dist.Backend(backend)))
        world.pg_group_ranks[group] = dict(ranks)
        tag: Any = f"ptd:{self._name}"
        world.pg_to_tag[group] = tag
        for each in ("", tag):
            world.tags_to_pg.setdefault(each, []).append(group)


def forget_default() -> None:
    """Let torch have no group any more, without a call to a backend: those that were aborted may not answer."""
    world = c10d._world
    c10d._update_default_pg(None)
    for known in (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
        world.tags_to_pg,
        world.pg_coalesce_state,
    ):
        known.clear()
    _unregister_all_process_groups()
