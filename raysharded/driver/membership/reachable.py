"""The workers that a run continues with when some cannot reach each other: pure decisions.

Members must all reach each other. Whole nodes are left out first, as most broken links are between two nodes; then
single workers. Among the sets that are large enough, the largest that holds the newest complete step is chosen, with
ties in favor of the lowest numbers. A set may also get that step from workers that it leaves out: these form a
generation with some of its members first, do no step, and hand over what they hold.

If no set is large enough, one that holds the newest complete step forms a generation that does no step, and writes a
checkpoint of it: the run may have to wait long for the network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from raysharded.driver.membership import candidates
from raysharded.driver.membership.generation_plan import plan_generation
from raysharded.driver.membership.state_source import failed_devices, held_by, newest_source
from raysharded.driver.state import mesh_choice
from raysharded.driver.state.broken_links import Pair, pair_of
from raysharded.driver.state.changed import replace
from raysharded.driver.state.state import State
from raysharded.ids import WorkerId
from raysharded.protocol.messages import FromMemory, Source

_EXACT = 12
"""Largest number of conflicting items of which all combinations are tried."""
T = TypeVar("T", bound=Hashable)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reachable:
    """The workers to continue with."""

    workers: frozenset[WorkerId]
    hands_over: bool = False
    """Whether these only hand their state over to a part of them, which others join for the generation after."""
    only_save: bool = False
    """Whether these, too few to continue, only write a checkpoint of the step that they hold."""
    why: str = ""
    """Reason for an older step than the newest complete one; empty if it is not older."""


def reaching(workers: Iterable[WorkerId], broken: Collection[Pair], members: Iterable[WorkerId]) -> frozenset[WorkerId]:
    """Those of the workers that reach all members."""
    members = frozenset(members)
    apart = {worker for pair in broken for worker in pair if members.intersection(pair) - {worker}}
    return frozenset(workers).difference(apart)


def joinable(state: State) -> frozenset[WorkerId]:
    """Workers that stay, without those that do not reach every member."""
    if not state.links.broken:
        return state.staying
    return reaching(state.staying, state.links.pairs, state.ready.intersection(state.members))


def prepared_from(state: State) -> frozenset[WorkerId]:
    """Ready workers that reach every member: the next generation is prepared from these."""
    return reaching(state.ready, state.links.pairs, state.ready.intersection(state.members))


def usable(state: State) -> frozenset[WorkerId]:
    """Ready workers of the largest set that the next generation may be formed of."""
    return (choose(state).workers if state.links.broken else state.ready) - failed_devices(state)


def can_form(state: State, chosen: Reachable) -> bool:
    """Whether a generation can be formed of the chosen workers. Those whose GPU failed are no members."""
    able = len(chosen.workers - failed_devices(state))
    return able >= state.limits.min_workers or (able > 0 and (chosen.hands_over or chosen.only_save))


def choose(state: State) -> Reachable:
    """The ready workers that the next generation is formed of, or that hand over their state before.

    They include those whose GPU failed, which only hand over what they hold. Too few others take it over at once.
    """
    if not state.links.pairs.intersection(_pairs_among(state)):
        return Reachable(workers=state.ready, only_save=_takes_over(state))
    nodes = {worker: state.facts[worker].node_id for worker in state.ready if worker in state.facts}
    sets = mutual_sets(state.ready, nodes, state.links.pairs, state.limits.max_workers)
    least = state.limits.min_workers
    enough = [workers for workers in sets if len(workers) >= least]
    newest = newest_source(state, state.ready)
    for workers in enough:
        if candidates.source_among(state, workers, newest) is not None:
            return Reachable(workers=workers)
    has_rested = state.relayed and state.has_trained
    handing_over = () if has_rested or not enough else [others for others in sets if _holds(state, others, newest.step)]
    for workers in enough:
        for others in handing_over:
            if _hands_over(state, others, workers):
                return Reachable(workers=others, hands_over=True)
    if not enough:
        holders = () if has_rested or newest.step <= state.saved_step else sets
        saving = next((workers for workers in holders if _can_save(state, workers, newest)), None)
        return Reachable(workers=sets[0] if saving is None else saving, only_save=saving is not None)
    best = max(enough, key=lambda workers: newest_source(state, workers).step)  # the first of the newest
    return Reachable(workers=best, why=f"no workers that reach each other hold step {newest.step}")


def _can_save(state: State, workers: frozenset[WorkerId], newest: Source) -> bool:
    """Whether a generation of these workers would hold the newest step, all of it from memory."""
    is_held = isinstance(newest, FromMemory) and candidates.source_among(state, workers, newest) is not None
    return is_held and mesh_choice.possible_mesh(state.limits.grouping, len(workers)) is not None


def _takes_over(state: State) -> bool:
    """Whether workers, too few to continue, are to save what workers with a failed GPU alone hold."""
    planned = candidates.without_failed_devices(state)
    if not failed_devices(planned) or not 0 < len(planned.ready) < state.limits.min_workers:
        return False
    is_new = newest_source(planned, planned.ready).step > state.saved_step
    return is_new and mesh_choice.possible_mesh(state.limits.grouping, len(planned.ready)) is not None


def _pairs_among(state: State) -> Iterator[Pair]:
    return (link.pair for link in state.links.broken if state.ready.issuperset(link.pair))


def _holds(state: State, workers: frozenset[WorkerId], step: int) -> bool:
    """Whether they hold this step, or a newer one, in memory."""
    source = newest_source(state, workers)
    return isinstance(source, FromMemory) and source.step >= step


def _hands_over(state: State, others: frozenset[WorkerId], workers: frozenset[WorkerId]) -> bool:
    """Whether members of `others`, which hold the state, would hold it among `workers`, once they had formed."""
    if not others & workers:
        return False
    plan = plan_generation(replace(state, ready=others, preparation=None))
    return held_by(state.limits, plan.mesh, plan.members, workers)


def mutual_sets(
    workers: frozenset[WorkerId], nodes: Mapping[WorkerId, str], broken: Collection[Pair], most: int
) -> list[frozenset[WorkerId]]:
    """Sets of workers that all reach each other, to which none can be added; best first.

    Larger sets come first, up to `most` workers; then those with the lowest numbers. With many conflicts the list has
    only some of the sets.
    """
    there: dict[str, list[WorkerId]] = {}
    for worker in sorted(workers):
        there.setdefault(nodes.get(worker) or f"worker {worker}", []).append(worker)

    def apart(one: str, other: str) -> bool:
        return all(pair_of(a, b) in broken for a in there[one] for b in there[other])

    found: set[frozenset[WorkerId]] = set()
    for chosen in _without_conflicts(sorted(there), apart, lambda node: len(there[node])):
        among = [worker for node in chosen for worker in there[node]]
        for each in _without_conflicts(sorted(among), lambda a, b: pair_of(a, b) in broken, lambda _: 1):
            found.add(frozenset(each))
    maximal = [one for one in found if not any(one < other for other in found)]
    return sorted(maximal, key=lambda one: (-min(len(one), most), -len(one), sorted(one)))


def _without_conflicts(
    items: list[T], conflict: Callable[[T, T], bool], weight: Callable[[T], int]
) -> Iterator[frozenset[T]]:
    """Sets of items without conflicts, to which none can be added: all of them, or some if there are many conflicts."""
    against = {one: {other for other in items if other != one and conflict(one, other)} for one in items}
    free = [one for one in items if not against[one]]
    tied = [one for one in items if against[one]]
    if len(tied) <= _EXACT:
        for chosen in _maximal(tied, against):
            yield chosen | frozenset(free)
        return
    for first in tied:  # each of them once, and then those that exclude the fewest others
        taken, left = {first}, [one for one in tied if one != first and one not in against[first]]
        while left:
            following = min(
                left, key=lambda one: (sum(weight(x) for x in against[one].intersection(left)), -weight(one))
            )
            taken.add(following)
            left = [one for one in left if one != following and one not in against[following]]
        yield frozenset(taken) | frozenset(free)


def _maximal(items: list[T], against: Mapping[T, set[T]]) -> Iterator[frozenset[T]]:
    """All sets of items without conflicts to which none can be added (Bron and Kerbosch, 1973)."""

    def extend(chosen: frozenset[T], left: frozenset[T], done: frozenset[T]) -> Iterator[frozenset[T]]:
        if not left and not done:
            yield chosen
        for item in [one for one in items if one in left]:
            yield from extend(chosen | {item}, left - against[item] - {item}, done - against[item])
            left, done = left - {item}, done | {item}

    yield from extend(frozenset(), frozenset(items), frozenset())
