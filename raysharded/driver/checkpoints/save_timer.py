"""Checkpoints by time: one is requested `DriverConfig.save_every_s` after the newest one began. Pure.

A request that is lost with its generation is repeated in the next one.
"""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver.state.commands import Outcome, RequestSave
from raysharded.driver.state.state import Phase, State


def begin(state: State, at: float) -> State:
    """The state after a checkpoint, or training, has begun."""
    return state if state.limits.save_every_s is None else replace(state, save_began_at=at, save_requested_in=None)


def request_if_due(state: State, at: float) -> Outcome:
    """Request a checkpoint of the next step if one is due. Call it after every step report."""
    every_s = state.limits.save_every_s
    if every_s is None or state.phase is not Phase.TRAINING:
        return state, []
    if state.save_began_at is None:
        return begin(state, at), []
    is_requested = state.save_requested_in == state.generation
    if state.saves or is_requested or at - state.save_began_at < every_s:
        return state, []
    state = replace(state, save_requested_in=state.generation)
    return state, [RequestSave(worker=state.members[0], generation=state.generation)]
