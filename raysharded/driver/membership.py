"""Who takes part next, and where the next generation's state comes from: pure decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from raysharded.driver.messages import FromCheckpoint, FromMemory, FromStart, Source, Stopped
from raysharded.driver.state import Checkpointed, Limits, State
from raysharded.ids import WorkerId
from raysharded.layout import (
    Held,
    StateSpec,
    has_mirrors,
    keep_apart,
    keep_together,
    mirror_of,
    order_workers,
    recoverable,
)


def choose_source(
    holdings: Mapping[WorkerId, Stopped], alive: frozenset[WorkerId], checkpoint: Checkpointed | None
) -> Source:
    """The newest complete step that live workers hold, or else the newest checkpoint, or else the start.

    Memory wins a tie with a checkpoint: nothing has to be read.
    """
    held = [item for worker in sorted(alive & holdings.keys()) for item in holdings[worker].held]
    specs = {step: spec for worker in sorted(alive & holdings.keys()) for step, spec in holdings[worker].specs.items()}
    found = _newest_in_memory(held, specs)
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
    the same rank of another replica.
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
    mirrored = state.limits.mirrors and has_mirrors(mesh)
    for rank, worker in enumerate(state.members):
        if worker in workers:
            held |= {rank, mirror_of(rank, mesh.shards)} if mirrored else {mesh.shard_of(rank)}
    return len(held) == mesh.shards


def is_held_twice(state: State) -> bool:
    """Whether each member's shard is held by another one, too."""
    return state.replicas > 1 or (state.limits.mirrors and len(state.members) > 1)


def without_its_source(state: State) -> State | None:
    """The state without the checkpoint that its generation was to be formed from; None if that leaves none."""
    if not isinstance(state.source, FromCheckpoint):
        return None
    known = (*state.older_checkpoints, *([state.checkpoint] if state.checkpoint else []))
    left = tuple(checkpoint for checkpoint in known if checkpoint.prefix != state.source.prefix)
    return replace(state, checkpoint=left[-1], older_checkpoints=left[:-1]) if left else None


def _newest_in_memory(held: Sequence[Held], specs: Mapping[int, StateSpec]) -> FromMemory | None:
    for step in sorted(specs, reverse=True):
        found = recoverable(specs[step], [item for item in held if item.step == step])
        if found is not None:
            return FromMemory(step=step, spec=specs[step], copies=found[1])
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
    of several replicas, the workers of each are on one node as far as that can be. Among such orders it is the one that
    moves the fewest bytes.
    """
    chosen = sorted(workers)[: limits.max_workers]
    if not isinstance(source, FromMemory):
        where = nodes or {}
        if replicas > 1:
            ordered = sorted(chosen, key=lambda worker: (where.get(worker, ""), worker))
            shards = len(ordered) // replicas
            by_shard = [worker for shard in range(shards) for worker in ordered[shard::shards]]
            return keep_together(by_shard, where, replicas)
        return keep_apart(chosen, where)
    holders = {holder for copy in source.copies for holder in copy.holders if holder is not None}
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
