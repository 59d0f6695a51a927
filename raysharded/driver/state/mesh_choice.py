"""Which mesh so many workers form: shard groups of the size asked for, of another size, or one flat group. Pure.

With tensor parallelism a shard group is made of whole tensor parallel groups; workers beyond these stand by.

Chosen among all that fit by the predicted time of a step. Both are as the run was planned, where it was. Otherwise what
counts is the number of rounds in which every worker has a microbatch, and whether a round's collectives stay within as
many workers as were said to be well connected.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeVar

from raysharded.layout import Mesh
from raysharded.quantities import duration

_ACROSS = 1.5
"""What a round takes when its collectives leave the well-connected workers, in microbatches' computations: weights and
gradients then take longer than the computation beside which they travel."""
_EXCHANGE = 0.25
"""What replicas take to exchange their sums once a step, in the same unit, for shards of the size asked for."""
T = TypeVar("T")
_SIMILAR = 1.02
"""Planned steps that differ by less are of one length."""

Table = tuple[tuple[float, ...], ...]
"""Of `S` shards and `R` replicas at [S-1][R-1]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """What is known of shard groups, and of tensor parallel groups, beforehand."""

    shards: int | None
    """Workers per shard group, as was asked for: so many are well connected; None: one group of all workers."""
    least_shards: int
    """Over fewer the state does not fit."""
    num_microbatches: int
    """Of a step, over all workers."""
    tensor: int = 1
    """The tensor parallel degree: so many workers compute a microbatch together."""
    least_workers: int = 1
    """The run is to have so many at work, if they are there."""
    step_s: Table = ()
    """As planned, for every mesh of the run's workers; empty: not planned."""
    fits: tuple[tuple[bool, ...], ...] = ()
    """Whether the mesh fits the workers' memory, in the order of `step_s`; empty: not known, and not looked at."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A mesh, and why."""

    mesh: Mesh
    reason: str


def choose_mesh(grouping: Grouping | None, num_workers: int, needed: int = 0) -> Choice:
    """The best mesh for so many workers, the tensor parallel degree or more, with as many groups as they make; some may
    be left over, to stand by, but no more than leave `needed` ones at work, or as many as whole tensor parallel groups
    can have. Flat if no groups were asked for.

    If not even all of them as one group are enough, it is that: they are what there is. A mesh that does not fit the
    memory is taken only if no other does that has the `needed` ones at work.
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
    """The time of a step with groups of a size: in seconds if the run was planned, infinite for a mesh that was not;
    otherwise in computations of a microbatch."""
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
    """Whether so many workers, `needed` of which cannot stand by, would make a faster mesh than this one, one that fits
    where this does not, or one of the tensor parallel degree that is wanted where this is not."""
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
    """The best mesh for so many workers that has the `needed` ones at work; None if there is none."""
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
    """Best first. Of planned steps of one length the one goes first whose groups are most like those asked for."""
    times = {mesh: predicted(grouping, mesh) for mesh in meshes}
    short = min(times.values()) * (_SIMILAR if grouping.step_s else 1.0)

    def order(mesh: Mesh) -> tuple[float, int, int]:
        return max(times[mesh], short), abs(mesh.shards - _wanted_shards(grouping)), -mesh.world_size

    return sorted(meshes, key=order)


def _shortage(grouping: Grouping, chosen: Mesh, wanted: list[Mesh]) -> list[str]:
    """What the workers' memory has to do with the choice."""
    if not fits(grouping, chosen):
        return [f"{chosen} does not fit the workers' memory, and no other mesh does"]
    best = _ranked(grouping, wanted)[0]
    return [] if fits(grouping, best) else [f"{best} does not fit the workers' memory"]


def _reason(grouping: Grouping, ranked: list[Mesh], num_workers: int) -> str:
    """For people: the first two of the ranking, and who stands by."""

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
