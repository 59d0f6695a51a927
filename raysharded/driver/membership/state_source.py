"""Source of the next generation's state, and the workers that it needs: pure decisions."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from raysharded.driver.state.changed import replace
from raysharded.driver.state.driver_config import DriverConfig
from raysharded.driver.state.state import Checkpointed, Departure, Phase, State
from raysharded.ids import WorkerId
from raysharded.layout import Held, Mesh, StateSpec, has_mirrors, mirror_of, possible_degree, recoverable, survives
from raysharded.protocol.messages import FromCheckpoint, FromMemory, FromStart, Source, Stopped, StopReason


def choose_source(
    holdings: Mapping[WorkerId, Stopped],
    alive: frozenset[WorkerId],
    checkpoint: Checkpointed | None,
    *,
    rebuilding: bool = True,
    tensor: int = 1,
) -> Source:
    """The newest complete step that live workers hold, or else the newest checkpoint, or else the start.

    Memory wins a tie with a checkpoint: nothing has to be read. With `rebuilding`, state that parity can restore counts
    as held. Memory is ignored if it is cut so that the tensor parallel degree `tensor` cannot hold it.
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
    """Newest source from these workers or the newest checkpoint, for the wanted tensor parallel degree.

    A state that `candidates.without_failed_devices` returned counts holdings of workers with a failed GPU, too.
    """
    handing_over = failed_devices(state) - state.ready
    return choose_source(state.holdings, workers | handing_over, state.checkpoint, tensor=state.limits.tensor)


def failed_devices(state: State) -> frozenset[WorkerId]:
    """Workers whose GPU failed in their process, which stays: what they hold in host memory can be read."""
    known = state.leaving.keys() & state.holdings.keys()
    return frozenset(worker for worker in known if state.holdings[worker].reason is StopReason.DEVICE)


def sources_of(state: State) -> frozenset[WorkerId]:
    """Workers with a failed GPU that hand over their memory to the generation that is being formed."""
    return failed_devices(state) & holders_of(state.source) if state.phase is Phase.FORMING else frozenset()


def holders_of(source: Source | None) -> frozenset[WorkerId]:
    """Workers that hold a part of a source in memory."""
    if not isinstance(source, FromMemory):
        return frozenset()
    needed = [copy.holders for copy in source.copies]
    needed += [ranks for rebuild in source.rebuilds for ranks in (rebuild.holders, rebuild.keepers)]
    return frozenset(holder for ranks in needed for holder in ranks if holder is not None)


def needs(state: State, workers: Collection[WorkerId]) -> bool:
    """Whether state would be lost with these workers: they alone hold, or may hold, a part of the newest complete step.

    In a generation that trains, each rank holds its shard of every committed step. Another worker holds it too: the
    mirror holder, or the same rank of another replica. With parity it can be computed from the blocks of others.
    """
    others = state.ready.difference(workers)
    found = newest_source(state, others)
    if not state.has_trained:
        return found.step < newest_source(state, state.ready).step
    if isinstance(found, FromMemory):
        return False
    return _has_all_shards(state, state.ready) and not _has_all_shards(state, others)


def _has_all_shards(state: State, workers: frozenset[WorkerId]) -> bool:
    return held_by(state.limits, state.mesh, state.members, workers)


def held_by(limits: DriverConfig, mesh: Mesh, members: Sequence[WorkerId], workers: Collection[WorkerId]) -> bool:
    """Whether these workers would hold the whole state after the members have formed a generation with this mesh."""
    parity = limits.parity
    if parity is not None and parity.protects(mesh):
        parity = replace(parity, tensor=mesh.tensor, apart=mesh.apart)
        return survives(parity, mesh.shards, [rank for rank, worker in enumerate(members) if worker in workers])
    mirrored, held = limits.mirrors and has_mirrors(mesh), set()
    for rank, worker in enumerate(members):
        if worker in workers:
            held |= {rank, mirror_of(rank, mesh.shards, mesh.apart)} if mirrored else {mesh.shard_of(rank)}
    return len(held) == mesh.shards


def is_redundant(state: State) -> bool:
    """Whether each member's shard is also held by another member."""
    return state.replicas > 1 or (state.limits.mirrors and len(state.members) > 1)


def trusted(state: State, stopped: Stopped) -> Stopped:
    """A worker's holdings, without those of generations whose steps were taken back."""
    return replace(stopped, held=tuple(held for held in stopped.held if held.layout_id > state.invalidated_up_to))


def clamp_leave_steps(leaving: Mapping[WorkerId, Departure], step: int) -> Mapping[WorkerId, Departure]:
    """The departures of a run that continues from `step`: later steps were not done at the time of the notice."""
    if all(departure.step <= step for departure in leaving.values()):
        return leaving
    return {worker: replace(departure, step=min(departure.step, step)) for worker, departure in leaving.items()}


def describe_redundancy(limits: DriverConfig, mesh: Mesh) -> str | None:
    """Redundancy of a generation's state, for people and the journal; None for a run without parity."""
    parity = limits.parity
    if parity is None:
        return None
    if parity.protects(mesh):
        return str(parity)
    if mesh.replicas > 1:
        return "replicas"
    return f"mirrors: {parity} needs {parity.width} workers" if has_mirrors(mesh) else "none: one worker alone"


def without_its_source(state: State) -> State | None:
    """The state without the checkpoint of its generation's source; None if no checkpoint is left."""
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
