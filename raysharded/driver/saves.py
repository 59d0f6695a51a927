"""Checkpoints that workers are writing: begun, put together, committed or abandoned. Handlers of the state machine."""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver.events import (
    AskFingerprint,
    CollectSave,
    Command,
    CommitFailed,
    CommitSave,
    Committed,
    Record,
    SumFingerprint,
)
from raysharded.driver.messages import Saved
from raysharded.driver.outcome import Outcome, over, then
from raysharded.driver.state import Checkpointed, Phase, Saving, State
from raysharded.errors import RunFailed
from raysharded.ids import WorkerId

_OLDER_KEPT = 16
"""Checkpoints before the newest to fall back to; retention may have deleted them."""


def begin(state: State, step: int, at: float) -> Outcome:
    """The workers have begun to write a checkpoint of `step`."""
    gone = sorted(set(state.members) - state.ready)
    if gone:  # the step became known only when the survivors stopped
        return state, [_lost_part(gone[0], step)]
    saving = Saving(generation=state.generation, step=step, members=state.members, since=at)
    return _with_save(state, saving), [CollectSave(generation=state.generation, step=step, members=state.members)]


def on_saved(state: State, worker: WorkerId, saved: Saved) -> Outcome:
    """A worker has written its part, or failed to."""
    saving = state.saves.get(saved.step)
    if saving is None or saved.generation != saving.generation or saving.committing:
        return state, []
    if saved.error is not None:
        return on_commit_failed(state, CommitFailed(step=saved.step, error=f"worker {worker}: {saved.error}"))
    saving = replace(saving, parts={**saving.parts, worker: saved})
    complete = len(saving.parts) == len(saving.members)
    state = _with_save(state, replace(saving, committing=complete))
    if not complete:
        return state, []
    parts = tuple(saving.parts[member] for member in saving.members)
    if saving.fingerprint_only:
        return state, [SumFingerprint(parts=parts)]
    return state, [CommitSave(generation=saving.generation, step=saving.step, parts=parts)]


def _with_save(state: State, saving: Saving) -> State:
    return replace(state, saves={**state.saves, saving.step: saving})


def _without_save(state: State, step: int) -> State:
    return replace(state, saves={other: saving for other, saving in state.saves.items() if other != step})


def on_committed(state: State, event: Committed) -> Outcome:
    """A checkpoint became real."""
    state = _without_save(state, event.step)
    if state.checkpoint is None or state.checkpoint.step < event.step:
        checkpoint = Checkpointed(step=event.step, prefix=event.prefix, fingerprint=event.fingerprint)
        older = (*state.older_checkpoints, *([state.checkpoint] if state.checkpoint else []))
        state = replace(state, checkpoint=checkpoint, older_checkpoints=older[-_OLDER_KEPT:])
    fields = {"step": event.step, "prefix": event.prefix, "fingerprint": event.fingerprint}
    commands: list[Command] = [Record(kind="checkpoint", fields=fields, durable=True)]
    if state.phase is Phase.CLOSING and event.step == state.limits.max_steps:
        return then(over(replace(state, result_fingerprint=event.fingerprint)), commands)
    return state, commands


def on_commit_failed(state: State, event: CommitFailed) -> Outcome:
    """A checkpoint will not become real; only the last one is worth failing for."""
    state = _without_save(state, event.step)
    commands: list[Command] = [
        Record(kind="checkpoint_failed", fields={"step": event.step, "error": event.error}, durable=True)
    ]
    if state.phase is Phase.CLOSING and event.step == state.limits.max_steps:
        error = RunFailed(f"the last checkpoint (step {event.step}) could not be written: {event.error}")
        return then(over(state, error), commands)
    return state, commands


def abandon_those_of(state: State, worker: WorkerId) -> Outcome:
    """A save whose member is lost before it delivered its part will never be complete."""
    commands: list[Command] = []
    for step_saved, saving in state.saves.items():
        if not saving.committing and worker in saving.members and worker not in saving.parts:
            state = _without_save(state, step_saved)
            if not saving.fingerprint_only:
                commands.append(_lost_part(worker, step_saved))
    return state, commands


def _lost_part(worker: WorkerId, step: int) -> Record:
    error = f"worker {worker} was lost before it had written its part"
    return Record(kind="checkpoint_failed", fields={"step": step, "error": error}, durable=True)


def close(state: State, at: float) -> Outcome:
    """All members finished: wait for the last checkpoint, or for the fingerprint alone."""
    state = replace(state, phase=Phase.CLOSING, since=at, incident=None)
    last, members, generation = state.limits.max_steps, state.members, state.generation
    if state.checkpoint is not None and state.checkpoint.step == last:
        return over(replace(state, result_fingerprint=state.checkpoint.fingerprint))
    if last in state.saves:
        return state, []
    only = not state.limits.save_at_end
    saving = Saving(generation=generation, step=last, members=members, since=at, fingerprint_only=only)
    if only:
        return _with_save(state, saving), [AskFingerprint(generation=generation, members=members)]
    return _with_save(state, saving), [CollectSave(generation=generation, step=last, members=members)]
