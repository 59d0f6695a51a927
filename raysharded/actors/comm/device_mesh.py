"""The device meshes of one worker in one generation, as torch's FSDP2 and DTensor take them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _redistribute
from torch.distributed.tensor._collective_utils import MeshTopoInfo


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceMeshes:
    """1-D meshes that this worker is in."""

    data: DeviceMesh
    """What FSDP2 shards over."""
    alone: Callable[[], DeviceMesh]
    """Makes a mesh of this worker only."""
    tensor: DeviceMesh | None = None
    """What tensor parallelism cuts over; None without."""

    @property
    def degree(self) -> int:
        """Of tensor parallelism."""
        return 1 if self.tensor is None else self.tensor.size()


def forget(*meshes: DeviceMesh) -> None:
    """Let go of meshes whose groups have ended, and of what DTensor remembers in this thread. Any thread.

    DTensor remembers every mesh that it saw, without end, and a mesh keeps its groups, whose threads and sockets end
    only with them. What other threads remember are from now on meshes without groups, which are small.
    """
    ended = {name for mesh in meshes for name in _group_names(mesh)}
    for mesh in meshes:
        getattr(mesh, "_pg_registry", {}).clear()  # not in every torch
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # nor this
    if clear is not None:
        clear()
    _redistribute._gen_transform_infos.cache_clear()
    planners: dict[Any, Any] = getattr(_redistribute, "_planner_cache", {})  # nor this
    for key, planner in list(planners.items()):  # of all threads: another may be using those of a living mesh
        if ended.intersection(_group_names(planner.device_mesh)):
            planners.pop(key, None)


def _group_names(mesh: DeviceMesh) -> list[str]:
    """The names of the groups of its dimensions, also of a mesh that is cut from another, or joined of several."""
    return list(getattr(mesh, "_dim_group_names", ()))
