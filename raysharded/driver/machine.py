"""The driver's state machine: `step(state, event, at) -> (state, commands)`. The only place where the state changes.

A generation lives through FORMING (members connect, build and take over the state) and TRAINING; any failure leads to
STOPPING (every survivor is freed and says what it holds), then to the next generation, or to GATHERING when there are
too few workers. CLOSING waits for the last checkpoint. News of an older generation changes nothing.
"""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver import incidents, saves, starting
from raysharded.driver.events import (
    AskReport,
    Command,
    CommitFailed,
    Committed,
    Event,
    Fingerprinted,
    Form,
    Interrupt,
    KillWorker,
    Lost,
    Poll,
    Ready,
    Record,
    RequestBoundary,
    Said,
    StopRequested,
    Tick,
    Train,
)
from raysharded.driver.membership import choose_source, describe_source, order_members
from raysharded.driver.messages import (
    Formed,
    FromMemory,
    GenerationSpec,
    Progress,
    Saved,
    StepReport,
    Stopped,
    StopReason,
)
from raysharded.driver.outcome import Outcome, over, then
from raysharded.driver.state import Phase, State
from raysharded.errors import ClusterError, CorruptCheckpoint, IncompleteCheckpoint, NonFiniteLoss, RunFailed
from raysharded.ids import GenerationId, WorkerId

_BROKEN = (StopReason.ABORTED, StopReason.TASK_ERROR, StopReason.REFUSED)


def begin(state: State, at: float) -> Outcome:
    """The first commands of a run: ask for as many workers as it may have."""
    return starting.start_workers(replace(state, since=at), state.limits.max_workers, at)


def step(state: State, event: Event, at: float) -> Outcome:
    """The next state and what to do. `at` is monotonic seconds."""
    if state.phase is Phase.OVER:
        return state, []
    match event:
        case Ready():
            state, commands = starting.admit(state, event, at)
            return then(_consider_joining(state, at), commands)
        case Lost():
            return _on_lost(state, event, at)
        case Said():
            return _on_said(state, event, at)
        case Committed():
            return saves.on_committed(state, event)
        case Fingerprinted(fingerprint=fingerprint):
            return over(replace(state, result_fingerprint=fingerprint))
        case CommitFailed():
            return saves.on_commit_failed(state, event)
        case StopRequested():
            return over(replace(state, stop_requested=True))
        case Tick():
            return _on_tick(state, at)


def _on_said(state: State, event: Said, at: float) -> Outcome:
    match event.message:
        case Formed() as formed:
            return _on_formed(state, event.worker, formed, at)
        case Stopped() as stopped:
            return _on_stopped(state, event.worker, stopped, at)
        case Progress() as progress:
            return _on_progress(state, progress, at)
        case Saved() as saved:
            return saves.on_saved(state, event.worker, saved)


# -- workers come and go --


def _on_lost(state: State, event: Lost, at: float) -> Outcome:
    worker = event.worker
    if worker in state.starting:
        return starting.failed_to_start(state, event, at)
    if worker not in state.ready:
        return state, []
    state = replace(
        state,
        ready=state.ready - {worker},
        awaited=state.awaited - {worker},
        holdings={w: stopped for w, stopped in state.holdings.items() if w != worker},
        losses=state.losses + 1,
        losses_without_step=state.losses_without_step + 1,
    )
    commands: list[Command] = [
        Record(kind="worker_lost", fields={"worker": worker, "step": state.step, "reason": event.reason}, durable=True)
    ]
    state, abandoned = saves.abandon_those_of(state, worker)
    commands.extend(abandoned)
    limit = state.limits.max_worker_losses
    if limit is not None and state.losses > limit:
        error = RunFailed(
            f"{state.losses} workers were lost, more than FailureConfig.max_worker_losses={limit}; "
            f"the last: {event.reason}"
        )
        return then(over(state, error), commands)
    if state.losses_without_step > state.limits.max_losses_without_step:
        error = RunFailed(
            f"{state.losses_without_step} workers were lost in a row without a step between; the last: {event.reason}. "
            f"Something in step {state.step + 1} seems to end their processes: look at the workers' logs."
        )
        return then(over(state, error), commands)
    if worker in state.members:
        state = replace(state, incident=incidents.found(state, at, lost=worker, reason=event.reason))
    match state.phase:
        case Phase.GATHERING:
            return then(starting.replace_missing(state, at), commands)
        case _ if worker not in state.members:
            return state, commands
        case Phase.FORMING | Phase.TRAINING:
            return then(_stop_all(state, at), commands)
        case Phase.STOPPING if not state.awaited:
            return then(_all_stopped(state, at), commands)
        case Phase.CLOSING if (
            state.limits.max_steps not in state.saves
        ):  # the others still hold the state: save it again
            return then(_next_generation(state, at), commands)
    return state, commands


