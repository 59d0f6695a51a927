"""Who takes part next, and where the next generation's state comes from: pure decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from raysharded.driver.messages import FromCheckpoint, FromMemory, FromStart, Source, Stopped
from raysharded.driver.state import Checkpointed, Limits, State
from raysharded.ids import WorkerId
from raysharded.layout import (
    Held,
    Mesh,
    StateSpec,
    has_mirrors,
    keep_apart,
    keep_together,
    mirror_of,
    order_workers,
    recoverable,
    spread_out,
    survives,
)


def choose_source(
    holdings: Mapping[WorkerId, Stopped],
    alive: frozenset[WorkerId],
    checkpoint: Checkpointed | None,
    *,
    rebuilding: bool = True,
) -> Source:
    """The newest complete step that live workers hold, or else the newest checkpoint, or else the start.

    Memory wins a tie with a checkpoint: nothing has to be read. With `rebuilding` what parity can give back is held.
    """
    held = [item for worker in sorted(alive & holdings.keys()) for item in holdings[worker].held]
    specs = {step: spec for worker in sorted(alive & holdings.keys()) for step, spec in holdings[worker].specs.items()}
    found = _newest_in_memory(held, specs, rebuilding)
    if found is not None and (checkpoint is None or found.step >= checkpoint.step):
        return found
    if checkpoint is not None:
        return FromCheckpoint(
            step=checkpoint.step, prefix=checkpoint.prefix, digest=checkpoint.digest, url=checkpoint.url
        )
    return FromStart()


def needs(state: State, workers: Collection[WorkerId]) -> bool:
    """Whether something that is there now would be lost with these workers: they hold, or may hold, a part of the
    newest complete step that nobody else has.

    Of a generation that trains, every step that was committed is held by each rank, and by the keeper of its mirror or
    the same rank of another replica, or can be computed from the parity blocks of others.
    """
    others = state.ready.difference(workers)
    found = choose_source(state.holdings, others, state.checkpoint)
    if not state.has_trained:
        return found.step < choose_source(state.holdings, state.ready, state.checkpoint).step
    if isinstance(found, FromMemory):
        return False
    return _has_all_shards(state, state.ready) and not _has_all_shards(state, others)


def _has_all_shards(state: State, workers: frozenset[WorkerId]) -> bool:
    mesh, held = state.mesh, set()
    parity = state.limits.parity
    if parity is not None and parity.protects(mesh):
        return survives(parity, mesh.shards, [rank for rank, worker in enumerate(state.members) if worker in workers])
    mirrored = state.limits.mirrors and has_mirrors(mesh)
    for rank, worker in enumerate(state.members):
        if worker in workers:
            held |= {rank, mirror_of(rank, mesh.shards)} if mirrored else {mesh.shard_of(rank)}
    return len(held) == mesh.shards


def is_held_twice(state: State) -> bool:
    """Whether each member's shard is held by another one, too."""
    return state.replicas > 1 or (state.limits.mirrors and len(state.members) > 1)


def describe_redundancy(limits: Limits, mesh: Mesh) -> str | None:
    """Of a run with parity, for people and the journal: how the state of a generation is held more than once."""
    parity = limits.parity
    if parity is None:
        return None
    if parity.protects(mesh):
        return str(parity)
    if mesh.replicas > 1:
        return "replicas"
    return f"mirrors: {parity} needs {parity.width} workers" if has_mirrors(mesh) else "none: one worker alone"


def without_its_source(state: State) -> State | None:
    """The state without the checkpoint that its generation was to be formed from; None if that leaves none."""
    if not isinstance(state.source, FromCheckpoint):
        return None
    known = (*state.older_checkpoints, *([state.checkpoint] if state.checkpoint else []))
    left = tuple(checkpoint for checkpoint in known if checkpoint.prefix != state.source.prefix)
    return replace(state, checkpoint=left[-1], older_checkpoints=left[:-1]) if left else None


def _newest_in_memory(held: Sequence[Held], specs: Mapping[int, StateSpec], rebuilding: bool) -> FromMemory | None:
    for step in sorted(specs, reverse=True):
        found = recoverable(specs[step], [item for item in held if item.step == step], rebuilding=rebuilding)
        if found is not None:
            return FromMemory(step=step, spec=specs[step], copies=found.copies, rebuilds=found.rebuilds)
    return None


def order_members(
    source: Source,
    workers: frozenset[WorkerId],
    limits: Limits,
    nodes: Mapping[WorkerId, str] | None = None,
    replicas: int = 1,
) -> tuple[WorkerId, ...]:
    """The members of the next generation, by rank: at most the maximum.

    Neighbours, who keep each other's mirrors, are on different nodes (`nodes`: worker -> node id) wherever that can be;
    with parity those who share a stripe are on as many nodes as can be; of several replicas, the workers of each are on
    one node as far as that can be. Among such orders it is the one that moves the fewest bytes, or with parity near it.
    """
    count, parity = min(len(workers), limits.max_workers), limits.parity
    if parity is None or not parity.protects(Mesh(replicas=replicas, shards=count // replicas)):
        return _ordered(source, workers, limits, nodes, replicas)
    anywhere = _ordered(source, workers, replace(limits, mirrors=False), None, replicas)
    return spread_out(anywhere, nodes or {}, parity.width)


def _ordered(
    source: Source,
    workers: frozenset[WorkerId],
    limits: Limits,
    nodes: Mapping[WorkerId, str] | None,
    replicas: int,
) -> tuple[WorkerId, ...]:
    chosen = sorted(workers)[: limits.max_workers]
    if not isinstance(source, FromMemory):
        where = nodes or {}
        if replicas > 1:
            ordered = sorted(chosen, key=lambda worker: (where.get(worker, ""), worker))
            shards = len(ordered) // replicas
            by_shard = [worker for shard in range(shards) for worker in ordered[shard::shards]]
            return keep_together(by_shard, where, replicas)
        return keep_apart(chosen, where)
    needed = [copy.holders for copy in source.copies]
    needed += [ranks for rebuild in source.rebuilds for ranks in (rebuild.holders, rebuild.keepers)]
    holders = {holder for ranks in needed for holder in ranks if holder is not None}
    if len(workers) > limits.max_workers:  # who holds state goes before who does not
        chosen = sorted(workers, key=lambda worker: (worker not in holders, worker))[: limits.max_workers]
    survivors = [worker for worker in chosen if worker in holders]
    joiners = [worker for worker in chosen if worker not in holders]
    return order_workers(source.spec, source.copies, survivors, joiners, limits.mirrors, nodes, replicas)


def describe_source(source: Source) -> str:
    """For people and the journal: memory, checkpoint or start."""
    match source:
        case FromMemory():
            return "memory"
        case FromCheckpoint():
            return "checkpoint"
        case FromStart():
            return "start"
