"""Response to a number that is not finite. Handlers of the machine.

Either the step is skipped, recorded and counted against a limit; or the run goes back to a checkpoint and skips the
data of the steps since. The run goes back once for a checkpoint: if a step fails again before a newer one is written,
the data is not the cause.
"""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver.state import recovery_timeline
from raysharded.driver.state.commands import Command, Outcome, Record, finish, prepend
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
    """The state from which the next generation begins at the newest checkpoint; ends the run the second time."""
    bad = stopped.step + 1
    to_step = state.checkpoint.step if state.checkpoint else 0
    reason = str(stopped.error)
    if state.rewound is not None and state.rewound[0] == to_step:
        where = f"the checkpoint of step {to_step}" if to_step else "the start"
        return finish(
            state,
            NonFiniteLoss(
                f"{reason}\nThe run had gone back to {where} before, and on past the data that was read then, because "
                f"of {state.rewound[1]}"
            ),
        )
    batch = state.limits.global_batch_size
    before = state.decisions.skips
    skips = rewound(before, to_step=to_step, bad_step=bad, global_batch_size=batch)
    fields = {
        "step": bad,
        "to_step": to_step,
        "skip_samples": skipped_before(skips, to_step + 1) - skipped_before(before, to_step + 1),
        "skips": [list(skip) for skip in skips],
        "reason": reason,
    }
    state = replace(
        state,
        decisions=replace(state.decisions, skips=skips),
        reached=to_step,
        rewound=(to_step, reason),
        stops={},
        holdings={},
        invalidated_up_to=state.generation,
        task_errors=0,
        incident=recovery_timeline.found(state, at, reason=f"step {bad} was not finite"),
    )
    return state, [Record(kind="rewind", fields=fields, durable=True)]


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
