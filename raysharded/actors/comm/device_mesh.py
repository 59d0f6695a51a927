"""The device meshes of one worker in one generation, for torch's FSDP2 and DTensor."""

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
    """The 1-D meshes that contain this worker."""

    data: DeviceMesh
    """The mesh that FSDP2 shards over."""
    alone: Callable[[], DeviceMesh]
    """Makes a mesh of this worker only."""
    tensor: DeviceMesh | None = None
    """The mesh that tensor parallelism cuts over; None without tensor parallelism."""

    @property
    def degree(self) -> int:
        """The degree of tensor parallelism."""
        return 1 if self.tensor is None else self.tensor.size()


def forget(*meshes: DeviceMesh) -> None:
    """Release meshes whose groups have ended, and DTensor's caches in this thread. Any thread.

    DTensor caches every mesh that it has seen, without a limit. A mesh keeps its groups, and with them their threads
    and sockets. Meshes cached by other threads have no groups from now on, and are small.
    """
    ended = {name for mesh in meshes for name in _group_names(mesh)}
    for mesh in meshes:
        getattr(mesh, "_pg_registry", {}).clear()  # not in every torch
    propagator: Any = DTensor._op_dispatcher.sharding_propagator
    propagator.propagate_op_sharding.cache.cache_clear()
    MeshTopoInfo.build_from_mesh.cache_clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)  # not in every torch
    if clear is not None:
        clear()
    _redistribute._gen_transform_infos.cache_clear()
    planners: dict[Any, Any] = getattr(_redistribute, "_planner_cache", {})  # not in every torch
    for key, planner in list(planners.items()):  # shared by all threads: another may use those of a living mesh
        if ended.intersection(_group_names(planner.device_mesh)):
            planners.pop(key, None)


def _group_names(mesh: DeviceMesh) -> list[str]:
    """The group names of a mesh's dimensions, also for a mesh cut from another or joined from several."""
    return list(getattr(mesh, "_dim_group_names", ()))
