"""Checkpoints that the driver requests by itself: by time, and in place of one that was abandoned. Pure.

By time, one is requested `DriverConfig.save_every_s` after the newest one began. One that was abandoned is repeated at
the next step at which no other is being written: at once if a worker was lost, or else after a wait that doubles. A
request that is lost with its generation is repeated in the next one.
"""

from __future__ import annotations

from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Outcome, RequestSave
from raysharded.driver.state.state import GivenUpSave, Phase, Saving, State
from raysharded.ids import GenerationId

_LONGEST_WAIT_S = 60.0
"""Longest wait before a failed checkpoint is repeated."""


def begin(state: State, at: float, *, repeats: bool = False) -> State:
    """The state after a checkpoint, or training, has begun. `repeats`: it is one in place of another, not by time."""
    if state.save_requested_in is not None:
        state = replace(state, save_requested_in=None)
    return state if state.limits.save_every_s is None or repeats else replace(state, save_began_at=at)


def _is_due(state: State, at: float) -> bool:
    """Whether one by time is due."""
    every_s, began_at = state.limits.save_every_s, state.save_began_at
    return every_s is not None and began_at is not None and at - began_at >= every_s


def request_if_due(state: State, at: float) -> Outcome:
    """Request a checkpoint of the next step if one is due. Call it after every step report."""
    if state.limits.save_every_s is not None and state.save_began_at is None and state.phase is Phase.TRAINING:
        state = begin(state, at)
    elif _is_due(state, at) and _may_request(state):
        return _request(state)
    return repeat_if_due(state, at)


def repeat_if_due(state: State, at: float) -> Outcome:
    """Request a checkpoint in place of one that was abandoned. Call it also when training begins."""
    given_up = state.given_up
    if given_up is None or at < given_up.again_at or state.asked or not _may_request(state):
        return state, []  # another request leads to one in its place
    return _request(state) if state.step < state.limits.max_steps else (state, [])


def _may_request(state: State) -> bool:
    return state.phase is Phase.TRAINING and not state.saves and state.save_requested_in != state.generation


def _request(state: State) -> Outcome:
    state = replace(state, save_requested_in=state.generation)
    return state, [RequestSave(worker=state.members[0], generation=state.generation)]


# -- abandoned --


def is_repetition(state: State, at: float) -> bool:
    """Whether a requested checkpoint that begins now is one in place of another, and not the one by time."""
    return state.given_up is not None and state.save_requested_in == state.generation and not _is_due(state, at)


def failed(state: State, saving: Saving, at: float) -> State:
    """The state after a checkpoint has failed: another one is requested after a wait."""
    failures = 1 + (state.given_up.failures if state.given_up else 0)
    wait_s = min(_LONGEST_WAIT_S, state.limits.last_save_backoff_s * 2 ** min(failures - 1, 30))
    return _given_up(
        state,
        GivenUpSave(generation=saving.generation, step=saving.step, again_at=at + wait_s, failures=failures),
    )


def lost(state: State, generation: GenerationId, step: int) -> State:
    """The state after a checkpoint was lost with a worker: another one is requested at once."""
    return _given_up(state, GivenUpSave(generation=generation, step=step))


def _given_up(state: State, given_up: GivenUpSave) -> State:
    newest = state.checkpoint.step if state.checkpoint else 0
    if not newest < given_up.step < state.limits.max_steps:  # of the last step there is always another
        return state
    return replace(state, given_up=given_up)


def made_up_for(state: State, generation: GenerationId, step: int) -> State:
    """The state after this checkpoint was committed."""
    given_up = state.given_up
    if given_up is None or (step < given_up.step and generation <= given_up.generation):
        return state
    return replace(state, given_up=None)
