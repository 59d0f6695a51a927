"""Choice of the mesh for a number of workers: shard groups of the requested size, of another size, or one flat group.

With tensor parallelism a shard group consists of whole tensor parallel groups; workers beyond these stand by. Pure.

Among all meshes that fit, the one with the shortest predicted step time is chosen. Fit and time are the plan's, if the
run was planned. Otherwise two things count. One is the number of rounds in which every worker has a microbatch. The
other is whether a round's collectives stay within the number of workers that were declared well connected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from raysharded.display.quantities import duration
from raysharded.layout import Mesh

_ACROSS = 1.5
"""Time of a round whose collectives leave the well-connected workers, in computations of a microbatch.

Weights and gradients then take longer than the computation that overlaps them.
"""
_EXCHANGE = 0.25
"""Time in which replicas exchange their sums once a step, in the same unit, for shards of the requested size."""
T = TypeVar("T")
_SIMILAR = 1.02
"""Planned steps whose times differ by less than this factor count as equal."""

Table = tuple[tuple[float, ...], ...]
"""Table whose entry [S-1][R-1] is for `S` shards and `R` replicas."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """Facts about shard groups and tensor parallel groups that are known beforehand."""

    shards: int | None
    """Requested workers per shard group, which are well connected; None: one group of all workers."""
    least_shards: int
    """Smallest number of shards over which the state fits."""
    num_microbatches: int
    """Microbatches of a step, over all workers."""
    tensor: int = 1
    """The tensor parallel degree: this many workers compute a microbatch together."""
    least_workers: int = 1
    """Smallest number of workers that should be at work, if available."""
    step_s: Table = ()
    """Planned step times, for every mesh of the run's workers; empty: not planned."""
    fits: tuple[tuple[bool, ...], ...] = ()
    """Whether each mesh fits the workers' memory, in the order of `step_s`; empty: unknown, and not checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A mesh, and the reason for it."""

    mesh: Mesh
    reason: str


