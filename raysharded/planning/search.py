"""Search over the layouts of a number of workers: those that fit, the recommended one, and the nearest fit. Pure.

Also the times and fits of meshes for the choice of a mesh during a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from raysharded.config import ScalingConfig
from raysharded.display.quantities import count, duration, short, size
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.errors import ConfigError
from raysharded.layout import Mesh
from raysharded.layout.mesh import layouts_of, mesh_of
from raysharded.planning.memory.footprint import Setting, WorkerMemory, first_weights_bytes, worker_memory
from raysharded.planning.memory.nccl_buffers import with_nccl
from raysharded.planning.memory.partial_sums import rounds_per_step
from raysharded.planning.traffic.worker_traffic import OVERLAPPED, Traffic, worker_traffic

CPU_SPEEDS = {"flops": 5e10, "node_bandwidth": 2e9, "network_bandwidth": 1e9}
"""Assumed speeds of CPU workers, in place of the defaults of `Cluster`: those of a GPU of 2023 with its network."""
_MOST_WORKERS = 1 << 17
_SIMILAR = 1.02


@dataclass(frozen=True, kw_only=True, slots=True)
class Cluster:
    """The available resources. Limits in bytes; None: unknown, and not checked."""

    workers: int
    workers_per_node: int = 1
    device_memory: int | None = None
    """Memory of one worker's device."""
    host_memory: int | None = None
    """Host memory of one node."""
    headroom: float = 0.1
    """The share of both that stays free: for the allocator's gaps, CUDA, NCCL and the interpreter."""
    flops: float = 4e14
    """Effective floating-point operations per second of one device."""
    node_bandwidth: float = 2e11
    """Bytes per second that one worker sends to others on its node."""
    network_bandwidth: float = 2.5e10
    """Bytes per second that one worker sends to other nodes."""

    def __post_init__(self) -> None:
        for name in ("workers", "workers_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give a whole number of 1 or more.")
        for name in ("device_memory", "host_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value}: give a size above 0, such as 80GiB.")
        for name in ("flops", "node_bandwidth", "network_bandwidth"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)}: give a number above 0.")
        if not 0 <= self.headroom < 1:
            raise ConfigError(f"headroom={self.headroom}: give a share of the memory from 0 to below 1, such as 0.1.")

    @property
    def device_limit(self) -> int | None:
        return None if self.device_memory is None else int(self.device_memory * (1 - self.headroom))

    @property
    def host_limit(self) -> int | None:
        return None if self.host_memory is None else int(self.host_memory * (1 - self.headroom))


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One layout on one cluster."""

    layout: Mesh
    memory: WorkerMemory
    traffic: Traffic
    node_host_bytes: int
    """Host memory of a node with its full number of workers."""
    rounds: int
    idle: float
    """The share of the workers' rounds without a microbatch."""
    step_s: float
    compute_s: float
    shortages: tuple[str, ...]
    """The resources that are short; empty if the layout fits."""

    @property
    def fits(self) -> bool:
        return not self.shortages


def option(setting: Setting, cluster: Cluster, layout: Mesh, *, num_metrics: int = 0) -> Option:
    """The requirements of one layout, and whether it fits."""
    per_node = _per_node(cluster, layout)
    memory = with_nccl(worker_memory(setting, layout, workers_per_node=per_node), setting, layout, per_node)
    traffic = worker_traffic(setting, layout, workers_per_node=per_node, num_metrics=num_metrics)
    rounds = rounds_per_step(layout, setting.num_microbatches)
    compute_s = rounds * (setting.trace.flops if setting.trace else 0.0) / cluster.flops
    node_host = per_node * memory.host
    return Option(
        layout=layout,
        memory=memory,
        traffic=traffic,
        node_host_bytes=node_host,
        rounds=rounds,
        idle=1 - setting.num_microbatches / (rounds * layout.data.world_size),
        step_s=_step_s(compute_s, traffic, cluster),
        compute_s=compute_s,
        shortages=tuple(_shortages(memory, node_host, cluster)),
    )


