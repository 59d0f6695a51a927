"""The driver's state machine: `step(state, event, at) -> (state, commands)`. The state changes nowhere else.

A generation goes through FORMING (members connect, build and receive the state) and TRAINING. Any failure leads to
STOPPING: every survivor is freed and reports what it holds. The next generation follows, or GATHERING if there are too
few workers. PAUSED waits for a resume request, CLOSING for the last checkpoint. Events of an older generation change
nothing.
"""

from __future__ import annotations

from raysharded.driver.checkpoints import save_timer, saves
from raysharded.driver.generation import lifecycle, link_tests, step_reports
from raysharded.driver.handlers import (
    hang_watchdog,
    leave_notice,
    link_reports,
    run_changes,
    user_requests,
    worker_death,
    worker_loss,
)
from raysharded.driver.membership import reachable
from raysharded.driver.rollback import non_finite, pending_overrides
from raysharded.driver.startup import adopted_workers
from raysharded.driver.state import recovery_timeline
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, End, Outcome, Poll, Record, finish, prepend
from raysharded.driver.state.events import (
    Annotation,
    CheckpointRequested,
    CommitFailed,
    Committed,
    Deleted,
    DrainRequested,
    Event,
    Fingerprinted,
    LeadershipLost,
    LearningRateRequested,
    MixtureWeightsRequested,
    Overtaken,
    PauseRequested,
    Ready,
    Recorded,
    ReshardRequested,
    ResizeRequested,
    ResumeRequested,
    RewindRequested,
    StopRequested,
    Tick,
    WorkerReply,
)
from raysharded.driver.state.state import Phase, State
from raysharded.driver.workers import admission, failure_budget, node_verdicts
from raysharded.errors import RunOwnedElsewhere
from raysharded.protocol.death import DeathExplained
from raysharded.protocol.link_messages import LinkReport
from raysharded.protocol.messages import GenerationReady, Prepared, ProbeReply, Progress, Saved, Stopped
from raysharded.protocol.worker_launcher import LeaveNotice, NodeBack, NodeLost, WorkerLost


def begin(state: State, at: float) -> Outcome:
    """The first commands of a run: start the maximum of workers and the spares, or continue with adopted workers."""
    if state.ready:
        return adopted_workers.go_on(state, at)
    return admission.start_workers(replace(state, since=at), state.limits.max_workers + state.limits.spares, at)


def step(state: State, event: Event, at: float) -> Outcome:
    """The next state and the commands. `at` is monotonic seconds."""
    was_over = state.phase is Phase.OVER
    state, commands = _after(state, event, at)
    if state.phase is not Phase.OVER or was_over or isinstance(event, LeadershipLost):
        return state, commands
    return state, [*pending_overrides.at_the_end(state), *saves.at_the_end(state), *commands]


def _after(state: State, event: Event, at: float) -> Outcome:
    state, commands = _on_event(state, event, at)
    waits = state.phase is Phase.STOPPING and not state.awaited and non_finite.cause(state) is not None
    if waits and not non_finite.must_wait(state):  # the awaited checkpoint is committed, or failed
        return prepend(lifecycle.all_stopped(state, at), commands)
    return state, commands


def _on_event(state: State, event: Event, at: float) -> Outcome:
    if state.phase is Phase.OVER:
        return state, []
    if state.stop_by is not None and at >= state.stop_by:
        return finish(state)
    return user_requests.after_event(*leave_notice.after_event(*_handle(state, event, at), at), at)


def _handle(state: State, event: Event, at: float) -> Outcome:
    match event:
        case Ready():
            state, commands = admission.admit(state, event, at)
            return prepend(lifecycle.maybe_request_change(state, at), commands)
        case WorkerLost():
            return worker_loss.on_lost(state, event, at)
        case DeathExplained():
            return worker_death.on_explained(state, event, at)
        case LeaveNotice():
            return leave_notice.on_noticed(state, event, at)
        case NodeLost():
            return node_verdicts.on_lost(state, event, at)
        case NodeBack():
            return node_verdicts.on_back(state, event, at)
        case WorkerReply():
            return _on_said(state, event, at)
        case Committed(step=done):
            before = state.checkpoint
            state, commands = saves.on_committed(state, event, at)
            state = state if state.checkpoint is before else failure_budget.got_further(state)
            return prepend(leave_notice.after_checkpoint(state, done, at), commands)
        case Fingerprinted(fingerprint=fingerprint):
            return finish(replace(state, result_fingerprint=fingerprint))
        case CommitFailed():
            return saves.on_commit_failed(state, event, at)
        case Overtaken():
            return saves.on_overtaken(state, event, at)
        case CheckpointRequested(request=request):
            return saves.ask(state, request)
        case StopRequested():
            return saves.stop(state, event, at)
        case ReshardRequested():
            return run_changes.ask_reshard(state, event, at)
        case LearningRateRequested():
            return run_changes.ask_rate(state, event, at)
        case MixtureWeightsRequested():
            return run_changes.ask_weights(state, event, at)
        case RewindRequested():
            return run_changes.ask_rewind(state, event, at)
        case Recorded():
            return run_changes.on_recorded(state, event, at)
        case Deleted():
            return run_changes.on_deleted(state, event), []
        case PauseRequested():
            return user_requests.pause(state, at)
        case ResumeRequested():
            return user_requests.resume(state, at)
        case ResizeRequested():
            return user_requests.resize(state, event, at)
        case DrainRequested():
            return user_requests.drain(state, event, at)
        case LeadershipLost(reason=reason):  # no journal entry: the journal is another driver's
            return replace(state, phase=Phase.OVER), [End(error=RunOwnedElsewhere(reason))]
        case Annotation(kind=kind, fields=fields):
            return state, [Record(kind=kind, fields=fields, durable=True)]
        case Tick():
            state, restored = node_verdicts.review(state, at)
            state, tested = link_reports.on_tick(state, at)
            commands = [*restored, *tested]
            return (state, commands) if state.phase is Phase.OVER else prepend(_watch(state, at), commands)


