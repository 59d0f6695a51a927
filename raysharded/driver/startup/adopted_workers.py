"""Live workers of the driver before: the run continues with what they hold. Handlers of the machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raysharded import numerics
from raysharded.driver.generation import lifecycle
from raysharded.driver.membership.state_source import choose_source, newest_source
from raysharded.driver.startup import persisted_requests
from raysharded.driver.state import arithmetic, node_health
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, KillWorker, Outcome, Record
from raysharded.driver.state.state import Departure, Pause, State
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import FromMemory, Source
from raysharded.protocol.session import AdoptedWorker, FoundWorkers, believed

ADOPT_S = 30.0
"""Time within which workers must be free of their current work, all together."""
ADOPT_AT_MOST_S = 300.0
"""Time within which workers must be free while the free ones do not hold a whole state."""


def taken_over(state: State, adopted: Sequence[AdoptedWorker]) -> State:
    """The state of a driver that adopts these workers: they are ready, and hold what they report."""
    if not adopted:
        return state
    first, seen = adopted[0].facts, state.nodes
    for one in adopted:
        seen = node_health.seen(seen, one.facts.node_id, one.facts.node)
    state = replace(
        state,
        generation=GenerationId(max(state.generation, *(one.fence for one in adopted))),
        ready=frozenset(one.worker for one in adopted),
        next_worker=WorkerId(max(state.next_worker, *(one.worker + 1 for one in adopted))),
        holdings={
            one.worker: believed(one.stopped, one.decisions, state.invalidated_up_to, state.decisions)
            for one in adopted
        },
        facts={one.worker: one.facts for one in adopted},
        nodes=seen,
        arithmetic=numerics.of_machine(first.arithmetic) if state.arithmetic is None else state.arithmetic,
        arithmetic_unmet=False,
        num_samples=first.num_samples if state.num_samples is None else state.num_samples,
        blocks=arithmetic.blocks_with(state, first),
        contents=arithmetic.contents_with(state.contents, first),
    )
    step = first_source(state).step
    return replace(state, step=step, reached=max(state.reached, step))


def without_differing(state: State, entered: FoundWorkers, *, anew: bool) -> tuple[State, FoundWorkers, list[Command]]:
    """Exclude and end adopted workers that would compute other bits than the run.

    The driver before had them wait until the others were ready. In the returned state no new worker gets the number of
    an adopted one. `anew`: the run begins at the start under rules other than theirs, so that none of them holds what
    it needs.
    """
    differing = [one for one in entered.adopted if anew or not arithmetic.fits(state, one.facts)]
    if entered.adopted:
        state = replace(state, next_worker=WorkerId(max(one.worker for one in entered.adopted) + 1))
    commands: list[Command] = []
    for one in differing:
        found = {**arithmetic.lacks(state, one.facts), **arithmetic.differs(state, one.facts)}
        reason = numerics.describe(found) or "what it holds was computed under rules that this version has dropped"
        fields = {"worker": one.worker, "node": one.facts.node, "reason": reason}
        commands += [KillWorker(worker=one.worker), Record(kind="worker_refused", fields=fields)]
    adopted = tuple(one for one in entered.adopted if one not in differing)
    return state, replace(entered, adopted=adopted, ended=entered.ended + len(differing)), commands


def as_decided(state: State, entries: Sequence[Mapping[str, Any]], at: float) -> State:
    """The state with earlier user requests that these workers keep to: a pause, and nodes to drain.

    Of the other workers, those beyond this driver's maximum have to leave once the rest hold everything.
    """
    drained = persisted_requests.drained(entries)
    there = {worker: state.facts[worker].node_id for worker in state.ready}
    told = {
        worker: Departure(reason="its node is drained", since=at, by=at + drained[node], step=state.step)
        for worker, node in there.items()
        if node in drained
    }
    state = replace(
        state,
        pause=Pause(asked_at=at) if persisted_requests.is_paused(entries) else None,
        nodes=node_health.drained(state.nodes, drained.keys()),
        leaving=told,
    )
    departure = Departure(reason="the run may have fewer workers now", since=at, by=math.inf, step=state.step)
    return replace(state, leaving={**told, **dict.fromkeys(_surplus(state), departure)})


def resized(state: State, entries: Sequence[Mapping[str, Any]], scaling: object) -> State:
    """The state with the number of workers last requested from earlier drivers.

    The request counts only if they had this configuration, and if it is within this driver's limits.
    """
    limits = state.limits
    wanted = persisted_requests.asked_last(entries, scaling, "resize", lambda entry: int(entry["workers"]))
    if wanted is None or not limits.min_workers <= wanted < limits.max_workers:
        return state
    return replace(state, limits=replace(limits, max_workers=wanted, configured_workers=limits.max_workers))


def _surplus(state: State) -> list[WorkerId]:
    """Workers beyond the maximum. Only a worker that holds nothing is a spare."""
    holders = {worker for worker, stopped in state.holdings.items() if stopped.held}
    extra = sorted(state.staying, key=lambda worker: (worker not in holders, worker))[state.limits.max_workers :]
    spares = [worker for worker in extra if worker not in holders][: state.limits.spares]
    return [worker for worker in extra if worker not in spares]


def first_source(state: State) -> Source:
    """Source from which a run continues: the newest step of its workers or its checkpoint."""
    return newest_source(state, state.ready)


def are_whole(answers: Sequence[AdoptedWorker]) -> bool:
    """Whether these workers hold a whole state in memory."""
    holdings = {one.worker: one.stopped for one in answers}
    return isinstance(choose_source(holdings, frozenset(holdings), None), FromMemory)


def may_go_on(answers: Sequence[AdoptedWorker], waited_s: float) -> bool:
    """Whether to proceed without workers that have not answered: they may compute, or write a checkpoint.

    The wait is longer if they may hold data that no other worker does.
    """
    return waited_s >= (ADOPT_S if are_whole(answers) else ADOPT_AT_MOST_S)


def go_on(state: State, at: float) -> Outcome:
    """The first commands of a driver that has adopted workers: the next generation at once, if they are enough."""
    if len(state.ready) < state.limits.min_workers:
        return lifecycle.gather(state, at)
    return lifecycle.next_generation(state, at)


def saves_given_up(
    state: State, entries: Iterable[Mapping[str, Any]], found: Iterable[int], adopted: Sequence[AdoptedWorker]
) -> list[int]:
    """Steps after the newest checkpoint whose own an earlier driver began, and whose outcome no entry has.

    `found`: steps of which storage has a part.
    """
    newest = state.checkpoint.step if state.checkpoint is not None else 0
    begun = {
        report.step
        for one in adopted
        for report in one.reports
        if report.save_started and report.generation > state.invalidated_up_to
    }
    begun = {step for step in begun.union(found) if step > newest}
    if begun:
        told, done = set[int](), 0
        for one in entries:  # a step computed again may have begun another one; of a streak the highest step remains
            match one["kind"]:
                case "generation":
                    done = int(one["step"])
                case "step":
                    told = {step for step in told if not done < step <= int(one["step"])}
                    done = max(done, int(one["step"]))
                case "checkpoint_failed" | "checkpoint_overtaken":
                    told.add(int(one["step"]))
        begun -= told
    return sorted(begun)


def entry(state: State, entered: FoundWorkers, *, before: str) -> Record:
    """Journal entry of a takeover."""
    workers = sorted(one.worker for one in entered.adopted)
    fields = {"workers": workers, "step": state.step, "ended": entered.ended, "before": before}
    return Record(kind="taken_over", fields=fields, durable=True)
