"""Workers that leave a run or have left it, and their effect on the state. Pure; below the generations."""

from __future__ import annotations

from raysharded.driver.checkpoints import saves
from raysharded.driver.membership.candidates import LAST_MOMENT_S, source_among, without_failed_devices
from raysharded.driver.membership.reachable import can_form, choose
from raysharded.driver.membership.state_source import failed_devices, newest_source
from raysharded.driver.state import broken_links
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, KillWorker, Outcome, Record
from raysharded.driver.state.state import Phase, State
from raysharded.driver.workers.device_failures import are_all_kept
from raysharded.ids import WorkerId


def let_go(state: State, at: float) -> Outcome:
    """End workers that must leave and are no longer needed."""
    commands: list[Command] = []
    going = frozenset(state.leaving).difference(state.members)
    if state.phase is Phase.GATHERING and state.holdings:
        going = _not_awaited(state, at)
        if going and not can_form(state, choose(state)):  # new workers may have waited for their GPUs
            state = replace(state, since=at)
    elif state.phase not in (Phase.TRAINING, Phase.CLOSING) and state.holdings:
        newest = newest_source(state, state.ready) if state.phase is Phase.PAUSED and going else None
        if newest is None or source_among(state, state.ready.difference(going), newest) is None:
            return state, commands  # their holdings may be needed
    for worker in sorted(going):
        owes = any(
            worker in saving.members and worker not in saving.parts and not saving.committing
            for saving in state.saves.values()
        )
        if owes and at < state.leaving[worker].by - LAST_MOMENT_S:
            continue  # its part of a checkpoint is not written yet
        state, left = leave(state, worker, at)
        commands += [KillWorker(worker=worker, at_once=False), *left]
    return state, commands


def _not_awaited(state: State, at: float) -> frozenset[WorkerId]:
    """Workers with a failed GPU that end although no generation has taken over what they hold.

    The others hold it, or there were too few others for half of the time that workers have to start: the new ones may
    need these GPUs. At once if no other GPU is known.
    """
    failed = failed_devices(state)
    if not failed:
        return failed
    needed = failed_devices(without_failed_devices(state))
    is_in_vain = not state.ready - failed and are_all_kept(state, needed)
    is_late = at - state.since >= state.limits.start_timeout_s / 2
    if is_in_vain or (is_late and not can_form(state, choose(state))):
        return failed
    return failed - needed


def leave(state: State, worker: WorkerId, at: float) -> Outcome:
    """Remove a worker that left and is no member: nothing is lost with it."""
    departure = state.leaving[worker]
    state, abandoned = saves.abandon_those_of(forget(state, worker), worker)
    fields = {"worker": worker, "step": state.step, "reason": departure.reason, "seconds": at - departure.since}
    return state, [Record(kind="worker_left", fields=fields), *abandoned]


def forget(state: State, worker: WorkerId) -> State:
    """The state without a worker that has exited."""
    return replace(
        state,
        ready=state.ready - {worker},
        awaited=state.awaited - {worker},
        links=broken_links.without(state.links, worker),
        leaving={w: departure for w, departure in state.leaving.items() if w != worker},
        holdings={w: stopped for w, stopped in state.holdings.items() if w != worker},
    )
