"""Response to a number that is not finite. Handlers of the machine.

Either the step is skipped, recorded and counted against a limit; or the run goes back to a step whose checkpoint was
due, and skips the data of the steps since. That step depends on the failed one alone, not on the checkpoints that there
are: the bits follow from it. If its checkpoint is missing, steps are repeated from an older one. The run goes back once
to a step: if it fails again before the next due checkpoint, the data is not the cause.
"""

from __future__ import annotations

from raysharded.driver.checkpoints import protected
from raysharded.driver.state import recovery_timeline
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, DeleteCheckpoints, Outcome, Record, finish, prepend
from raysharded.driver.state.state import State
from raysharded.errors import NonFiniteLoss
from raysharded.overrides import rewound, skipped_before
from raysharded.protocol.messages import StepReport, Stopped, StopReason


def cause(state: State) -> Stopped | None:
    """The member whose step was not finite, if the run responds by going back."""
    if not state.limits.rewind:
        return None
    errors = [stop for stop in state.stops.values() if stop.reason is StopReason.TASK_ERROR]
    return next((stop for stop in errors if isinstance(stop.error, NonFiniteLoss)), None)


def must_wait(state: State) -> bool:
    """Whether a checkpoint of a step before the failed one is still being written."""
    return any(not saving.fingerprint_only for saving in state.saves.values())


def rewind(state: State, stopped: Stopped, at: float) -> Outcome:
    """The state whose next generation repeats the steps since a due checkpoint; the second time the run ends."""
    bad = stopped.step + 1
    to_step, known = protected.due_before(state, bad), protected.known(state)
    left = tuple(checkpoint for checkpoint in known if checkpoint.step <= to_step)
    reason = str(stopped.error)
    if state.rewound is not None and state.rewound[0] == to_step:
        where = f"step {to_step}" if to_step else "the start"
        why = f"The run had gone back to {where} before, and on past the data that was read then, because of "
        return finish(state, NonFiniteLoss(f"{reason}\n{why}{state.rewound[1]}"))
    if to_step and known and not left:
        why = f"The run would go back to step {to_step}, and there is no checkpoint of that step or an older one."
        return finish(state, NonFiniteLoss(f"{reason}\n{why} Keep more: CheckpointConfig(keep_last=...)."))
    batch = state.limits.global_batch_size
    before = state.decisions.skips
    skips = rewound(before, to_step=to_step, bad_step=bad, global_batch_size=batch)
    undone = [checkpoint.prefix for checkpoint in known if checkpoint not in left]
    undone += protected.unconfirmed_after(state, to_step)
    fields = {
        "step": bad,
        "to_step": to_step,
        "skip_samples": skipped_before(skips, to_step + 1) - skipped_before(before, to_step + 1),
        "skips": [list(skip) for skip in skips],
        "reason": reason,
        **({"distrusted": undone} if undone else {}),
    }
    state = replace(
        state,
        decisions=replace(state.decisions, skips=skips),
        reached=to_step,
        checkpoint=left[-1] if left else None,
        older_checkpoints=left[:-1],
        rewound=(to_step, reason),
        unconfirmed_saves=tuple(one for one in state.unconfirmed_saves if one[0] <= to_step),
        stops={},
        holdings={},
        invalidated_up_to=state.generation,
        invalidated_after=to_step,
        task_errors=0,
        incident=recovery_timeline.found(state, at, reason=f"step {bad} was not finite"),
    )
    commands: list[Command] = [Record(kind="rewind", fields=fields, durable=True)]
    return state, [*commands, DeleteCheckpoints(prefixes=tuple(undone))] if undone else commands


def note_skipped(state: State, report: StepReport) -> Outcome:
    """Handle a reported step: a skipped one is recorded, and too many in a row end the run."""
    if report.skipped is None:
        return replace(state, skipped_steps=None, first_skip=""), []
    fields = {
        "step": report.step,
        "what": report.skipped.what,
        "loss": report.skipped.loss,
        "microbatches": list(report.skipped.microbatches),
    }
    commands: list[Command] = [Record(kind="step_skipped", fields=fields)]
    first, last = state.skipped_steps or (report.step, report.step)
    if not first <= report.step <= last + 1:  # a repeated step counts once
        first = report.step
    text = f"step {report.step}: {report.skipped.text()}" if first == report.step else state.first_skip
    state = replace(state, skipped_steps=(first, report.step), first_skip=text)
    count, limit = report.step - first + 1, state.limits.max_skipped_steps
    if count <= limit:
        return state, commands
    error = NonFiniteLoss(
        f"{count} steps in a row ({first} to {report.step}) had a loss or gradient that is not finite, more than "
        f"FailureConfig.max_skipped_steps={limit}; the first: {text}. Lower the learning rate, set max_grad_norm, or "
        "look at the data of these steps; then resume from a checkpoint before them."
    )
    return prepend(finish(state, error), commands)