def _consider_joining(state: State, at: float) -> Outcome:
    """Take in workers that are ready: by a first generation, or at the next boundary of the current one."""
    settled = not state.starting or at - state.last_ready_at >= state.limits.join_wait_s
    if state.phase is Phase.GATHERING:
        enough = len(state.ready) >= state.limits.min_workers
        full = len(state.ready) >= state.limits.max_workers
        return _next_generation(state, at) if full or (enough and settled) else (state, [])
    joiners = state.ready.difference(state.members)
    progressed = state.step > state.generation_start_step
    if state.phase is not Phase.TRAINING or state.boundary_requested or not (joiners and settled and progressed):
        return state, []
    state = replace(state, boundary_requested=True)
    return state, [RequestBoundary(worker=state.members[0], generation=state.generation)]


# -- a generation's life --


def _next_generation(state: State, at: float) -> Outcome:
    if len(state.ready) < state.limits.min_workers:
        return _gather(state, at)
    source = choose_source(state.holdings, state.ready, state.checkpoint)
    members = order_members(source, state.ready, state.limits)
    generation = GenerationId(state.generation + 1)
    host, port, keys = state.rendezvous
    spec = GenerationSpec(
        generation=generation,
        members=members,
        source=source,
        host=host,
        port=port,
        prefix=f"{keys}/g{generation}",
    )
    state = replace(
        state,
        phase=Phase.FORMING,
        since=at,
        generation=generation,
        members=members,
        awaited=frozenset(members),
        stops={},
        boundary_requested=False,
        step=source.step,
        generation_start_step=source.step,
        incident=incidents.resumed(state.incident, source.step, describe_source(source)),
    )
    fields = {
        "generation": generation,
        "members": list(members),
        "step": source.step,
        "source": describe_source(source),
    }
    return state, [Record(kind="generation", fields=fields, durable=True), Form(spec=spec)]


def _gather(state: State, at: float) -> Outcome:
    return starting.replace_missing(
        replace(state, phase=Phase.GATHERING, since=at, start_failures=0, start_after=0.0), at
    )


def _on_formed(state: State, worker: WorkerId, formed: Formed, at: float) -> Outcome:
    if formed.generation != state.generation:
        return state, []
    if state.phase is Phase.STOPPING:  # it formed before it heard that another did not
        return state, [AskReport(worker=worker, generation=state.generation)]
    if state.phase is not Phase.FORMING:
        return state, []
    state = replace(state, awaited=state.awaited - {worker})
    if state.awaited:
        return state, []
    state = replace(state, phase=Phase.TRAINING, since=at, awaited=frozenset(state.members), holdings={})
    state = replace(state, incident=incidents.formed(state.incident, at))
    return state, [
        Train(generation=state.generation, members=state.members),
        Poll(worker=state.members[0], generation=state.generation, after_step=state.step),
        Record(
            kind="formed",
            fields={
                "generation": state.generation,
                "seconds": dict(formed.seconds),
                "bytes_received": formed.bytes_received,
                "bytes_read": formed.bytes_read,
            },
        ),
    ]


def _stop_all(state: State, at: float) -> Outcome:
    """Free every member that has not stopped yet; those that already formed are idle and are only asked."""
    waiting = [worker for worker in state.members if worker in state.ready and worker not in state.stops]
    commands: list[Command] = []
    for worker in waiting:
        idle = state.phase is Phase.FORMING and worker not in state.awaited
        kind = AskReport if idle else Interrupt
        commands.append(kind(worker=worker, generation=state.generation))
    state = replace(state, phase=Phase.STOPPING, since=at, awaited=frozenset(waiting))
    return then(_all_stopped(state, at), commands) if not waiting else (state, commands)


def _on_stopped(state: State, worker: WorkerId, stopped: Stopped, at: float) -> Outcome:
    if stopped.generation != state.generation or worker not in state.ready:
        return state, []
    state, commands = _take_reports(state, stopped.reports, at)
    state = replace(
        state,
        stops={**state.stops, worker: stopped},
        holdings={**state.holdings, worker: stopped},
        awaited=state.awaited - {worker},
    )
    if stopped.reason in _BROKEN and state.phase in (Phase.FORMING, Phase.TRAINING):
        state = replace(state, incident=incidents.found(state, at))
        return then(_stop_all(state, at), commands)
    if state.awaited or state.phase not in (Phase.TRAINING, Phase.STOPPING):
        return state, commands
    return then(_all_stopped(state, at), commands)


