"""Checkpoints that workers are writing: begun, completed, committed, skipped or failed. Handlers of the machine.

Training never waits for a checkpoint, and stops for a failed one only if configured. Only the last checkpoint is
retried; if it fails, the run fails.
"""

from __future__ import annotations

from raysharded.display.quantities import count
from raysharded.driver.checkpoints import protected, save_timer
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import (
    Answer,
    AskFingerprint,
    CollectSave,
    Command,
    CommitSave,
    DeleteCheckpoints,
    Outcome,
    Record,
    RequestSave,
    SaveSnapshot,
    SumFingerprint,
    finish,
    prepend,
)
from raysharded.driver.state.events import LEAVERS, NOBODY, CommitFailed, Committed, Overtaken, StopRequested
from raysharded.driver.state.state import Checkpointed, Pause, Phase, Saving, State
from raysharded.errors import RunFailed
from raysharded.ids import GenerationId, WorkerId
from raysharded.protocol.messages import Saved, StepReport, save_prefix

# -- begun, or not --


def on_report(state: State, report: StepReport, at: float) -> Outcome:
    """Handle what a step report states about checkpoints: one was begun, one was skipped, or neither."""
    state = replace(state, measured_step=report.step, measured=report.measured())
    if report.save_late:
        return state, [_late(state, report.step, at)]
    if not report.save_started:
        return state, []
    gone = sorted(set(state.members) - state.ready)
    if gone:  # the step became known only when the survivors stopped
        state = save_timer.lost(state, state.generation, report.step)
        return state, [_given_up(report.step, _lost_part(gone[0]))]
    return _begin(state, report.step, at, answers=report.save_asked)


def _begin(state: State, step: int, at: float, *, answers: bool) -> Outcome:
    saving = Saving(
        generation=state.generation,
        step=step,
        members=state.members,
        since=at,
        measured=state.measured if state.measured_step == step else {},
        answers=state.asked if answers else (),
        repeats=answers and save_timer.is_repetition(state, at),
    )
    state = replace(_with_save(state, saving), asked=() if answers else state.asked)
    state = save_timer.begin(replace(state, newest_save=(state.generation, step)), at, repeats=saving.repeats)
    return state, [CollectSave(generation=state.generation, step=step, members=state.members)]


def _late(state: State, step: int, at: float) -> Record:
    oldest = min(state.saves.values(), key=lambda saving: saving.since, default=None)
    writing = {} if oldest is None else {"writing": oldest.step, "since_s": at - oldest.since}
    return Record(kind="checkpoint_late", fields={"step": step, **writing})


# -- completed --


def on_saved(state: State, worker: WorkerId, saved: Saved, at: float) -> Outcome:
    """Handle a worker's part of a save: written, or failed."""
    saving = state.saves.get((saved.generation, saved.step))
    if saving is None or saving.committing:
        return state, []
    if saved.unknown:
        return _on_unknown(state, saving, f"worker {worker}: {saved.error}", at)
    if saved.error is not None:
        return _on_storage_failure(state, saving, f"worker {worker}: {saved.error}", at)
    saving = replace(saving, parts={**saving.parts, worker: saved})
    complete = len(saving.parts) == len(saving.members)
    state = _with_save(state, replace(saving, committing=complete))
    if not complete:
        return state, []
    parts = tuple(saving.parts[member] for member in saving.members)
    if saving.fingerprint_only:
        return state, [SumFingerprint(parts=parts)]
    commit = CommitSave(generation=saving.generation, step=saving.step, parts=parts, measured=saving.measured)
    return state, [commit]


def _with_save(state: State, saving: Saving) -> State:
    return replace(state, saves={**state.saves, (saving.generation, saving.step): saving})


def owing(state: State) -> frozenset[WorkerId]:
    """Workers that have not delivered their part of a checkpoint or fingerprint."""
    return frozenset(worker for one in state.saves.values() for worker in one.members if worker not in one.parts)


def _without_save(state: State, generation: GenerationId, step: int) -> State:
    return replace(state, saves={key: saving for key, saving in state.saves.items() if key != (generation, step)})


