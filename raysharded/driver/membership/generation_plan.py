"""The next generation's members, mesh and state source: pure decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from raysharded.driver.membership import candidates
from raysharded.driver.membership.member_order import (
    choose_members,
    distance_of_mirrors,
    distance_of_stripes,
    number_nodes,
    order_members,
)
from raysharded.driver.membership.state_source import choose_source, failed_devices, holders_of, newest_source
from raysharded.driver.state import mesh_choice
from raysharded.driver.state.changed import replace
from raysharded.driver.state.mesh_choice import Choice
from raysharded.driver.state.state import Preparation, State
from raysharded.ids import WorkerId
from raysharded.layout import Mesh, possible_degree
from raysharded.protocol.messages import Source


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationPlan:
    """The parts of a generation that is to be formed."""

    source: Source
    members: tuple[WorkerId, ...]
    """Members, by rank."""
    mesh: Mesh
    sources: tuple[WorkerId, ...]
    """Workers whose GPU failed, and that hand over what they alone hold."""
    nodes: tuple[int, ...]
    """Node numbers, as in `GenerationSpec.nodes`."""
    preparation: Preparation | None
    """The members' preparation in the background, if they made one."""
    why: str
    """Reason for this mesh, and for this source if a newer one exists; empty if there was no choice."""


def plan_generation(state: State) -> GenerationPlan:
    """Plan the next generation. At least the minimum of workers must be ready. A prepared order stays.

    Workers that must leave take part only if the newest step cannot be assembled without them. Those whose GPU failed
    only hand over what they hold. All workers together may hold that step spread over more of them than whole tensor
    parallel groups can have at work. The run then continues from an older step: one that fewer workers hold, or a
    checkpoint.
    """
    state = candidates.without_failed_devices(state)
    newest, workers = candidates.with_open_files(state, *candidates.exclude_leavers(state))
    found = _at_work(state, newest, workers)
    if found is None and workers != state.ready:
        found = _at_work(state, newest_source(state, state.ready), state.ready)
    if found is None:
        found = _at_work(state, choose_source({}, workers, state.checkpoint), workers)
    assert found is not None  # a source that is not in memory needs no worker
    source, workers, choice = found
    chosen = choose_members(source, workers, choice.mesh)
    nodes = {worker: state.facts[worker].node_id for worker in chosen if worker in state.facts}
    mesh = replace(choice.mesh, apart=distance_of_mirrors(choice.mesh, nodes))
    prepared = _prepared(state, chosen, mesh)
    if prepared:
        members, mesh = prepared.members, prepared.mesh
    else:
        members = order_members(source, workers, state.limits, nodes, mesh)
        mesh = _with_stripes(state, mesh, members, nodes)
    why = "; ".join([choice.reason, *_passed_over(state, newest, source)])
    wanted = min(len(state.ready), state.limits.max_workers)
    if len(members) < wanted:
        why = "; ".join(filter(None, [why, candidates.few_open_files(state, wanted, state.ready)]))
    numbers = number_nodes(members, nodes, mesh)
    return GenerationPlan(
        source=source,
        members=members,
        mesh=mesh,
        sources=tuple(sorted(failed_devices(state) & holders_of(source))),
        nodes=numbers,
        preparation=prepared,
        why=why,
    )


def _prepared(state: State, chosen: Sequence[WorkerId], mesh: Mesh) -> Preparation | None:
    """The preparation, if it fits: the same members, in any order, and the same mesh, but for stripes' distance."""
    made = state.preparation
    if made is None or made.awaited or made.failed:
        return None
    parity = state.limits.parity
    known = replace(made.mesh, apart=mesh.apart) if parity is not None and parity.protects(mesh) else made.mesh
    return made if sorted(made.members) == list(chosen) and known == mesh else None


def _with_stripes(state: State, mesh: Mesh, members: Sequence[WorkerId], nodes: Mapping[WorkerId, str]) -> Mesh:
    """The mesh of these members, with the distance of parity's stripes if it has parity."""
    parity = state.limits.parity
    if parity is None or not parity.protects(mesh):
        return mesh
    return replace(mesh, apart=distance_of_stripes(mesh, members, nodes, parity))


def _passed_over(state: State, newest: Source, source: Source) -> list[str]:
    """Newer steps that workers hold, with the reason why the run does not continue from them.

    The list is empty without tensor parallelism.
    """
    tensor = state.limits.tensor
    notes = []
    if source.step < newest.step:
        notes.append(f"step {newest.step} is held by more workers than tensor parallel groups of {tensor} can have")
    holders = state.ready & state.holdings.keys()
    specs = {step: spec for worker in holders for step, spec in state.holdings[worker].specs.items()}
    impossible = {step: possible_degree(specs[step], tensor) for step in specs if step > source.step}
    notes += [f"step {step} is passed over: {why}" for step, why in sorted(impossible.items())[-1:] if why]
    return notes


def _at_work(
    state: State, source: Source, workers: frozenset[WorkerId]
) -> tuple[Source, frozenset[WorkerId], Choice] | None:
    """The best mesh of these workers in which all that the source needs are at work; None if there is none."""
    grouping = state.limits.grouping
    count = min(len(workers), candidates.most_members(state, workers))
    choice = mesh_choice.choose_mesh(grouping, count)
    if grouping is None:
        return source, workers, choice
    found, fewest = candidates.fit_to_mesh(state, source, workers, choice.mesh)
    if len(fewest) > choice.mesh.world_size:  # each of them holds data that no other does
        choice = mesh_choice.choose_mesh(grouping, count, needed=len(fewest))
        found, fewest = candidates.fit_to_mesh(state, source, workers, choice.mesh)
    return (found, fewest, choice) if len(fewest) <= choice.mesh.world_size else None
