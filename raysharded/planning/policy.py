"""What the choice of a mesh during a run knows of the plan: which meshes fit, and how long a step takes. Pure."""

from __future__ import annotations

from dataclasses import replace

from raysharded.config import ScalingConfig
from raysharded.driver.meshes import Grouping
from raysharded.errors import ConfigError
from raysharded.layout import Mesh
from raysharded.obs.units import size
from raysharded.planning.fitting import CPU_SPEEDS, Cluster, option, why_nothing_fits
from raysharded.planning.layouts import mesh_of
from raysharded.planning.memory import Setting


def with_plan(grouping: Grouping, setting: Setting, scaling: ScalingConfig) -> Grouping:
    """The same, with a step's time and whether it fits for every mesh of the run's workers."""
    found = [[option(setting, cluster_of(scaling, mesh), mesh) for mesh in row] for row in _meshes(scaling)]
    return replace(
        grouping,
        step_s=tuple(tuple(each.step_s for each in row) for row in found),
        fits=tuple(tuple(each.fits for each in row) for row in found),
    )


def refuse_what_fits_nowhere(setting: Setting, scaling: ScalingConfig, least_shards: int | None) -> None:
    """Raise ConfigError, with the numbers and the nearest that fits, if no mesh that the run may begin in does.

    `least_shards`: of a group; None: there are no groups, but one of all workers.
    """
    degree = scaling.tensor_parallel_degree
    few, most = (workers // degree * degree for workers in (scaling.min_workers, scaling.max_workers))
    allowed = [mesh_of(1, workers, degree) for workers in range(few, most + 1, degree)]
    if least_shards is not None:
        allowed += [mesh for row in _meshes(scaling)[least_shards - 1 :] for mesh in row if mesh.world_size >= few]
    found = [option(setting, cluster_of(scaling, mesh), mesh) for mesh in allowed]
    if not any(each.fits for each in found):
        reason = why_nothing_fits(setting, cluster_of(scaling, mesh_of(1, most, degree)), found)
        memory = size(scaling.memory_per_worker or 0)
        raise ConfigError(f"ScalingConfig(memory_per_worker={scaling.memory_per_worker}), {memory}: {reason}")


def cluster_of(scaling: ScalingConfig, mesh: Mesh) -> Cluster:
    """The mesh's workers, where as many are on a node as were said to be well connected."""
    speeds: dict[str, float] = {} if scaling.use_gpu else CPU_SPEEDS
    per_node = min(scaling.shard_group_size or mesh.world_size, mesh.world_size)
    workers = mesh.world_size
    return Cluster(workers=workers, workers_per_node=per_node, device_memory=scaling.memory_per_worker, **speeds)  # type: ignore[arg-type]


def _meshes(scaling: ScalingConfig) -> list[list[Mesh]]:
    """By workers of a group; none for those that are no whole tensor parallel groups."""
    most, degree = scaling.max_workers, scaling.tensor_parallel_degree
    return [
        [mesh_of(r, s, degree) for r in range(1, most // s + 1)] if s % degree == 0 else [] for s in range(1, most + 1)
    ]
