"""The driver's state machine: `step(state, event, at) -> (state, commands)`. The only place where the state changes.

A generation lives through FORMING (members connect, build and take over the state) and TRAINING; any failure leads to
STOPPING (every survivor is freed and says what it holds), then to the next generation, or to GATHERING when there are
too few workers. PAUSED waits until somebody ends it, CLOSING for the last checkpoint. News of an older generation
changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver import (
    asking,
    budgets,
    controlling,
    deciding,
    generations,
    incidents,
    leaving,
    losing,
    reports,
    rewinding,
    saves,
    starting,
    takeover,
    watching,
)
from raysharded.driver.commands import Command, End, Outcome, Poll, Record, over, then
from raysharded.driver.events import (
    CheckpointRequested,
    CommitFailed,
    Committed,
    Deleted,
    Disowned,
    DrainRequested,
    Event,
    Fingerprinted,
    LearningRateRequested,
    Lost,
    Noticed,
    Overtaken,
    PauseRequested,
    Ready,
    Recorded,
    Remark,
    ReshardRequested,
    ResizeRequested,
    ResumeRequested,
    RewindRequested,
    Said,
    StopRequested,
    Tick,
)
from raysharded.driver.messages import Formed, Prepared, Progress, Saved, Seen, Stopped
from raysharded.driver.state import Phase, State
from raysharded.errors import RunOwnedElsewhere


def begin(state: State, at: float) -> Outcome:
    """The first commands of a run: ask for as many workers as it may have, and its spares, or go on with those that
    there are."""
    if state.ready:
        return takeover.go_on(state, at)
    return starting.start_workers(replace(state, since=at), state.limits.max_workers + state.limits.spares, at)


def step(state: State, event: Event, at: float) -> Outcome:
    """The next state and what to do. `at` is monotonic seconds."""
    was_over = state.phase is Phase.OVER
    state, commands = _after(state, event, at)
    if state.phase is not Phase.OVER or was_over or isinstance(event, Disowned):
        return state, commands
    return state, [*deciding.at_the_end(state), *commands]


def _after(state: State, event: Event, at: float) -> Outcome:
    state, commands = _on_event(state, event, at)
    waits = state.phase is Phase.STOPPING and not state.awaited and rewinding.cause(state) is not None
    if waits and not rewinding.must_wait(state):  # the checkpoint that it waited for is committed, or failed
        return then(generations.all_stopped(state, at), commands)
    return state, commands


def _on_event(state: State, event: Event, at: float) -> Outcome:
    if state.phase is Phase.OVER:
        return state, []
    if state.stop_by is not None and at >= state.stop_by:
        return over(state)
    return controlling.attend(*leaving.attend(*_handle(state, event, at), at), at)


def _handle(state: State, event: Event, at: float) -> Outcome:
    match event:
        case Ready():
            state, commands = starting.admit(state, event, at)
            return then(generations.consider_joining(state, at), commands)
        case Lost():
            return losing.on_lost(state, event, at)
        case Noticed():
            return leaving.on_noticed(state, event, at)
        case Said():
            return _on_said(state, event, at)
        case Committed(step=done):
            before = state.checkpoint
            state, commands = saves.on_committed(state, event, at)
            state = state if state.checkpoint is before else budgets.got_further(state)
            return then(leaving.after_checkpoint(state, done, at), commands)
        case Fingerprinted(fingerprint=fingerprint):
            return over(replace(state, result_fingerprint=fingerprint))
        case CommitFailed():
            return saves.on_commit_failed(state, event, at)
        case Overtaken():
            return saves.on_overtaken(state, event, at)
        case CheckpointRequested(request=request):
            return saves.ask(state, request)
        case StopRequested():
            return saves.stop(state, event, at)
        case ReshardRequested():
            return asking.ask_reshard(state, event, at)
        case LearningRateRequested():
            return asking.ask_rate(state, event, at)
        case RewindRequested():
            return asking.ask_rewind(state, event, at)
        case Recorded():
            return asking.on_recorded(state, event, at)
        case Deleted():
            return asking.on_deleted(state, event), []
        case PauseRequested():
            return controlling.pause(state, at)
        case ResumeRequested():
            return controlling.resume(state, at)
        case ResizeRequested():
            return controlling.resize(state, event, at)
        case DrainRequested():
            return controlling.drain(state, event, at)
        case Disowned(reason=reason):  # not even a word in the journal: it is another's
            return replace(state, phase=Phase.OVER), [End(error=RunOwnedElsewhere(reason))]
        case Remark(kind=kind, fields=fields):
            return state, [Record(kind=kind, fields=fields, durable=True)]
        case Tick() if state.phase not in (Phase.GATHERING, Phase.PAUSED, Phase.OVER):
            state, watched = watching.on_tick(state, at)
            return then(_on_tick(state, at), watched) if state.phase is not Phase.OVER else (state, watched)
        case Tick():
            return _on_tick(state, at)


def _on_said(state: State, event: Said, at: float) -> Outcome:
    match event.message:
        case Formed() as formed:
            return generations.on_formed(state, event.worker, formed, at)
        case Prepared() as prepared:
            return generations.on_prepared(state, event.worker, prepared, at)
        case Stopped() as stopped:
            return generations.on_stopped(state, event.worker, stopped, at)
        case Progress() as progress:
            return _on_progress(state, progress, at)
        case Saved() as saved:
            return saves.on_saved(state, event.worker, saved, at)
        case Seen() as seen:
            return watching.on_seen(state, event.worker, seen, at)


def _on_progress(state: State, progress: Progress, at: float) -> Outcome:
    if progress.generation != state.generation or state.phase is not Phase.TRAINING:
        return state, []
    state, commands = reports.take(state, progress.reports, at)
    if state.phase is Phase.OVER:
        return state, commands
    commands.append(Poll(worker=state.members[0], generation=state.generation, after_step=state.step))
    if not progress.reports:
        return state, commands
    more: list[Command] = []
    if not state.boundary_requested:  # only now: starting a process would slow the recovery, or a reshard, down
        state, more = starting.replace_missing(state, at)
    state, joining = generations.consider_joining(state, at)
    state, asked = watching.look_around(state, at)
    return state, [*commands, *more, *joining, *asked]


def _on_tick(state: State, at: float) -> Outcome:
    waited = at - state.since
    limits = state.limits
    match state.phase:
        case Phase.GATHERING:
            state, decided = starting.decide_on_differing(state, at)
            if state.phase is Phase.OVER:
                return state, decided
            if len(state.ready) < limits.min_workers and waited > limits.start_timeout_s:
                return then(over(state, starting.too_few(state)), decided)
            state, commands = starting.replace_missing(state, at)
            commands = [*decided, *commands]
            if state.members and waited < limits.replacement_wait_s:  # after a loss, not at the start
                return state, commands
            return then(generations.consider_joining(state, at), commands)
        case Phase.PAUSED:
            return starting.replace_missing(state, at)
        case Phase.FORMING if state.awaited and waited > limits.form_timeout_s:
            state = replace(state, incident=incidents.found(state, at, reason=f"not formed within {waited:.0f} s"))
            return generations.stop_all(state, at)
        case Phase.TRAINING if waited > saves.progress_timeout_s(state):
            state = replace(state, incident=incidents.found(state, at, reason=f"no progress for {waited:.0f} s"))
            return generations.stop_all(state, at)
        case Phase.TRAINING:
            return generations.consider_joining(state, at)
        case Phase.STOPPING if waited > limits.stop_timeout_s:
            return losing.give_up_silent(state, at)
        case Phase.CLOSING if state.last_save_at is not None:
            return generations.next_generation(state, at) if at >= state.last_save_at else (state, [])
        case Phase.CLOSING if not state.is_last_step_being_saved:  # that of an older generation was given up
            return saves.close(state, at)
        case Phase.CLOSING if waited > limits.save_timeout_s:
            return over(state, saves.cannot_write_the_last(state, f"not written within {limits.save_timeout_s} s"))
    return state, []