def options(setting: Setting, cluster: Cluster, *, num_metrics: int = 0) -> list[Option]:
    """The options of every layout of the cluster's workers with the setting's tensor parallel degree, flat first.
    Raises ConfigError if the number of workers is not a multiple of the degree."""
    layouts = layouts_of(cluster.workers, setting.degree)
    return [option(setting, cluster, layout, num_metrics=num_metrics) for layout in layouts]


def recommended(found: Sequence[Option]) -> tuple[Option, list[str]] | None:
    """The recommended layout and the reasons; None if none fits.

    It has the shortest step. Among layouts within 2 % of that, it is the one with the fewest replicas, which needs
    least memory.
    """
    fitting = [each for each in found if each.fits]
    if not fitting:
        return None
    shortest = min(each.step_s for each in fitting)
    best = min((each for each in fitting if each.step_s <= shortest * _SIMILAR), key=lambda each: each.layout.replicas)
    return best, list(_reasons(best, found))


def nearest(setting: Setting, cluster: Cluster) -> Option | None:
    """The smallest fitting number of workers, flat, if the cluster's does not fit; None if no number does."""
    degree = setting.degree

    def flat(groups: int) -> Mesh:
        return mesh_of(1, groups * degree, degree)

    def fits(layout: Mesh) -> bool:
        per_node = _per_node(cluster, layout)
        memory = with_nccl(worker_memory(setting, layout, workers_per_node=per_node), setting, layout, per_node)
        return not _shortages(memory, per_node * memory.host, cluster)

    few = many = max(1, cluster.workers // degree)
    while not fits(flat(many)):
        few, many = many, many * 2
        if many * degree > _MOST_WORKERS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        if fits(flat(middle)):
            many = middle
        else:
            few = middle
    return option(setting, cluster, flat(many))


def why_nothing_fits(setting: Setting, cluster: Cluster, found: Sequence[Option]) -> str:
    """One sentence: the numbers of the layout that needs least, and the nearest number of workers that fits."""
    least = min(found, key=lambda each: (each.memory.device, each.memory.host))
    lacks = (
        f"no layout of {count(cluster.workers, 'worker')} fits: {least.layout} needs {' and '.join(least.shortages)}"
    )
    other = nearest(setting, cluster)
    if other is not None:
        return f"{lacks}; the nearest that fits is {other.layout}, {count(other.layout.world_size, 'worker')}."
    kind, most = max(least.memory.kinds.items(), key=lambda item: item[1])
    return (
        f"{lacks}; more workers do not help, as {size(most)} of it are {kind}: take a smaller microbatch, "
        "activation_checkpointing=True or smaller units."
    )


def why_not(setting: Setting, cluster: Cluster, wanted: Option, found: Sequence[Option]) -> str:
    """One sentence about a requested layout that does not fit."""
    lacks = f"layout {wanted.layout} needs {' and '.join(wanted.shortages)}"
    fitting = [each.layout for each in found if each.fits]
    if fitting:
        close = min(fitting, key=lambda layout: abs(layout.replicas - wanted.layout.replicas))
        return f"{lacks}; the nearest of as many workers that fits is {close}."
    return f"{lacks}; and {why_nothing_fits(setting, cluster, found)}"


def first_weights_shortage(setting: Setting, cluster: Cluster, layout: Mesh) -> str | None:
    """The shortage at a first start without `Task.init_weights`; None if there is none."""
    limit = cluster.host_limit
    need = _per_node(cluster, layout) * first_weights_bytes(setting, layout)
    if limit is None or need <= limit:
        return None
    return (
        f"the first start builds the whole model on every worker: {size(need)} per node of {size(limit)}; define "
        "Task.init_weights."
    )


def short_duration(seconds: float) -> str:
    """As `duration`, but in milliseconds below one second."""
    return f"{short(seconds * 1000)} ms" if seconds < 1 else duration(seconds)


def _per_node(cluster: Cluster, layout: Mesh) -> int:
    return min(cluster.workers_per_node, layout.world_size)


def _step_s(compute_s: float, traffic: Traffic, cluster: Cluster) -> float:
    """Seconds of a step: overlapped traffic counts only if it takes longer than computation; other traffic is added."""

    def seconds(kinds: Sequence[str]) -> float:
        far = sum(traffic.between[kind] for kind in kinds)
        near = sum(traffic.sent[kind] for kind in kinds) - far
        return max(near / cluster.node_bandwidth, far / cluster.network_bandwidth)

    on_top = [kind for kind in traffic.sent if kind not in OVERLAPPED]
    return max(compute_s, seconds(OVERLAPPED)) + seconds(on_top)


def _shortages(memory: WorkerMemory, node_host: int, cluster: Cluster) -> list[str]:
    found = []
    if cluster.device_limit is not None and memory.device > cluster.device_limit:
        found.append(f"{size(memory.device)} per worker of {size(cluster.device_limit)}")
    if cluster.host_limit is not None and node_host > cluster.host_limit:
        found.append(f"{size(node_host)} of host memory per node of {size(cluster.host_limit)}")
    if found and cluster.headroom:
        found[-1] += f" ({cluster.headroom:.0%} left alone)"
    return found


def _reasons(best: Option, found: Sequence[Option]) -> list[str]:
    reasons = []
    wide = [each for each in found if not each.fits and each.layout.replicas > best.layout.replicas]
    if wide:
        first = min(wide, key=lambda each: each.layout.replicas)
        reasons.append(f"{first.layout} and more replicas do not fit: {first.shortages[0]}")
    others = [each for each in found if each.fits and each is not best]
    if others:
        next_best = min(others, key=lambda each: each.step_s)
        reasons.append(
            f"a step takes at least {short_duration(best.step_s)} by the model, {next_best.layout} "
            f"{short_duration(next_best.step_s)}"
        )
    else:
        reasons.append(f"no other layout of {count(best.layout.world_size, 'worker')} fits")
    bound = "computation" if best.step_s <= best.compute_s * 1.1 else "what is sent"
    reasons.append(f"most of it is {bound}; {size(best.traffic.total_between)} per worker go to other nodes")
    if best.layout.replicas > 1:
        reasons.append("another replica holds every shard, so no mirrors are kept")
    if best.idle > 0:
        reasons.append(f"{best.idle:.0%} of the workers' time is idle: the microbatches do not divide evenly")
    return reasons


def with_plan(grouping: Grouping, setting: Setting, scaling: ScalingConfig) -> Grouping:
    """The grouping with the step's time, and whether it fits, for every mesh of the run's workers."""
    found = [[option(setting, cluster_of(scaling, mesh), mesh) for mesh in row] for row in _meshes(scaling)]
    return replace(
        grouping,
        step_s=tuple(tuple(each.step_s for each in row) for row in found),
        fits=tuple(tuple(each.fits for each in row) for row in found),
    )


def refuse_what_fits_nowhere(setting: Setting, scaling: ScalingConfig, least_shards: int | None) -> None:
    """Raise ConfigError, with the numbers and the nearest fit, if no mesh fits in which the run may begin.

    `least_shards`: the smallest group; None: there is only one group, of all workers.
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
    """The mesh's workers as a cluster, with nodes of the size given as well connected."""
    speeds: dict[str, float] = {} if scaling.use_gpu else CPU_SPEEDS
    per_node = min(scaling.shard_group_size or mesh.world_size, mesh.world_size)
    workers = mesh.world_size
    return Cluster(workers=workers, workers_per_node=per_node, device_memory=scaling.memory_per_worker, **speeds)  # type: ignore[arg-type]


def _meshes(scaling: ScalingConfig) -> list[list[Mesh]]:
    """Meshes by workers of a group; empty for sizes that are not multiples of the tensor parallel degree."""
    most, degree = scaling.max_workers, scaling.tensor_parallel_degree
    return [
        [mesh_of(r, s, degree) for r in range(1, most // s + 1)] if s % degree == 0 else [] for s in range(1, most + 1)
    ]
