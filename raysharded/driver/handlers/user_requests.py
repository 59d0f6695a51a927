"""User requests to a live run: a pause, another number of workers, a node to drain. Handlers of the machine.

Each request is recorded in the journal before it takes effect. The reasons to refuse one may be queried by any thread.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from raysharded.display.quantities import listing
from raysharded.driver.generation import lifecycle, paused_run, planned_change
from raysharded.driver.handlers import leave_notice, worker_loss
from raysharded.driver.membership import candidates
from raysharded.driver.membership.state_source import newest_source
from raysharded.driver.state import mesh_choice, node_health, recovery_timeline
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, KillWorker, Outcome, Record, RequestBoundary, finish, prepend
from raysharded.driver.state.events import NOBODY, DrainRequested, ResizeRequested
from raysharded.driver.state.state import Departure, Pause, Phase, State
from raysharded.ids import WorkerId
from raysharded.protocol.worker_launcher import LeaveNotice, WorkerLost

_LEAST_OF_AN_ID = 8
"""Length of a node id's beginning that is enough to name it."""


def pause_refusal(state: State) -> str:
    """Reason why the run cannot be paused."""
    if state.phase is Phase.OVER:
        return "the run is over"
    last = state.limits.max_steps
    if state.phase is Phase.CLOSING or state.step >= last:
        return f"the run has done its last step, {last}, and ends"
    return ""


def resume_refusal(state: State) -> str:
    """Reason why the run cannot be resumed. A run that is not paused just continues."""
    return "the run is over" if state.phase is Phase.OVER else ""


def resize_refusal(state: State, workers: int) -> str:
    """Reason why the run cannot have this number of workers."""
    if state.phase is Phase.OVER:
        return "the run is over"
    least, most = state.limits.min_workers, state.limits.most_workers
    if least <= workers <= most:
        return candidates.few_open_files(state, workers, state.members)
    return (
        f"{workers} workers are asked for, and the run may have {least} to {most}. Ask for a number between, or start "
        "it again with another ScalingConfig.num_workers."
    )


def drain_refusal(state: State, node: str, within_s: float) -> str:
    """Reason why the node's workers cannot be made to leave it within this time."""
    if state.phase is Phase.OVER:
        return "the run is over"
    if not (math.isfinite(within_s) and within_s >= 0):
        return f"workers are to leave within {within_s} s: give a number of seconds that is not negative"
    if nodes_named(state, node):
        return ""
    there = {facts.node_id: facts.node for worker, facts in state.facts.items() if worker in state.ready}
    names = sorted({f"{host} ({node_id})" if host != node_id else host for node_id, host in there.items()})
    return f"no worker of the run is on node {node!r}; " + (
        f"there are some on {listing(names)}" if names else "it has none"
    )


def ambiguity(state: State, node: str) -> str:
    """Reason why a request does not mean one node: a host name of several, or the beginning of several ids."""
    meant = sorted(nodes_named(state, node))
    if len(meant) < 2:
        return ""
    return f"{node!r} means {len(meant)} nodes with workers of the run: {listing(meant)}. Give the id of one"


def nodes_named(state: State, node: str) -> frozenset[str]:
    """Ids of the nodes with workers that `node` means: an id, its beginning, or a host name."""
    found = set()
    for worker, facts in state.facts.items():
        begins = len(node) >= _LEAST_OF_AN_ID and facts.node_id.startswith(node)
        if worker in state.ready and facts.node_id and (begins or node in (facts.node_id, facts.node)):
            found.add(facts.node_id)
    return frozenset(found)


def pause(state: State, at: float) -> Outcome:
    """Stop at the next step boundary. No effect during a pause."""
    if state.pause is not None:
        return state, []
    reason = pause_refusal(state)
    if reason:
        return _refused(state, "pause", reason)
    recorded: list[Command] = [Record(kind="pause", fields={"step": state.step}, durable=True)]
    state = replace(state, pause=Pause(asked_at=at))
    if state.phase is Phase.GATHERING:
        return prepend(paused_run.enter(state, at), recorded)
    if state.phase is not Phase.TRAINING or state.boundary_requested:
        return state, recorded
    boundary = RequestBoundary(worker=state.members[0], generation=state.generation)
    return replace(state, boundary_requested=True, preparation=None), [*recorded, boundary]


def resume(state: State, at: float) -> Outcome:
    """Continue from what the workers hold. No effect without a pause."""
    if state.pause is None or state.ending is not None:
        return state, []
    since = state.pause.reached_at
    fields = {"step": state.step, "seconds": 0.0 if since is None else at - since}
    return prepend(_go_on(state, at), [Record(kind="resume", fields=fields, durable=True)])


def _go_on(state: State, at: float) -> Outcome:
    state = replace(state, pause=None)
    if state.phase is not Phase.PAUSED:  # it has not stopped yet, or forms a generation
        return state, []
    incident = recovery_timeline.after_pause(state.incident, at)
    state = replace(state, phase=Phase.GATHERING, since=at, incident=incident)
    if state.members or state.holdings:
        return lifecycle.next_generation(state, at)
    return lifecycle.maybe_request_change(state, at)


# -- another number of workers --


