"""Requested rewind: the run goes back to a checkpoint and continues from there. Pure.

Later steps are undone: their checkpoints are deleted once the journal records the rewind, and their state in memory is
not used. Until then nothing changes: if the checkpoint cannot be read, the run continues as before.
"""

from __future__ import annotations

from typing import Any

from raysharded.driver.checkpoints.protected import known, unconfirmed_after
from raysharded.driver.membership.state_source import clamp_leave_steps, trusted
from raysharded.driver.state.changed import replace
from raysharded.driver.state.events import ASKED
from raysharded.driver.state.state import PendingOverrides, Rewinding, State
from raysharded.ids import GenerationId
from raysharded.overrides import Decisions, consumed, passed_over, rates_before, skipped_before, weights_before
from raysharded.protocol.messages import save_prefix

_NAMED = 12
"""Largest number of existing checkpoints that a refusal names."""


def refusal(state: State, step: int) -> str:
    """Reason why the run cannot go back to its checkpoint of a step, in one sentence; empty if it can."""
    if state.step >= state.limits.max_steps:
        return f"the run has done its last step, {state.step}: fork it from the checkpoint of step {step}."
    steps = sorted({checkpoint.step for checkpoint in known(state)})
    if step in steps:
        return ""
    if not steps:
        return f"there is no checkpoint of step {step}, nor of any other yet: ask again when one is committed."
    listed = f"{'... ' if len(steps) > _NAMED else ''}{', '.join(map(str, steps[-_NAMED:]))}"
    return f"there is no checkpoint of step {step}: give one of the steps that there are checkpoints of: {listed}."


def wanted(state: State, step: int, *, skip_data: bool, number: int) -> Rewinding:
    """The rewind to the newest checkpoint of a step that is not refused; `number`: the request's."""
    of_step = [checkpoint for checkpoint in known(state) if checkpoint.step == step]
    return Rewinding(checkpoint=of_step[-1], skip_data=skip_data, number=number)


def decisions_after(state: State, rewinding: Rewinding) -> Decisions:
    """The decisions after a rewind: those of undone steps are dropped, except for skipped data."""
    before, to_step = state.decisions, rewinding.checkpoint.step
    skips = tuple(skip for skip in before.skips if skip[0] <= to_step)
    if rewinding.skip_data and state.reached > to_step:
        batch = state.limits.global_batch_size
        skips = passed_over(before.skips, to_step=to_step, done_step=state.reached, global_batch_size=batch)
    position = consumed(before.skips, to_step, state.limits.global_batch_size)
    weights = weights_before(before.weights, position)
    return Decisions(skips=skips, rates=rates_before(before.rates, to_step + 1), weights=weights)


def undo(state: State, plan: PendingOverrides, rewinding: Rewinding) -> tuple[State, dict[str, Any]]:
    """The state after the rewind, with its generation formed from the checkpoint; and the fields of entry `rewind`."""
    target, to_step = rewinding.checkpoint, rewinding.checkpoint.step
    gone = [checkpoint.prefix for checkpoint in known(state) if checkpoint.step > to_step]
    gone += unconfirmed_after(state, to_step)
    late = [saving for saving in state.saves.values() if saving.step > to_step]
    being_written = [
        save_prefix(saving.step, saving.generation, state.driver) for saving in late if not saving.fingerprint_only
    ]
    last = GenerationId(state.generation - 1)
    passed_over = [skipped_before(skips, to_step + 1) for skips in (plan.decisions.skips, state.decisions.skips)]
    fields = {
        "step": state.reached,
        "to_step": to_step,
        "skip_samples": passed_over[0] - passed_over[1],
        **decisions_after(state, rewinding).fields(),
        "reason": "asked for",
        "who": ASKED,
        "generation": last,
        "distrusted": [*gone, *being_written],
    }
    left = [checkpoint for checkpoint in known(state) if checkpoint.step <= to_step and checkpoint != target]
    state = replace(
        state,
        checkpoint=target,
        older_checkpoints=tuple(left),
        saves={key: saving for key, saving in state.saves.items() if saving.step <= to_step},
        asked=(*state.asked, *(request for saving in late for request in saving.answers)),
        unconfirmed_saves=tuple(one for one in state.unconfirmed_saves if one[0] <= to_step),
        given_up=None,
        invalidated_up_to=last,
        invalidated_after=to_step,
        rolled_back=(*state.rolled_back, *gone),
        step=to_step,
        generation_start_step=to_step,
        reached=to_step,
        leaving=clamp_leave_steps(state.leaving, to_step),
        verified_step=min(state.verified_step, to_step),
        rewound=None,
        corrupted=None,
        skipped_steps=None,
        first_skip="",
        task_errors=0,
        failing_step=min(state.failing_step, to_step),
        losing_step=min(state.losing_step, to_step),
    )
    if state.incident is not None:  # undone steps are not computed again
        state = replace(state, incident=replace(state.incident, step_before=to_step))
    return replace(state, holdings={w: trusted(state, held) for w, held in state.holdings.items()}), fields
