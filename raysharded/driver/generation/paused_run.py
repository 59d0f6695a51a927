"""A paused run: its workers are idle between two steps, and the state stays in their memory. Pure.

If a worker is lost or must leave, the others form a generation that does no step. Everything is then held twice again,
and a leaving worker has handed over what it held.
"""

from __future__ import annotations

from raysharded.driver.checkpoints import saves
from raysharded.driver.membership import candidates
from raysharded.driver.membership.state_source import newest_source
from raysharded.driver.state import step_watch
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Answer, Command, Outcome, Record, finish, prepend
from raysharded.driver.state.events import LEAVERS, NOBODY
from raysharded.driver.state.state import Phase, State
from raysharded.protocol.messages import FromMemory, StopReason


def holds_back(state: State) -> bool:
    """Whether a pause keeps the next step from beginning. After the last step the run ends: see `too_late`."""
    return state.pause is not None and state.phase is not Phase.CLOSING and state.step < state.limits.max_steps


def enter(state: State, at: float) -> Outcome:
    """Pause: no worker computes."""
    pause = state.pause
    assert pause is not None
    first = pause.reached_at is None
    state = replace(
        state,
        phase=Phase.PAUSED,
        since=at,
        pause=replace(pause, reached_at=at) if first else pause,
        watch=step_watch.at_rest(state.watch),
        awaited=frozenset(),
        boundary_requested=False,
        preparation=None,
    )
    fields = {"step": state.step, "workers": sorted(state.ready)}
    return state, [Record(kind="paused", fields=fields)] if first and state.ending is None else []


def too_late(state: State) -> Outcome:
    """Refuse the pause: the last step is done."""
    if state.pause is None:
        return state, []
    fields = {"step": state.step, "reason": "the last step is done"}
    return replace(state, pause=None), [Record(kind="pause_refused", fields=fields, durable=True)]


def is_whole(state: State) -> bool:
    """Whether all members of the generation are alive, and stopped between two steps."""
    stops = [state.stops.get(member) for member in state.members if member in state.ready]
    there = [stop for stop in stops if stop is not None and stop.reason is StopReason.BOUNDARY]
    return bool(state.members) and len(there) == len(state.members)


def look(state: State) -> tuple[State, bool]:
    """Whether the workers should form a generation that does no step; checked once for the same workers."""
    key = (state.ready, frozenset(state.leaving))
    assert state.pause is not None
    if state.pause.tried == key or (is_whole(state) and not candidates.can_be_spared(state)):
        return state, False
    state = replace(state, pause=replace(state.pause, tried=key))
    enough = len(state.ready) >= state.limits.min_workers
    return state, enough and isinstance(newest_source(state, state.ready), FromMemory)


def answer(state: State, at: float) -> Outcome:
    """Answer checkpoint requests with a checkpoint of the held step, or with the reason why not.

    The driver's own requests stay pending.
    """
    newest, step, asked = state.checkpoint, state.step, state.asked
    if newest is not None and newest.step >= step:
        told = Answer(requests=asked, step=newest.step, prefix=newest.prefix)
        state = replace(state, asked=())
        return prepend(finish(state), [told]) if NOBODY in asked else (state, [told])
    if (state.generation, step) in state.saves:
        return saves.join(state, step), []
    reason = why_not_saved(state)
    if not reason:
        return (state, []) if state.saves else saves.save_held(state, at)
    people = tuple(request for request in asked if request not in (NOBODY, LEAVERS))
    state = replace(state, asked=tuple(request for request in asked if request not in people))
    commands: list[Command] = [Answer(requests=people, step=step, error=reason)] if people else []
    return state, commands


def save_rested(state: State, at: float) -> Outcome:
    """Have workers that were too few to continue, and formed a generation without a step, write what they hold."""
    rested = state.relayed and state.has_trained and state.step > state.saved_step
    return saves.save_held(state, at) if rested and not why_not_saved(state) else (state, [])


def why_not_saved(state: State) -> str:
    """Reason why the held state of a paused run cannot be saved; empty if it can."""
    if state.step == 0:
        return "the run is paused, and no step is done"
    if not is_whole(state):
        return "the run is paused, and too few workers are there to write it; resume the run first"
    if state.newest_save == (state.generation, state.step):
        return "the run is paused, and writing it has failed before; resume the run first"
    return ""