def _watch(state: State, at: float) -> Outcome:
    if state.phase is Phase.GATHERING or (state.phase is Phase.PAUSED and not saves.owing(state)):
        return _on_tick(state, at)
    state, watched = hang_watchdog.on_tick(state, at)
    return prepend(_on_tick(state, at), watched) if state.phase is not Phase.OVER else (state, watched)


def _on_said(state: State, event: WorkerReply, at: float) -> Outcome:
    match event.message:
        case GenerationReady() as formed:
            return lifecycle.on_formed(state, event.worker, formed, at)
        case Prepared() as prepared:
            return lifecycle.on_prepared(state, event.worker, prepared, at)
        case Stopped() as stopped:
            return leave_notice.on_stopped(state, event.worker, stopped, at)
        case Progress() as progress:
            return _on_progress(state, progress, at)
        case Saved() as saved:
            return saves.on_saved(state, event.worker, saved, at)
        case ProbeReply() as seen:
            return hang_watchdog.on_seen(state, event.worker, seen, at)
        case LinkReport() as report:
            return link_reports.on_report(state, event.worker, report, at)


def _on_progress(state: State, progress: Progress, at: float) -> Outcome:
    if progress.generation != state.generation or state.phase is not Phase.TRAINING:
        return state, []
    state, commands = step_reports.apply_reports(state, progress.reports, at)
    if state.phase is Phase.OVER:
        return state, commands
    commands.append(Poll(worker=state.members[0], generation=state.generation, after_step=state.step))
    if not progress.reports:
        return state, commands
    more: list[Command] = []
    if not state.boundary_requested:  # only now: starting a process would slow down the recovery, or a reshard
        state, more = admission.replace_missing(state, at)
    state, saving = save_timer.request_if_due(state, at)
    state, joining = lifecycle.maybe_request_change(state, at)
    state, asked = hang_watchdog.probe_all(state, at)
    return state, [*commands, *more, *saving, *joining, *asked]


def _on_tick(state: State, at: float) -> Outcome:
    waited = at - state.since
    limits = state.limits
    match state.phase:
        case Phase.GATHERING:
            state, decided = admission.decide_on_differing(state, at)
            if state.phase is Phase.OVER:
                return state, decided
            if len(reachable.usable(state)) < limits.min_workers and waited > limits.start_timeout_s:
                return prepend(finish(state, admission.too_few(state, link_tests.text(state))), decided)
            state, commands = admission.replace_missing(state, at)
            commands = [*decided, *commands]
            if state.members and waited < limits.replacement_wait_s:  # after a loss, not at the start
                return state, commands
            return prepend(lifecycle.maybe_request_change(state, at), commands)
        case Phase.PAUSED:
            return admission.replace_missing(state, at)
        case Phase.FORMING if state.awaited and waited > limits.form_timeout_s:
            state = replace(
                state, incident=recovery_timeline.found(state, at, reason=f"not formed within {waited:.0f} s")
            )
            return lifecycle.stop_all(state, at)
        case Phase.TRAINING if waited > saves.progress_timeout_s(state):
            state = replace(
                state, incident=recovery_timeline.found(state, at, reason=f"no progress for {waited:.0f} s")
            )
            return lifecycle.stop_all(state, at)
        case Phase.TRAINING:
            return lifecycle.maybe_request_change(state, at)
        case Phase.STOPPING if waited > limits.stop_timeout_s:
            return worker_loss.give_up_silent(state, at)
        case Phase.CLOSING if state.last_save_at is not None:
            return lifecycle.next_generation(state, at) if at >= state.last_save_at else (state, [])
        case Phase.CLOSING if not state.is_last_step_being_saved:  # the save of an older generation was abandoned
            return saves.close(state, at)
        case Phase.CLOSING if waited > limits.save_timeout_s:
            return finish(state, saves.cannot_write_the_last(state, f"not written within {limits.save_timeout_s} s"))
    return state, []
