"""Workers that are lost while the run needs them. Handlers of the machine."""

from __future__ import annotations

from collections.abc import Sequence

from raysharded.driver.generation import lifecycle
from raysharded.driver.membership.state_source import newest_source, sources_of
from raysharded.driver.state import recovery_timeline
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, KillWorker, Outcome, prepend
from raysharded.driver.state.state import Phase, State
from raysharded.driver.workers import admission, departures, failure_budget
from raysharded.protocol.messages import FromMemory
from raysharded.protocol.worker_launcher import WorkerLost


def on_lost(state: State, event: WorkerLost, at: float) -> Outcome:
    if event.worker in state.starting:
        return admission.failed_to_start(state, event, at)
    return all_lost(state, (event,), at)


def all_lost(state: State, events: Sequence[WorkerLost], at: float) -> Outcome:
    """Count lost workers that were ready, one by one; then continue without all of them at once."""
    events = [event for event in events if event.worker in state.ready]
    needed_before = state.ready.intersection(state.members) | sources_of(state)
    commands: list[Command] = []
    for event in events:
        state, more = _without(state, event, at)
        commands.extend(more)
        if state.phase is Phase.OVER:
            return state, commands
    is_needed_lost = not state.ready >= needed_before
    match state.phase:
        case Phase.GATHERING | Phase.PAUSED if events:
            return prepend(admission.replace_missing(state, at), commands)
        case _ if not is_needed_lost:
            return state, commands
        case Phase.FORMING | Phase.TRAINING:
            return prepend(lifecycle.stop_all(state, at), commands)
        case Phase.STOPPING if not state.awaited:
            return prepend(lifecycle.all_stopped(state, at), commands)
        case Phase.CLOSING if not state.is_last_step_being_saved:  # the others still hold the state: save it again
            return prepend(lifecycle.next_generation(state, at), commands)
    return state, commands


def _without(state: State, event: WorkerLost, at: float) -> Outcome:
    worker = event.worker
    is_member = worker in state.members
    if worker in state.leaving and not is_member:
        return departures.leave(state, worker, at)
    state, commands = failure_budget.count_loss(state, event, at)
    if is_member and state.phase is not Phase.OVER:
        state = replace(state, incident=recovery_timeline.found(state, at, lost=worker, reason=event.reason))
    return state, commands


def give_up_silent(state: State, at: float) -> Outcome:
    """Treat interrupted members that do not answer as lost.

    As long as they may hold state that no other worker does, they get more time: they may be compiling or reading.
    """
    answered = state.ready - state.awaited
    in_memory = isinstance(newest_source(state, answered), FromMemory)
    if not in_memory and at - state.since <= state.limits.progress_timeout_s:
        return state, []
    reason = f"did not answer within {at - state.since:.0f} s of being interrupted"
    killed: list[Command] = [KillWorker(worker=worker) for worker in sorted(state.awaited)]
    return prepend(
        all_lost(state, [WorkerLost(worker=worker, reason=reason) for worker in sorted(state.awaited)], at), killed
    )
