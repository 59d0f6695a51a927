"""Going back to a checkpoint because a number is not finite, and on past the data of the steps since. Pure.

A rewind is decided once for a checkpoint: what goes wrong again before a newer one is written is not the data.
"""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver import incidents
from raysharded.driver.events import Record
from raysharded.driver.messages import Stopped, StopReason
from raysharded.driver.outcome import Outcome, over
from raysharded.driver.state import State
from raysharded.errors import NonFiniteLoss
from raysharded.skips import rewound, skipped_before


def cause(state: State) -> Stopped | None:
    """The member whose step was not finite, if that is to be answered by going back."""
    if not state.limits.rewind:
        return None
    errors = [stop for stop in state.stops.values() if stop.reason is StopReason.TASK_ERROR]
    return next((stop for stop in errors if isinstance(stop.error, NonFiniteLoss)), None)


def must_wait(state: State) -> bool:
    """Whether a checkpoint is still being written: it is of a step before the one that went wrong."""
    return any(not saving.fingerprint_only for saving in state.saves.values())


def rewind(state: State, stopped: Stopped, at: float) -> Outcome:
    """The state from which the next generation begins at the newest checkpoint; the end, the second time."""
    bad = stopped.step + 1
    to_step = state.checkpoint.step if state.checkpoint else 0
    reason = str(stopped.error)
    if state.rewound is not None and state.rewound[0] == to_step:
        where = f"the checkpoint of step {to_step}" if to_step else "the start"
        return over(
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
        distrusted=state.generation,
        task_errors=0,
        incident=incidents.found(state, at, reason=f"step {bad} was not finite"),
    )
    return state, [Record(kind="rewind", fields=fields, durable=True)]
