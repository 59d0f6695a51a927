"""Leave notices, and the workers that got one until they have left. Handlers of the machine.

A worker whose GPU does not work in its process any more leaves, too. Its process stays until the others have formed the
next generation: its host memory counts. If it alone holds a part of the newest step, it hands that over to the
generation, of which it is no member. It waits for workers of one, for a limited time (`driver/workers/departures.py`).

A bug of the task, such as an index out of range, fails on every GPU (`driver/workers/device_failures.py`). So a GPU is
refused only after its second failure (`driver/workers/admission.py`).
"""

from __future__ import annotations

from raysharded.driver.checkpoints import saves
from raysharded.driver.generation import lifecycle
from raysharded.driver.handlers import worker_loss
from raysharded.driver.membership import candidates
from raysharded.driver.membership.state_source import failed_devices, is_redundant, sources_of
from raysharded.driver.state import recovery_timeline
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, KillWorker, Outcome, Record, prepend
from raysharded.driver.state.events import LEAVERS
from raysharded.driver.state.persistent_map import without
from raysharded.driver.state.state import Departure, Phase, State
from raysharded.driver.workers import admission, departures, device_failures
from raysharded.errors import text_of
from raysharded.ids import WorkerId
from raysharded.protocol.messages import Stopped, StopReason
from raysharded.protocol.worker_launcher import LeaveNotice, WorkerLost

_DEVICE_FAILED_S = 300.0
"""Longest time that the process of a failed GPU stays while the others form a generation."""


def on_noticed(state: State, event: LeaveNotice, at: float) -> Outcome:
    """Exclude these workers from the next generation, and request others; at once if these stay for a while."""
    commands: list[Command] = []
    workers = _meant(state, event)
    if workers and not state.leaving:  # how long checkpoints take was measured when others left
        state = replace(state, leavers_save_s=None)
    for worker in sorted(workers):
        state, more = _mark(state, worker, event, at)
        commands += more
    doomed = dict.fromkeys(_machines(state, event), at + event.within_s)
    state = replace(state, terminating_nodes={**state.terminating_nodes, **doomed})
    if doomed and workers.isdisjoint(state.members):  # a worker that starts there again gets a notice again: wait first
        state = replace(state, start_after=max(state.start_after, at + state.limits.start_backoff_s))
    soon = state.phase is Phase.TRAINING and candidates.should_stop(state, at)
    if soon and state.staying.intersection(
        state.members
    ):  # the next generation forms first: starting a process meanwhile would slow it down
        return state, commands
    return prepend(admission.replace_missing(state, at), commands)


def on_stopped(state: State, worker: WorkerId, stopped: Stopped, at: float) -> Outcome:
    """Handle the end of a member's call; one whose GPU failed has to leave. It is no member when it hands over."""
    if worker in failed_devices(state) and worker not in state.members:
        return _handed_over(state, worker, stopped, at)
    is_news = stopped.generation == state.generation and worker in state.ready and worker not in state.leaving
    if stopped.reason is not StopReason.DEVICE or not is_news:
        return lifecycle.on_stopped(state, worker, stopped, at)
    device = state.facts[worker].device if worker in state.facts else ""
    state = device_failures.remember(state, worker, stopped)
    reason = text_of(stopped.error) if stopped.error is not None else "the GPU does not work"
    named = f"{device}: {reason}" if device else reason
    state, leaving = on_noticed(state, LeaveNotice(workers=(worker,), reason=named, within_s=_DEVICE_FAILED_S), at)
    return prepend(lifecycle.on_stopped(state, worker, stopped, at), leaving)


def _handed_over(state: State, worker: WorkerId, stopped: Stopped, at: float) -> Outcome:
    """End a generation to which this worker could not hand over: its members would wait for it."""
    is_in_vain = stopped.reason is StopReason.ABORTED and stopped.generation == state.generation
    if not is_in_vain or worker not in sources_of(state):
        return state, []
    reason = f"worker {worker}, whose GPU failed, could not hand over"
    state = replace(state, incident=recovery_timeline.found(state, at, reason=reason))
    return lifecycle.stop_all(state, at)


