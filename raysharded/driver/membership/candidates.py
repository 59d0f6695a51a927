"""Workers that must leave: the ones still needed, and the time at which each may go. Pure; below the generations.

A leaving worker trains until a boundary. The next generation is then formed from all workers' memory, without it. It
stays alive until that is done, in case another worker is lost meanwhile. It becomes a member once more only if it holds
data that no other does, or if too few workers would be left.

If all workers must leave, those that go last train on together: a generation of some of them would end with them. They
write a checkpoint at once and another shortly before they have to go, and leave after it.

A generation is as large as the open files of its members connect. Workers that may open too few stand by.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence

from raysharded.display.quantities import count
from raysharded.driver.membership.state_source import failed_devices, held_by, newest_source
from raysharded.driver.state import step_watch
from raysharded.driver.state.changed import replace
from raysharded.driver.state.state import State
from raysharded.ids import WorkerId
from raysharded.layout import Mesh, spared_first
from raysharded.protocol import descriptors
from raysharded.protocol.messages import FromMemory, Source

LAST_MOMENT_S = 1.0
"""Time before its deadline from which a leaving worker is no longer waited for."""
_LEAST_TO_SAVE_S = 2.0
"""Shortest time before that from which the last checkpoint is requested."""
_MOST_ATTEMPTS = 2
"""Generations in a row without a step or a loss after which workers with a failed GPU no longer hand over."""
_TOGETHER_S = 30.0
"""Workers whose deadlines are no further apart leave together, if nobody stays."""


def without_failed_devices(state: State) -> State:
    """The state for a plan without workers whose GPU failed: they are not ready. Those that are needed still hold.

    They hand over what they hold, and are no members. They are needed if the others have no source as new. After
    several attempts in vain they are not: an older source may do.
    """
    if not failed_devices(state):
        return state
    state = _holding(state, state.ready)
    needed, newest = failed_devices(state), newest_source(state, state.ready)
    able = state.ready - needed
    for worker in sorted(needed):
        if source_among(state, (able | needed) - {worker}, newest) is not None:
            needed -= {worker}
    if state.idle_generations > _MOST_ATTEMPTS:
        needed = frozenset()
    return replace(_holding(state, able | needed), ready=able)


def _holding(state: State, workers: frozenset[WorkerId]) -> State:
    """The state as if only these workers held anything."""
    return replace(state, holdings={worker: state.holdings[worker] for worker in workers & state.holdings.keys()})


def exclude_leavers(state: State) -> tuple[Source, frozenset[WorkerId]]:
    """Source of the next generation's state, and the workers that may take part in it.

    All workers that stay may take part. Leaving workers take part only if the newest step cannot be assembled without
    them, or if fewer than the minimum would be left. Several leave together if the others hold everything; otherwise as
    many as possible.
    """
    source = newest_source(state, state.ready)
    order = {worker: (worker in state.members, state.leaving[worker].by, worker) for worker in state.leaving}
    leavers = sorted(order.keys() & state.ready - _going_last(state), key=lambda worker: order[worker])
    may_go = leavers[: max(0, len(state.ready) - state.limits.min_workers)]
    found = source_among(state, state.ready.difference(may_go), source) if may_go else None
    if found is not None:
        return found, state.ready.difference(may_go)
    chosen = state.ready
    for worker in leavers:
        if len(chosen) <= state.limits.min_workers:
            break
        found = source_among(state, chosen - {worker}, source)
        if found is not None:
            source, chosen = found, chosen - {worker}
    return source, chosen


def _going_last(state: State) -> frozenset[WorkerId]:
    """Workers that must leave, and continue until then with others that go at the same time; none if some stay."""
    if state.staying or not state.ready:
        return frozenset()
    latest = max(state.leaving[worker].by for worker in state.ready)
    return frozenset(worker for worker in state.ready if state.leaving[worker].by >= latest - _TOGETHER_S)


def source_among(state: State, workers: frozenset[WorkerId], source: Source) -> Source | None:
    """A source as new as `source` with these workers' memory alone; None if there is none."""
    found = newest_source(state, workers)
    if isinstance(source, FromMemory) and not isinstance(found, FromMemory):
        return None
    return found if found.step >= source.step else None


def fit_to_mesh(
    state: State, source: Source, workers: frozenset[WorkerId], mesh: Mesh
) -> tuple[Source, frozenset[WorkerId]]:
    """Drop surplus workers until the mesh fits, keeping every worker that the source needs, so that more may remain.

    Workers that must leave go first. Next are workers in no whole group on their node, since bytes are moved once but
    groups communicate in every step. Then workers that hold nothing, and the newest ones.
    """
    count = mesh.world_size
    holders = {worker for worker in workers if worker in state.holdings and state.holdings[worker].held}
    nodes = {worker: state.facts[worker].node_id for worker in workers if worker in state.facts}
    by_worth = sorted(workers, key=lambda worker: (worker not in holders, worker))
    spared = spared_first(by_worth, nodes, mesh.shards)
    spared = spared_first(spared[::-1], nodes, mesh.tensor)
    spared.sort(key=lambda worker: worker not in state.leaving)
    fewest = workers.difference(spared[: max(0, len(workers) - count)])
    found = source_among(state, fewest, source)
    if found is not None:  # the usual case; one by one is slow for thousands of workers
        return found, fewest
    left = _one_by_one(state, source, workers, spared, count)
    if len(left[1]) > count:  # by rank the most can go: those whose mirrors stay
        left = _one_by_one(state, source, workers, sorted(spared, key=lambda worker: _rank(state, worker)), count)
    return left


