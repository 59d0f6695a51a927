"""Workers that are lost while the run needs them. Handlers of the machine."""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver import budgets, departing, generations, incidents, starting
from raysharded.driver.events import Command, KillWorker, Lost
from raysharded.driver.membership import choose_source
from raysharded.driver.messages import FromMemory
from raysharded.driver.outcome import Outcome, then
from raysharded.driver.state import Phase, State


def on_lost(state: State, event: Lost, at: float) -> Outcome:
    worker = event.worker
    if worker in state.starting:
        return starting.failed_to_start(state, event, at)
    if worker not in state.ready:
        return state, []
    if worker in state.leaving and worker not in state.members:
        state, left = departing.leave(state, worker, at)
        return then(starting.replace_missing(state, at) if state.phase is Phase.GATHERING else (state, []), left)
    state, commands = budgets.count_loss(state, event)
    if state.phase is Phase.OVER:
        return state, commands
    if worker in state.members:
        state = replace(state, incident=incidents.found(state, at, lost=worker, reason=event.reason))
    match state.phase:
        case Phase.GATHERING:
            return then(starting.replace_missing(state, at), commands)
        case _ if worker not in state.members:
            return state, commands
        case Phase.FORMING | Phase.TRAINING:
            return then(generations.stop_all(state, at), commands)
        case Phase.STOPPING if not state.awaited:
            return then(generations.all_stopped(state, at), commands)
        case Phase.CLOSING if not state.is_last_step_being_saved:  # the others still hold the state: save it again
            return then(generations.next_generation(state, at), commands)
    return state, commands


def give_up_silent(state: State, at: float) -> Outcome:
    """Members that were told to stop and do not answer are treated as lost.

    As long as they may hold what nobody else does, they get more time: they may be compiling, or reading.
    """
    answered = state.ready - state.awaited
    in_memory = isinstance(choose_source(state.holdings, answered, state.checkpoint), FromMemory)
    if not in_memory and at - state.since <= state.limits.progress_timeout_s:
        return state, []
    commands: list[Command] = []
    for worker in sorted(state.awaited):
        commands.append(KillWorker(worker=worker))
        reason = f"did not answer within {at - state.since:.0f} s of being interrupted"
        state, more = on_lost(state, Lost(worker=worker, reason=reason), at)
        commands.extend(more)
        if state.phase is Phase.OVER:
            break
    return state, commands