def _meant(state: State, event: LeaveNotice) -> frozenset[WorkerId]:
    """The notice's workers that are known, and all others on their nodes if the whole node is affected."""
    named = frozenset(event.workers)
    doomed = _machines(state, event)
    there = {worker for worker in state.ready if state.facts[worker].node_id in doomed}
    return (named & (state.ready | state.starting.keys())) | there


def _machines(state: State, event: LeaveNotice) -> frozenset[str]:
    """Ids of the nodes that the notice affects as a whole."""
    if not event.whole_node:
        return frozenset()
    return frozenset(state.facts[w].node_id for w in event.workers if w in state.facts) - {""}


def _mark(state: State, worker: WorkerId, event: LeaveNotice, at: float) -> Outcome:
    by, known = at + event.within_s, state.leaving.get(worker)
    if known is not None:
        return replace(state, leaving={**state.leaving, worker: replace(known, by=min(known.by, by))}), []
    node = state.facts[worker].node if worker in state.facts else ""
    fields = {"worker": worker, "step": state.step, "node": node, "reason": event.reason, "notice_s": event.within_s}
    record = Record(kind="worker_leaving", fields=fields, durable=True)
    state = replace(state, preemptions=state.preemptions + 1)
    if worker in state.starting:
        return replace(state, starting=without(state.starting, worker)), [record, KillWorker(worker=worker)]
    departure = Departure(reason=event.reason, since=at, by=by, step=state.step)
    return replace(state, leaving={**state.leaving, worker: departure}), [record]


def after_event(state: State, commands: list[Command], at: float) -> Outcome:
    """Handle pending departures after every event.

    Release workers that can go, request a boundary for those that could, and a checkpoint for those that are needed.
    """
    if state.phase is Phase.OVER or not state.leaving:
        return state, commands
    state, gone = departures.let_go(state, at)
    state, stopping = lifecycle.maybe_request_change(state, at) if state.phase is Phase.TRAINING else (state, [])
    state, asked = _ask_for_checkpoint(state, at)
    return state, [*commands, *gone, *stopping, *asked]


def _ask_for_checkpoint(state: State, at: float) -> Outcome:
    """Request a checkpoint at once, and another when the only worker has waited long enough for its replacement.

    If several workers must all leave, the other is the last one for which there is time. They leave after it.
    """
    told = {worker: state.leaving[worker] for worker in state.members if worker in state.leaving}
    if not told or (candidates.can_be_spared(state) and len(state.members) > 1):
        return state, []
    if candidates.has_to_save_again(state, at) and not all(departure.saves_last for departure in told.values()):
        again = {worker: replace(departure, step=state.step, saves_last=True) for worker, departure in told.items()}
        state, told = replace(state, leaving={**state.leaving, **again}), again
    wanted = max(departure.step for departure in told.values())
    newest = state.checkpoint.step if state.checkpoint else 0
    if state.phase is Phase.PAUSED and newest >= state.step:
        return state, []
    pending = LEAVERS in state.asked or any(LEAVERS in saving.answers for saving in state.saves.values())
    written = newest > wanted and (len(state.members) > 1 or candidates.awaits_successor(state, at))
    return (state, []) if pending or written else saves.ask(state, LEAVERS)


def after_checkpoint(state: State, step: int, at: float) -> Outcome:
    """Release members that must leave and alone hold their state: a checkpoint was committed."""
    commands: list[Command] = []
    going = [w for w in state.members if w in state.leaving and state.leaving[w].step < step]
    was_last = bool(going) and not state.staying and all(state.leaving[worker].saves_last for worker in going)
    if not was_last and (is_redundant(state) or candidates.awaits_successor(state, at)):
        return state, commands
    for worker in going:
        if state.phase not in (Phase.TRAINING, Phase.FORMING, Phase.STOPPING):
            break
        reason = f"left after the checkpoint of step {step}: {state.leaving[worker].reason}"
        state, lost = worker_loss.on_lost(state, WorkerLost(worker=worker, reason=reason), at)
        commands += [KillWorker(worker=worker, at_once=False), *lost]
    return state, commands
