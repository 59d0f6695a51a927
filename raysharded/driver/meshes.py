"""Which mesh so many workers form: shard groups of the size asked for, of another size, or one flat group. Pure.

Chosen among all that fit by the predicted time of a step. What counts is the number of rounds in which every worker has
a microbatch, and whether a round's collectives stay within as many workers as were said to be well connected.
"""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.layout import Mesh

_ACROSS = 1.5
"""What a round takes when its collectives leave the well-connected workers, in microbatches' computations: weights and
gradients then take longer than the computation beside which they travel."""
_EXCHANGE = 0.25
"""What replicas take to exchange their sums once a step, in the same unit, for shards of the size asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grouping:
    """What is known of shard groups beforehand."""

    shards: int
    """Workers per group, as was asked for: so many are well connected."""
    least_shards: int
    """Over fewer the state does not fit."""
    num_microbatches: int
    """Of a step, over all workers."""
    least_workers: int = 1
    """The run is to have so many at work, if they are there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """A mesh, and why."""

    mesh: Mesh
    reason: str


def choose_mesh(grouping: Grouping | None, num_workers: int, needed: int = 0) -> Choice:
    """The best mesh for so many workers, 1 or more, with as many groups as they make; some may be left over, to stand
    by, but no more than leave `needed` ones at work. Flat if no groups were asked for.

    If not even all of them as one group are enough, it is that: they are what there is.
    """
    if grouping is None:
        return Choice(mesh=Mesh(shards=num_workers), reason="")
    least = min(grouping.least_shards, num_workers)
    meshes = [Mesh(replicas=num_workers // shards, shards=shards) for shards in range(least, num_workers + 1)]
    at_work = min(max(grouping.least_workers, needed), num_workers)
    ranked = sorted(
        (mesh for mesh in meshes if mesh.world_size >= at_work),
        key=lambda mesh: (predicted(grouping, mesh), abs(mesh.shards - grouping.shards), -mesh.world_size),
    )
    return Choice(mesh=ranked[0], reason=_reason(grouping, ranked, num_workers))


def predicted(grouping: Grouping, mesh: Mesh) -> float:
    """The time of a step, in computations of a microbatch."""
    block = -(-grouping.num_microbatches // mesh.replicas)
    rounds = -(-block // mesh.shards)
    inside = mesh.shards <= grouping.shards
    exchange = _EXCHANGE * grouping.shards / mesh.shards if mesh.replicas > 1 else 0.0
    return rounds * (1.0 if inside else _ACROSS) + exchange


def is_better(grouping: Grouping | None, num_workers: int, mesh: Mesh, needed: int = 0) -> bool:
    """Whether so many workers, `needed` of which cannot stand by, would make a faster mesh than this one."""
    if grouping is None:
        return True
    return predicted(grouping, choose_mesh(grouping, num_workers, needed).mesh) < predicted(grouping, mesh)


def _reason(grouping: Grouping, ranked: list[Mesh], num_workers: int) -> str:
    """For people: the first two of the ranking, and who stands by."""

    def about(mesh: Mesh) -> str:
        return f"{mesh} (replicas x shards) takes about {predicted(grouping, mesh):.2g} microbatches a step"

    texts = [about(ranked[0]), *([f"the next best, {about(ranked[1])}"] if len(ranked) > 1 else [])]
    idle = num_workers - ranked[0].world_size
    if idle:
        texts.append(f"{idle} of {num_workers} workers stand{'s' if idle == 1 else ''} by")
    if ranked[0].shards != grouping.shards:
        texts.append(f"groups of {grouping.shards} were asked for")
    return "; ".join(texts)