def on_committed(state: State, event: Committed, at: float) -> Outcome:
    """Handle a committed checkpoint."""
    saving = state.saves.get((event.generation, event.step))
    state = replace(_without_save(state, event.generation, event.step), failed_saves=0)
    state = save_timer.made_up_for(state, event.generation, event.step)
    if saving is not None and LEAVERS in saving.answers and len(state.members) > 1 and not state.staying:
        state = replace(state, leavers_save_s=at - saving.since)
    if protected.is_undone(state, event.generation, event.step):
        return _delete(state, event.prefix)
    if state.checkpoint is None or state.checkpoint.step <= event.step:  # of two of a step the newer stays
        checkpoint = Checkpointed(
            step=event.step, prefix=event.prefix, fingerprint=event.fingerprint, digest=event.digest
        )
        state = replace(state, checkpoint=checkpoint, older_checkpoints=protected.known(state))
    commands: list[Command] = [_committed(event, saving, at)]
    answers = saving.answers if saving else ()
    if event.step == state.limits.max_steps:  # no newer checkpoint follows
        state, others = _without_requests(state)
        answers = (*answers, *others)
    if answers:
        commands.append(Answer(requests=answers, step=event.step, prefix=event.prefix))
    if state.phase is Phase.CLOSING and event.step == state.limits.max_steps:
        return prepend(finish(replace(state, result_fingerprint=event.fingerprint)), commands)
    if NOBODY in answers and event.step < state.limits.max_steps:  # at the last step the run finishes anyway
        return prepend(finish(state), commands)
    return state, commands


def _delete(state: State, prefix: str) -> Outcome:
    """Delete an undone checkpoint: with the others, if the journal has yet to record the rollback."""
    if state.unrecorded is not None:
        return replace(state, rolled_back=(*state.rolled_back, prefix)), []
    return state, [DeleteCheckpoints(prefixes=(prefix,))]


def _committed(event: Committed, saving: Saving | None, at: float) -> Record:
    fields: dict[str, object] = {"step": event.step, "prefix": event.prefix, "fingerprint": event.fingerprint}
    if saving is not None:
        parts = saving.parts.values()
        files = [record for part in parts for record in part.files]
        fields |= {
            "bytes": sum(record.size_bytes for record in files),
            "files": len(files),
            "seconds": at - saving.since,
            "write_s": max(part.seconds for part in parts),
            "retries": event.retries + sum(part.retries for part in parts),
        }
    return Record(kind="checkpoint", fields=fields, durable=True)


# -- failed --


def on_commit_failed(state: State, event: CommitFailed, at: float) -> Outcome:
    """Handle a failed commit of a checkpoint whose parts are written. Storage may have it all the same."""
    saving = state.saves.get((event.generation, event.step))
    prefix = save_prefix(event.step, event.generation, state.driver)
    if protected.is_undone(state, event.generation, event.step):
        return _delete(state, prefix)
    state = replace(state, unconfirmed_saves=protected.with_unconfirmed(state, event.step, prefix))
    return (state, []) if saving is None else _on_storage_failure(state, saving, event.error, at)


def on_overtaken(state: State, event: Overtaken, at: float) -> Outcome:
    """Handle a checkpoint that a newer one has overtaken: parts may arrive in another order than they were begun.

    Its requests are answered with the newer checkpoint, unless that is of an older step.
    """
    saving = state.saves.get((event.generation, event.step))
    if saving is None:
        return state, []
    newest = state.checkpoint
    if newest is None or newest.step < saving.step:
        return _on_unknown(state, saving, event.reason, at)
    state = _without_save(state, saving.generation, saving.step)
    commands: list[Command] = [
        Record(kind="checkpoint_overtaken", fields={"step": saving.step, "newest": newest.step}, durable=True)
    ]
    if saving.answers:
        commands.append(Answer(requests=saving.answers, step=newest.step, prefix=newest.prefix))
    return prepend(finish(state), commands) if NOBODY in saving.answers else (state, commands)


def _on_unknown(state: State, saving: Saving, error: str, at: float) -> Outcome:
    """Abandon a save that failed without a storage error, and request another one for its requesters."""
    state = _without_save(state, saving.generation, saving.step)
    state = replace(save_timer.failed(state, saving, at), asked=(*state.asked, *saving.answers))
    commands: list[Command] = [_given_up(saving.step, error)]
    if state.phase is not Phase.CLOSING or saving.step < state.limits.max_steps:
        return prepend(request_save(state) if saving.answers else (state, []), commands)
    current = saving.generation == state.generation
    return prepend(_retry_the_last(state, error, at) if current else close(state, at), commands)