def _one_by_one(
    state: State, source: Source, workers: frozenset[WorkerId], spared: Sequence[WorkerId], count: int
) -> tuple[Source, frozenset[WorkerId]]:
    for worker in spared:
        if len(workers) <= count:
            break
        found = source_among(state, workers - {worker}, source)
        if found is not None:
            source, workers = found, workers - {worker}
    return source, workers


def _rank(state: State, worker: WorkerId) -> tuple[int, int]:
    """(layout, -rank) of the newest snapshot that a worker holds; the smallest value if it holds none."""
    held = state.holdings[worker].held if worker in state.holdings else ()
    return max(((one.layout_id, -one.rank) for one in held if one.medium == "snapshot"), default=(-1, 0))


def most_members(state: State, chosen: frozenset[WorkerId]) -> int:
    """Largest size of the next generation: the maximum, plus leaving workers that are still needed.

    It is smaller if one of them may open too few files to connect to so many. The minimum stays: a worker that cannot
    connect to so few reports what it lacks.
    """
    fewest = min((_connects(state, worker) for worker in chosen), default=sys.maxsize)
    return min(state.limits.max_workers + len(chosen & state.leaving.keys()), max(state.limits.min_workers, fewest))


def most_at_work(state: State, workers: frozenset[WorkerId]) -> int:
    """Largest number of these that may be at work after the members: the maximum, or as many as open files connect."""
    limits = state.limits
    for most, able in _able(state, workers):
        if len(able) >= limits.min_workers and held_by(limits, state.mesh, state.members, able):
            return min(limits.max_workers, max(limits.min_workers, most))
    return most_members(state, workers - state.leaving.keys())


def with_open_files(state: State, source: Source, workers: frozenset[WorkerId]) -> tuple[Source, frozenset[WorkerId]]:
    """Without workers that may open too few files, as far as the others are more and hold all that the source needs."""
    for _, able in _able(state, workers):
        found = source_among(state, able, source) if state.limits.min_workers <= len(able) < len(workers) else None
        if found is not None or able == workers:
            return (source, workers) if found is None else (found, able)
    return source, workers


def few_open_files(state: State, wanted: int, workers: Collection[WorkerId]) -> str:
    """One sentence if one of these workers may open too few files for so many members; otherwise empty."""
    fewest = min(workers, key=lambda worker: (_connects(state, worker), worker), default=None)
    if fewest is None or (most := _connects(state, fewest)) >= wanted:
        return ""
    return (
        f"worker {fewest} may open {state.facts[fewest].open_files} files more, which connect {count(most, 'worker')}: "
        "raise the limit where its process starts (ulimit -Hn; limits.conf: nofile)"
    )


def _connects(state: State, worker: WorkerId) -> int:
    """Largest number of members of a generation of which this worker may be one."""
    files = state.facts[worker].open_files if worker in state.facts else None
    return sys.maxsize if files is None else descriptors.most_members(files)


def _able(state: State, workers: Collection[WorkerId]) -> Iterator[tuple[int, frozenset[WorkerId]]]:
    """(most, those of these workers that connect so many), the largest number first that as many of them connect."""
    connect = {worker: _connects(state, worker) for worker in workers}
    ranked = sorted(connect.values(), reverse=True)
    top = min(state.limits.max_workers, sum(most >= number for number, most in enumerate(ranked, 1)))
    for most in sorted({min(top, one) for one in ranked}, reverse=True):
        yield most, frozenset(worker for worker, one in connect.items() if one >= most)


def can_be_spared(state: State) -> bool:
    """Whether a boundary now would release at least one member that must leave."""
    if not state.leaving:
        return False
    members = [worker for worker in state.members if worker in state.leaving]
    redundant = state.limits.mirrors or state.replicas > 1
    could = bool(members) and redundant and len(state.staying) + len(members) > state.limits.min_workers
    return could and not _going_last(state).issuperset(members)


def should_stop(state: State, at: float) -> bool:
    """Whether it is time for a boundary: at once, or after a wait for replacements in the background.

    The wait is as long as after a loss, but at most half of the notice.
    """
    if not can_be_spared(state):
        return False
    if len(state.staying) >= state.limits.max_workers:
        return True
    patience_s = state.limits.replacement_wait_s
    told = [state.leaving[worker] for worker in state.members if worker in state.leaving]
    return any(at - one.since >= min(patience_s, (one.by - one.since) / 2) for one in told)


def awaits_successor(state: State, at: float) -> bool:
    """Whether the only worker, which must leave, should wait for a replacement that is starting.

    It then hands its state over, and no step is lost. It waits for at most half of its notice.
    """
    told = [state.leaving[worker] for worker in state.members if worker in state.leaving]
    if len(state.members) != 1 or not told or not state.limits.mirrors:
        return False
    coming = bool(state.starting) or not state.staying.issubset(state.members)
    return coming and at < told[0].since + (told[0].by - told[0].since) / 2


def has_to_save_again(state: State, at: float) -> bool:
    """Whether nobody stays, and it is time for the last checkpoint that can be written before the first of them goes.

    The checkpoint before it, at the notice, has shown how long one takes; and a step may have to end first.
    """
    took_s, told = state.leavers_save_s, [state.leaving[worker] for worker in state.members if worker in state.leaving]
    if took_s is None or not told or len(state.members) < 2 or not _going_last(state).issuperset(state.members):
        return False
    left_s = min(departure.by for departure in told) - LAST_MOMENT_S - at
    return took_s <= left_s <= max(_LEAST_TO_SAVE_S, 2.0 * (took_s + step_watch.usual_s(state.watch)))
