"""Preparation of a planned change: the next generation's members connect and build while this one trains.

Its members and their order are known before the boundary is requested: they follow from the state as if all members
stopped now. If the outcome differs, or a member cannot prepare in time, the generation is formed as after a loss. A
preparation saves time; nothing depends on it. Handlers of the machine.
"""

from __future__ import annotations

from raysharded.driver.membership import reachable
from raysharded.driver.membership.generation_plan import plan_generation
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, Outcome, Prepare, Record, RequestBoundary
from raysharded.driver.state.state import Preparation, State
from raysharded.ids import GenerationId, WorkerId
from raysharded.layout import Held, has_mirrors, mirror_of
from raysharded.protocol.messages import FromMemory, FromStart, GenerationSpec, Prepared, Stopped, StopReason

_SHARE_OF_NOTICE = 0.25
"""Share of a leaving member's remaining time that may be spent on preparing."""


def prepare_then_request_boundary(state: State, at: float) -> Outcome:
    """Stop this generation after a step, as soon as the next one is prepared, or cannot be."""
    made, by = state.preparation, _deadline(state, at)
    if made is None or not _is_of_now(state, made):
        begun = _begin(state, at, by)
        if begun is not None:
            return begun
    elif made.awaited and not made.failed and at < by:
        return replace(state, preparation=replace(made, by=by)), []
    commands: list[Command] = [RequestBoundary(worker=state.members[0], generation=state.generation)]
    if made is not None and (made.awaited or made.failed):
        fields = {"step": state.step, "members": list(made.members), "reason": _why_failed(state, made, at)}
        commands.insert(0, Record(kind="preparation_failed", fields=fields))
    return replace(state, boundary_requested=True), commands


def _why_failed(state: State, made: Preparation, at: float) -> str:
    """Reason of the failure, as text for people."""
    if made.failed:
        return made.failed
    if not _is_of_now(state, made):
        return "other workers, or another mesh, are wanted by now"
    return f"no answer of {', '.join(map(str, sorted(made.awaited)))} within {at - made.since:.1f} s"


def on_prepared(state: State, worker: WorkerId, prepared: Prepared) -> State:
    """Handle a member's answer: it prepared the next generation, or could not."""
    made = state.preparation
    if made is None or prepared.prefix != made.prefix or worker not in made.awaited:
        return state
    if prepared.error:
        return replace(state, preparation=replace(made, failed=f"worker {worker}: {prepared.error}"))
    return replace(state, preparation=replace(made, awaited=made.awaited - {worker}))


def _begin(state: State, at: float, by: float) -> Outcome | None:
    """Start a preparation; None if there is nothing to prepare, or no time."""
    if by <= at or state.spec is None or state.mesh.tensor > 1 or (state.leaving and _has_parity(state)):
        return None
    expected = plan_generation(replace(as_if_stopped(state), preparation=None, ready=reachable.prepared_from(state)))
    mesh = expected.mesh
    if not isinstance(expected.source, FromMemory) or expected.source.rebuilds or mesh.tensor > 1:
        return None
    host, port, keys = state.rendezvous
    generation = GenerationId(state.generation + 1)
    count = state.num_preparations + 1
    made = Preparation(
        members=expected.members,
        mesh=mesh,
        prefix=f"{keys}/g{generation}/prepared{count}",
        since=at if state.preparation is None else state.preparation.since,
        by=by,
        ready=state.ready,
        staying=state.staying,
        grouping=state.limits.grouping,
        awaited=frozenset(expected.members),
    )
    spec = GenerationSpec(
        generation=generation,
        members=made.members,
        source=FromStart(),  # the source of the state is known at the boundary
        host=host,
        port=port,
        prefix=made.prefix,
        driver=state.driver,
        decisions=state.decisions,
        attempt=count,
        replicas=mesh.replicas,
        apart=mesh.apart,
        numerics=state.numerics,
        build_seed=state.build_seed,
        blocks=state.blocks,
    )
    return replace(state, preparation=made, num_preparations=count), [Prepare(spec=spec)]


def _deadline(state: State, at: float) -> float:
    """Deadline of the preparation.

    A preparation that replaces another gets no more time than that one, and less if a member must leave sooner.
    """
    left = [state.leaving[worker].by - at for worker in state.members if worker in state.leaving]
    by = at + min([state.limits.prepare_within_s, *(_SHARE_OF_NOTICE * seconds for seconds in left)])
    return by if state.preparation is None else min(by, state.preparation.by)


def _is_of_now(state: State, made: Preparation) -> bool:
    """Whether the workers, and what is wanted of them, are still as when the preparation began."""
    return (made.ready, made.staying, made.grouping) == (state.ready, state.staying, state.limits.grouping)


def _has_parity(state: State) -> bool:
    parity = state.limits.parity
    return parity is not None and parity.protects(state.mesh)


def as_if_stopped(state: State) -> State:
    """The state after a boundary now: every member holds its shard and, with mirrors, the mirror of another's."""
    mesh, spec = state.mesh, state.spec
    mirrored = state.limits.mirrors and has_mirrors(mesh) and not _has_parity(state)
    assert spec is not None
    holdings = {}
    for rank, worker in enumerate(state.members):
        shard = mesh.shard_of(rank)
        own = Held(
            worker=worker,
            step=state.step,
            medium="snapshot",
            world_size=mesh.shards,
            rank=shard,
            layout_id=state.generation,
        )
        held = (
            [own, replace(own, medium="mirror", rank=mirror_of(shard, mesh.shards, mesh.apart))] if mirrored else [own]
        )
        holdings[worker] = Stopped(
            generation=state.generation,
            reason=StopReason.BOUNDARY,
            step=state.step,
            phase="",
            stopped_at=0.0,
            held=tuple(held),
            specs={state.step: spec},
        )
    return replace(state, holdings=holdings)
