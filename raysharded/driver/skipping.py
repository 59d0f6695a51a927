"""Steps that are left out because a number of theirs is not finite: recorded, and bounded. A handler of the machine."""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver.events import Command, Record
from raysharded.driver.messages import StepReport
from raysharded.driver.outcome import Outcome, over, then
from raysharded.driver.state import State
from raysharded.errors import NonFiniteLoss


def note(state: State, report: StepReport) -> Outcome:
    """Take in a step that was reported: one that was left out is on record, and too many in a row end the run."""
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
    if not first <= report.step <= last + 1:  # one that is computed again is the same one
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
    return then(over(state, error), commands)