def resize(state: State, event: ResizeRequested, at: float) -> Outcome:
    """Set the number of workers from now on.

    Missing workers are started as after a loss. Surplus workers leave as after a notice, but count as neither losses
    nor preemptions.
    """
    wanted, limits = event.workers, state.limits
    reason = resize_refusal(state, wanted)
    if reason:
        return _refused(state, "resize", reason, workers=wanted)
    told = {worker: departure for worker, departure in state.leaving.items() if math.isfinite(departure.by)}
    before, most = limits.max_workers, limits.most_workers
    state = replace(state, limits=replace(limits, max_workers=wanted, configured_workers=most), leaving=told)
    surplus = _too_many_members(state)
    departure = Departure(reason=f"resized to {wanted} workers", since=at, by=math.inf, step=state.step)
    state = replace(state, leaving={**told, **dict.fromkeys(surplus, departure)})
    cancelled, idle = _too_many_others(state)
    state = replace(
        state,
        starting={worker: since for worker, since in state.starting.items() if worker not in cancelled},
        leaving={**state.leaving, **dict.fromkeys(idle, departure)},
    )
    fields = {
        "step": state.step,
        "workers": wanted,
        "before": before,
        "leaving": sorted([*surplus, *idle]),
        "cancelled": sorted(cancelled),
    }
    return state, [
        Record(kind="resize", fields=fields, durable=True),
        *(KillWorker(worker=worker) for worker in sorted(cancelled)),
    ]


def _too_many_members(state: State) -> Sequence[WorkerId]:
    """Surplus members: whole groups where groups exist, and workers whose state the others hold.

    All of them can leave at one boundary.
    """
    members = state.staying.intersection(state.members)
    count = len(members) - state.limits.max_workers
    if count <= 0:
        return ()
    is_known = state.phase is Phase.TRAINING and state.spec is not None
    held = planned_change.as_if_stopped(state) if is_known else state
    mesh = mesh_choice.choose_mesh(state.limits.grouping, state.limits.max_workers).mesh
    _, kept = candidates.fit_to_mesh(held, newest_source(held, members), members, mesh)
    ranks = {worker: rank for rank, worker in enumerate(state.members)}
    return sorted(members, key=lambda worker: (worker in kept, -ranks[worker]))[:count]


def _too_many_others(state: State) -> tuple[Sequence[WorkerId], Sequence[WorkerId]]:
    """Surplus starting workers, then surplus workers that stand by, newest first.

    They are beyond the wanted number and the spares.
    """
    count = len(state.staying) + len(state.starting) - state.limits.max_workers - state.limits.spares
    cancelled = sorted(state.starting, reverse=True)[: max(0, count)]
    standing_by = sorted(state.staying.difference(state.members), reverse=True)
    return cancelled, standing_by[: max(0, count - len(cancelled))]


# -- draining a node --


def drain(state: State, event: DrainRequested, at: float) -> Outcome:
    """Have all workers of a node leave, as on a notice for their machine. No worker starts there any more."""
    reason = drain_refusal(state, event.node, event.within_s)
    if reason:
        return _refused(state, "drain", reason, node=event.node)
    named = nodes_named(state, event.node)
    there = tuple(sorted(worker for worker in state.ready if state.facts[worker].node_id in named))
    fields = {
        "step": state.step,
        "node": event.node,
        "nodes": sorted(named),
        "workers": list(there),
        "within_s": event.within_s,
    }
    state = replace(state, nodes=node_health.drained(state.nodes, named))
    notice = LeaveNotice(workers=there, reason="its node is drained", within_s=event.within_s, whole_node=True)
    return prepend(leave_notice.on_noticed(state, notice, at), [Record(kind="drain", fields=fields, durable=True)])


def _end_drained(state: State, at: float) -> Outcome:
    """End the workers that are still on a drained node when the time is over."""
    late = [
        worker
        for worker, departure in sorted(state.leaving.items())
        if at >= departure.by and node_health.is_drained(state.nodes, state.facts[worker].node_id)
    ]
    if not late:
        return state, []
    killed: list[Command] = [KillWorker(worker=worker) for worker in late]
    reason = "its node is drained, and the time to leave it is over"
    return prepend(
        worker_loss.all_lost(state, [WorkerLost(worker=worker, reason=reason) for worker in late], at), killed
    )


# -- after every event --


def after_event(state: State, commands: list[Command], at: float) -> Outcome:
    """End workers that have not left in time.

    In a pause, have the state held by workers that stay, and answer checkpoint requests.
    """
    if state.phase is not Phase.OVER and state.leaving:
        state, ended = _end_drained(state, at)
        commands = [*commands, *ended]
    if state.phase is not Phase.PAUSED:
        return state, commands
    state, form = paused_run.look(state)
    if form:
        return prepend(lifecycle.next_generation(state, at, resting=True), commands)
    if not state.asked:
        return state, commands
    state, answered = paused_run.answer(state, at)
    if state.ending is not None and state.asked and not state.saves:  # it cannot be written
        return prepend(finish(state), [*commands, *answered])
    if NOBODY in state.asked and paused_run.why_not_saved(
        state
    ):  # the run is to end with a checkpoint of one more step
        return prepend(resume(state, at), [*commands, *answered])
    return state, [*commands, *answered]


def _refused(state: State, what: str, reason: str, **asked: object) -> Outcome:
    fields = {"step": state.step, **asked, "reason": reason}
    return state, [Record(kind=f"{what}_refused", fields=fields, durable=True)]
