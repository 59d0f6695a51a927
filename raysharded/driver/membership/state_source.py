"""Where the next generation's state comes from, and who is needed for it: pure decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.state import Checkpointed, Departure, State
from raysharded.ids import WorkerId
from raysharded.layout import Held, Mesh, StateSpec, has_mirrors, mirror_of, possible_degree, recoverable, survives
from raysharded.protocol.messages import FromCheckpoint, FromMemory, FromStart, Source, Stopped


def choose_source(
    holdings: Mapping[WorkerId, Stopped],
    alive: frozenset[WorkerId],
    checkpoint: Checkpointed | None,
    *,
    rebuilding: bool = True,
    tensor: int = 1,
) -> Source:
    """The newest complete step that live workers hold, or else the newest checkpoint, or else the start.

    Memory wins a tie with a checkpoint: nothing has to be read. With `rebuilding` what parity can give back is held.
    Memory counts for nothing if it is cut so that it cannot be held with the tensor parallel degree `tensor`.
    """
    held = [item for worker in sorted(alive & holdings.keys()) for item in holdings[worker].held]
    specs = {step: spec for worker in sorted(alive & holdings.keys()) for step, spec in holdings[worker].specs.items()}
    possible = {step: spec for step, spec in specs.items() if possible_degree(spec, tensor) is None}
    found = _newest_in_memory(held, possible, rebuilding)
    if found is not None and (checkpoint is None or found.step >= checkpoint.step):
        return found
    if checkpoint is not None:
        return FromCheckpoint(
            step=checkpoint.step, prefix=checkpoint.prefix, digest=checkpoint.digest, url=checkpoint.url
        )
    return FromStart()


def newest_source(state: State, workers: frozenset[WorkerId]) -> Source:
    """The newest that these workers, or the newest checkpoint, have for the tensor parallel degree that is wanted."""
    return choose_source(state.holdings, workers, state.checkpoint, tensor=state.limits.tensor)


def needs(state: State, workers: Collection[WorkerId]) -> bool:
    """Whether something that is there now would be lost with these workers: they hold, or may hold, a part of the
    newest complete step that nobody else has.

    Of a generation that trains, every step that was committed is held by each rank, and by the keeper of its mirror or
    the same rank of another replica, or can be computed from the parity blocks of others.
    """
    others = state.ready.difference(workers)
    found = newest_source(state, others)
    if not state.has_trained:
        return found.step < newest_source(state, state.ready).step
    if isinstance(found, FromMemory):
        return False
    return _has_all_shards(state, state.ready) and not _has_all_shards(state, others)


def _has_all_shards(state: State, workers: frozenset[WorkerId]) -> bool:
    mesh, held = state.mesh, set()
    parity = state.limits.parity
    if parity is not None and parity.protects(mesh):
        parity = replace(parity, tensor=mesh.tensor)
        return survives(parity, mesh.shards, [rank for rank, worker in enumerate(state.members) if worker in workers])
    mirrored = state.limits.mirrors and has_mirrors(mesh)
    for rank, worker in enumerate(state.members):
        if worker in workers:
            held |= {rank, mirror_of(rank, mesh.shards, mesh.apart)} if mirrored else {mesh.shard_of(rank)}
    return len(held) == mesh.shards


def is_redundant(state: State) -> bool:
    """Whether each member's shard is held by another one, too."""
    return state.replicas > 1 or (state.limits.mirrors and len(state.members) > 1)


def trusted(state: State, stopped: Stopped) -> Stopped:
    """What a worker holds, without what a generation left behind whose steps were taken back."""
    return replace(stopped, held=tuple(held for held in stopped.held if held.layout_id > state.invalidated_up_to))


def clamp_leave_steps(leaving: Mapping[WorkerId, Departure], step: int) -> Mapping[WorkerId, Departure]:
    """Who must leave, in a run that goes on from `step`: what comes after it was not done when they were told."""
    if all(departure.step <= step for departure in leaving.values()):
        return leaving
    return {worker: replace(departure, step=min(departure.step, step)) for worker, departure in leaving.items()}


def describe_redundancy(limits: DriverConfig, mesh: Mesh) -> str | None:
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


def describe_source(source: Source) -> str:
    """For people and the journal: memory, checkpoint or start."""
    match source:
        case FromMemory():
            return "memory"
        case FromCheckpoint():
            return "checkpoint"
        case FromStart():
            return "start"