def _on_storage_failure(state: State, saving: Saving, error: str, at: float) -> Outcome:
    """Report the failure to the requesters.

    The driver repeats its own requests, made before it stops or a worker leaves.
    """
    state = save_timer.failed(_without_save(state, saving.generation, saving.step), saving, at)
    state, commands = _failed(state, saving, error)
    told = tuple(request for request in saving.answers if request > NOBODY)
    if told:
        commands.insert(0, Answer(requests=told, step=saving.step, error=error))
    if state.phase is Phase.OVER:
        return state, commands
    if state.phase is Phase.CLOSING and saving.step == state.limits.max_steps:
        return prepend(_retry_the_last(state, error, at), commands)
    again = tuple(r for r in saving.answers if r == NOBODY or (r == LEAVERS and state.leaving))
    return prepend(request_save(replace(state, asked=(*state.asked, *again))), commands) if again else (state, commands)


def _retry_the_last(state: State, error: str, at: float) -> Outcome:
    limits, failures = state.limits, state.last_save_failures + 1
    if failures > limits.last_save_retries:
        return finish(state, cannot_write_the_last(state, error))
    wait_s = limits.last_save_backoff_s * 2 ** (failures - 1)
    return replace(state, last_save_failures=failures, last_save_at=at + wait_s), []


def cannot_write_the_last(state: State, error: str) -> RunFailed:
    """Error of a run that did all its steps but could not write its last checkpoint."""
    return RunFailed(f"the last checkpoint (step {state.limits.max_steps}) could not be written: {error}")


def abandon_those_of(state: State, worker: WorkerId) -> Outcome:
    """Abandon saves that wait for a lost worker's part. Their requests pass to the next checkpoint."""
    commands: list[Command] = []
    for saving in state.saves.values():
        if not saving.committing and worker in saving.members and worker not in saving.parts:
            state = _without_save(state, saving.generation, saving.step)
            state = replace(state, asked=(*state.asked, *saving.answers))
            if not saving.fingerprint_only:
                state = save_timer.lost(state, saving.generation, saving.step)
                commands.append(_given_up(saving.step, _lost_part(worker)))
    return state, commands


def at_the_end(state: State) -> list[Command]:
    """Entries about checkpoints that the run's end leaves unwritten. One that is being committed may still be."""
    return [
        _given_up(saving.step, "the run ended before all of its workers had written their parts")
        for saving in state.saves.values()
        if not (saving.committing or saving.fingerprint_only)
    ]


def left_by_earlier_driver(step: int) -> Record:
    """Entry about a checkpoint that an earlier driver began, and that nobody commits any more."""
    return _given_up(step, "its driver ended before it was committed")


def _lost_part(worker: WorkerId) -> str:
    return f"worker {worker} was lost before it had written its part"


def _given_up(step: int, error: str) -> Record:
    """Record of an abandoned save. It does not count towards repeated storage failures."""
    return Record(kind="checkpoint_failed", fields={"step": step, "error": error, "counted": False}, durable=True)


def _failed(state: State, saving: Saving, error: str) -> Outcome:
    """Record a failed checkpoint, and report repeated failures prominently.

    One that repeats another does not count: how many may fail is a number of due checkpoints.
    """
    step, limits, newest = saving.step, state.limits, state.checkpoint.step if state.checkpoint else 0
    if saving.repeats:
        return state, [_given_up(step, error)]
    commands: list[Command] = [Record(kind="checkpoint_failed", fields={"step": step, "error": error}, durable=True)]
    if step <= newest:  # a newer checkpoint exists: nothing is missing
        return state, commands
    state = replace(state, failed_saves=state.failed_saves + 1)
    if state.failed_saves < limits.max_failed_saves:
        return state, commands
    fields = {"step": step, "failed": state.failed_saves, "newest": newest, "error": error}
    commands.append(Record(kind="checkpoints_failing", fields=fields, durable=True))
    if not limits.stop_on_failed_saves:
        return state, commands
    since = f"since step {newest}" if newest else "at all"
    reason = RunFailed(
        f"{state.failed_saves} checkpoints in a row could not be written, and there is none {since}; the last, of step "
        f"{step}: {error}. The run stops here because of CheckpointConfig.on_failed_saves='stop'."
    )
    return prepend(finish(state, reason), commands)


# -- requested --


def ask(state: State, request: int) -> Outcome:
    """Request a checkpoint of the next step, in this generation or the next one."""
    return request_save(replace(state, asked=(*state.asked, request)))