def _all_stopped(state: State, at: float) -> Outcome:
    """Every member of the generation has said what it holds, or is lost: decide how to go on."""
    state = replace(state, incident=incidents.stopped(state.incident, state.step, at))
    stops = list(state.stops.values())
    refused = [s for s in stops if s.reason is StopReason.REFUSED]
    errors = [s for s in stops if s.reason is StopReason.TASK_ERROR]
    if refused:
        return _refused(state, refused[0].error, at)
    if errors:
        failing = max(s.step for s in errors) + 1
        state = replace(state, task_errors=state.task_errors + 1, failing_step=failing)
        hopeless = isinstance(errors[0].error, NonFiniteLoss)
        if hopeless or state.task_errors > state.limits.task_error_retries:
            return over(state, errors[0].error)
    lost = not state.ready.issuperset(state.members)  # one that stopped first may be lost all the same
    if not lost and all(s.reason is StopReason.FINISHED for s in stops):
        return saves.close(state, at)
    planned = all(s.reason is StopReason.BOUNDARY for s in stops)
    progressed = state.step > state.generation_start_step
    idle = 0 if lost or planned or progressed else state.idle_generations + 1
    state = replace(state, idle_generations=idle)
    if idle > state.limits.max_idle_generations:
        return over(state, RunFailed(f"{idle} generations in a row failed without a loss: {stops[0].error}"))
    if lost and state.limits.replacement_wait_s > 0 and len(state.ready) < state.limits.max_workers:
        return _gather(state, at)
    return _next_generation(state, at)


def _refused(state: State, error: BaseException | None, at: float) -> Outcome:
    """Trying the same again would not help; but a damaged checkpoint may have an older one before it."""
    damaged = isinstance(error, CorruptCheckpoint | IncompleteCheckpoint)
    if not damaged or state.checkpoint is None or not state.older_checkpoints:
        return over(state, error)
    fields = {"step": state.checkpoint.step, "reason": str(error)}
    *older, newest = state.older_checkpoints
    state = replace(state, checkpoint=newest, older_checkpoints=tuple(older))
    return then(_next_generation(state, at), [Record(kind="checkpoint_skipped", fields=fields, durable=True)])


def _on_progress(state: State, progress: Progress, at: float) -> Outcome:
    if progress.generation != state.generation or state.phase is not Phase.TRAINING:
        return state, []
    state, commands = _take_reports(state, progress.reports, at)
    commands.append(Poll(worker=state.members[0], generation=state.generation, after_step=state.step))
    if not progress.reports:
        return state, commands
    state, more = starting.replace_missing(state, at)  # only now: starting a process would slow the recovery down
    state, joining = _consider_joining(state, at)
    return state, [*commands, *more, *joining]


def _take_reports(state: State, reports: tuple[StepReport, ...], at: float) -> Outcome:
    commands: list[Command] = []
    for report in reports:
        if report.generation != state.generation or report.step <= state.step:
            continue
        state = replace(state, step=report.step, since=at, idle_generations=0, losses_without_step=0)
        if report.step >= state.failing_step:
            state = replace(state, task_errors=0)
        commands.append(Record(kind="step", fields=report.fields()))
        if state.incident is not None and state.incident.formed_at is not None:  # or else this step was before the loss
            commands.append(incidents.over(state.incident, state, report, at))
            state = replace(state, incident=None)
        if report.save_started:
            state, more = saves.begin(state, report.step, at)
            commands.extend(more)
    return state, commands


# -- time --


def _on_tick(state: State, at: float) -> Outcome:
    waited = at - state.since
    limits = state.limits
    match state.phase:
        case Phase.GATHERING:
            if len(state.ready) < limits.min_workers and waited > limits.start_timeout_s:
                return over(state, _too_few(state))
            state, commands = starting.replace_missing(state, at)
            if state.members and waited < limits.replacement_wait_s:  # after a loss, not at the start
                return state, commands
            return then(_consider_joining(state, at), commands)
        case Phase.FORMING if waited > limits.form_timeout_s:
            return _stop_all(state, at)
        case Phase.TRAINING if waited > limits.progress_timeout_s:
            state = replace(state, incident=incidents.found(state, at, reason=f"no progress for {waited:.0f} s"))
            return _stop_all(state, at)
        case Phase.TRAINING:
            return _consider_joining(state, at)
        case Phase.STOPPING if waited > limits.stop_timeout_s:
            return _give_up_silent(state, at)
        case Phase.CLOSING if waited > limits.save_timeout_s:
            error = f"not written within {limits.save_timeout_s} s"
            return saves.on_commit_failed(state, CommitFailed(step=limits.max_steps, error=error))
    return state, []


def _give_up_silent(state: State, at: float) -> Outcome:
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
        state, more = _on_lost(state, Lost(worker=worker, reason=reason), at)
        commands.extend(more)
        if state.phase is Phase.OVER:
            break
    return state, commands


def _too_few(state: State) -> ClusterError:
    limits = state.limits
    return ClusterError(
        f"{len(state.ready)} of at least {limits.min_workers} workers could be started within "
        f"{limits.start_timeout_s:.0f} s; {len(state.starting)} still wait for resources. Add nodes, ask for less per "
        "worker, lower the minimum in ScalingConfig.num_workers, or raise ScalingConfig.start_timeout_s."
    )