def choose_mesh(grouping: Grouping | None, num_workers: int, needed: int = 0) -> Choice:
    """The best mesh for `num_workers`, at least the tensor parallel degree, with as many groups as they make.

    Some workers may stand by; but at least `needed` ones are at work, or as many as whole tensor parallel groups can
    have. The mesh is flat if no groups were requested.

    If even one group of all workers is too small, that group is the mesh. A mesh that does not fit the memory is chosen
    only if no fitting mesh has the `needed` ones at work.
    """
    if grouping is None:
        return Choice(mesh=Mesh(shards=num_workers), reason="")
    tensor = grouping.tensor
    most = num_workers // tensor * tensor
    if grouping.shards is None:
        return Choice(mesh=Mesh(shards=most, tensor=tensor), reason=_reason_of_flat(grouping, most, num_workers))
    least = min(-(-grouping.least_shards // tensor) * tensor, most)
    meshes = [
        Mesh(replicas=num_workers // shards, shards=shards, tensor=tensor) for shards in range(least, most + 1, tensor)
    ]
    at_work = min(max(grouping.least_workers, needed), most)
    wanted = [mesh for mesh in meshes if mesh.world_size >= at_work]
    fitting = [mesh for mesh in wanted if fits(grouping, mesh)]
    ranked = _ranked(grouping, fitting or wanted)
    reason = _reason(grouping, ranked, num_workers)
    return Choice(mesh=ranked[0], reason="; ".join([reason, *_shortage(grouping, ranked[0], wanted)]))


def fits(grouping: Grouping, mesh: Mesh) -> bool:
    """Whether the mesh fits the workers' memory, as far as is known."""
    found = _at(grouping.fits, mesh)
    return True if found is None else found


def predicted(grouping: Grouping, mesh: Mesh) -> float:
    """Time of a step with this mesh: in seconds if the run was planned, otherwise in computations of a microbatch.

    For a planned run it is infinite for a mesh that was not planned.
    """
    if grouping.step_s:
        step_s = _at(grouping.step_s, mesh)
        return math.inf if step_s is None else step_s
    block = -(-grouping.num_microbatches // mesh.replicas)
    rounds = -(-block // mesh.data.shards)
    wanted = _wanted_shards(grouping)
    inside = mesh.shards <= wanted
    exchange = _EXCHANGE * wanted / mesh.shards if mesh.replicas > 1 else 0.0
    return rounds * (1.0 if inside else _ACROSS) + exchange


def is_better(grouping: Grouping | None, num_workers: int, mesh: Mesh, needed: int = 0) -> bool:
    """Whether this number of workers, of which `needed` cannot stand by, would make a better mesh than the current one.

    A better mesh is faster, fits where the current one does not, or has the wanted tensor parallel degree where the
    current one does not.
    """
    if grouping is None:
        return True
    other = possible_mesh(grouping, num_workers, needed)
    if other is None:
        return False
    if other.tensor != mesh.tensor:
        return True
    if grouping.shards is None:
        return other.world_size > mesh.world_size
    return (not fits(grouping, other), predicted(grouping, other)) < (
        not fits(grouping, mesh),
        predicted(grouping, mesh),
    )


def possible_mesh(grouping: Grouping | None, num_workers: int, needed: int = 0) -> Mesh | None:
    """The best mesh for this number of workers with the `needed` ones at work; None if there is none."""
    if num_workers < (grouping.tensor if grouping else 1):
        return None
    mesh = choose_mesh(grouping, num_workers, needed).mesh
    return mesh if mesh.world_size >= min(needed, num_workers) else None


def _wanted_shards(grouping: Grouping) -> int:
    assert grouping.shards is not None
    return grouping.shards


def _at(table: tuple[tuple[T, ...], ...], mesh: Mesh) -> T | None:
    row = table[mesh.shards - 1] if mesh.shards <= len(table) else ()
    return row[mesh.replicas - 1] if mesh.replicas <= len(row) else None


def _ranked(grouping: Grouping, meshes: list[Mesh]) -> list[Mesh]:
    """Meshes, best first. Among equal planned times, group sizes closest to the requested size come first."""
    times = {mesh: predicted(grouping, mesh) for mesh in meshes}
    short = min(times.values()) * (_SIMILAR if grouping.step_s else 1.0)

    def order(mesh: Mesh) -> tuple[float, int, int]:
        return max(times[mesh], short), abs(mesh.shards - _wanted_shards(grouping)), -mesh.world_size

    return sorted(meshes, key=order)


def _shortage(grouping: Grouping, chosen: Mesh, wanted: list[Mesh]) -> list[str]:
    """The effect of the workers' memory on the choice."""
    if not fits(grouping, chosen):
        return [f"{chosen} does not fit the workers' memory, and no other mesh does"]
    best = _ranked(grouping, wanted)[0]
    return [] if fits(grouping, best) else [f"{best} does not fit the workers' memory"]


def _reason(grouping: Grouping, ranked: list[Mesh], num_workers: int) -> str:
    """Reason as text: the first two meshes of the ranking, and the number of workers that stand by."""

    def about(mesh: Mesh) -> str:
        time = predicted(grouping, mesh)
        length = f"{time:.2g} s" if 0 < time < 1 else duration(time)
        takes = f"{length} a step, as planned" if grouping.step_s else f"{time:.2g} microbatches a step"
        return f"{mesh} ({_meaning(mesh)}) takes about {takes}"

    texts = [about(ranked[0]), *([f"the next best, {about(ranked[1])}"] if len(ranked) > 1 else [])]
    texts += _idle(ranked[0].world_size, num_workers)
    if ranked[0].shards != grouping.shards:
        texts.append(f"groups of {grouping.shards} were asked for")
    return "; ".join(texts)


def _reason_of_flat(grouping: Grouping, at_work: int, num_workers: int) -> str:
    if grouping.tensor == 1:
        return ""
    return "; ".join([f"{grouping.tensor} workers compute a microbatch together", *_idle(at_work, num_workers)])


def _idle(at_work: int, num_workers: int) -> list[str]:
    idle = num_workers - at_work
    return [f"{idle} of {num_workers} workers stand{'s' if idle == 1 else ''} by"] if idle else []


def _meaning(mesh: Mesh) -> str:
    return "replicas x shards" if mesh.tensor == 1 else "replicas x data shards x tensor parallel degree"