def _without_requests(state: State) -> tuple[State, tuple[int, ...]]:
    """The state without its unanswered requests, and these requests."""
    requests = [*state.asked, *(request for saving in state.saves.values() for request in saving.answers)]
    saves = {key: replace(saving, answers=()) for key, saving in state.saves.items()}
    return replace(state, asked=(), saves=saves), tuple(requests)


def request_save(state: State) -> Outcome:
    """Forward pending checkpoint requests to the workers. Call it also when they begin to train."""
    if not state.asked or state.phase is not Phase.TRAINING:
        return state, []
    return state, [RequestSave(worker=state.members[0], generation=state.generation)]


def save_held(state: State, at: float) -> Outcome:
    """Have the members write the step that they hold, between two steps."""
    state, collect = _begin(state, state.step, at, answers=True)
    return state, [SaveSnapshot(generation=state.generation, members=state.members), *collect]


def join(state: State, step: int) -> State:
    """Answer pending requests with the checkpoint of the held step that this generation is writing."""
    saving = state.saves[state.generation, step]
    return replace(_with_save(state, replace(saving, answers=(*saving.answers, *state.asked))), asked=())


def stop(state: State, event: StopRequested, at: float) -> Outcome:
    """End the run: now, or after one more checkpoint if there are new steps to save."""
    again, state = state.stop_requested, replace(state, stop_requested=True)
    newest = state.checkpoint.step if state.checkpoint else 0
    if again or event.checkpoint_within_s is None or state.step <= newest:
        return finish(state)
    state = replace(state, stop_by=at + event.checkpoint_within_s)
    return (state, []) if state.phase is Phase.CLOSING else ask(state, NOBODY)


def end(state: State, error: BaseException | None, at: float) -> Outcome:
    """End the run with this error; first write the newest complete step, if the workers hold it and no checkpoint does.

    They stand still for it as in a pause. It is tried once.
    """
    newest, limits = state.checkpoint.step if state.checkpoint else 0, state.limits
    busy = state.phase in (Phase.FORMING, Phase.TRAINING, Phase.STOPPING)
    is_new = newest < state.step < limits.max_steps
    if error is None or state.ending is not None or not (busy and is_new and limits.save_at_end):
        return finish(state, error)
    if state.wanted_rewind is not None or state.plan is not None:  # what comes next is not decided
        return finish(state, error)
    by = at + limits.save_timeout_s
    return replace(
        state,
        ending=error,
        pause=Pause(asked_at=at),
        asked=(*state.asked, NOBODY),
        stop_by=by if state.stop_by is None else min(by, state.stop_by),
    ), []


def stop_warning(state: State) -> str:
    """A sentence about a stop that waits for its checkpoint; empty without one."""
    if not state.stop_requested or state.phase is Phase.OVER:
        return ""
    newest = state.checkpoint.step if state.checkpoint else 0
    failed = f" ({count(state.failed_saves, 'attempt')} failed)" if state.failed_saves else ""
    return (
        f"a stop was requested: it ends when a checkpoint of a step after {newest} is committed{failed}; another stop "
        "ends it without one"
    )


# -- the last one --


def progress_timeout_s(state: State) -> float:
    """Longest time without progress in training. After the last step, workers may wait for the previous checkpoint."""
    limits = state.limits
    waits = limits.save_at_end and state.step >= limits.max_steps
    return max(limits.progress_timeout_s, limits.save_timeout_s) if waits else limits.progress_timeout_s


def close(state: State, at: float) -> Outcome:
    """Wait for the last checkpoint, or for the fingerprint alone, after all members finished."""
    state = replace(state, phase=Phase.CLOSING, since=at, incident=None, last_save_at=None)
    if state.step < state.limits.max_steps:  # a user's loop has made this the run's last step
        state = replace(state, limits=replace(state.limits, max_steps=state.step))
    last, members, generation = state.limits.max_steps, state.members, state.generation
    if state.checkpoint is not None and state.checkpoint.step == last:
        prefix, fingerprint = state.checkpoint.prefix, state.checkpoint.fingerprint
        state, requests = _without_requests(state)
        answer = Answer(requests=requests, step=last, prefix=prefix)
        return prepend(finish(replace(state, result_fingerprint=fingerprint)), [answer] if requests else [])
    if state.is_last_step_being_saved:
        return state, []
    if state.limits.save_at_end:
        return _begin(state, last, at, answers=True)
    saving = Saving(generation=generation, step=last, members=members, since=at, fingerprint_only=True)
    return _with_save(state, saving), [AskFingerprint(generation=generation, members=members)]
