"""Workers whose GPU does not work in their process any more. Handlers of the machine.

Such a worker leaves: it is replaced, and no member of the next generation, as far as the others hold the state. Its
process stays until they have formed it, as its host memory can still be read about and its mirrors count. If the run
needs what it alone holds, it is asked to form once more, ends itself, and the run continues from a checkpoint.

A bug of the task, such as an index out of range, fails on every GPU. So a GPU is refused only after its second failure.
"""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver.generation import lifecycle
from raysharded.driver.handlers import leave_notice
from raysharded.driver.state.commands import Outcome, prepend
from raysharded.driver.state.persistent_map import with_entry
from raysharded.driver.state.state import State
from raysharded.errors import text_of
from raysharded.ids import WorkerId
from raysharded.protocol.messages import Stopped, StopReason
from raysharded.protocol.worker_launcher import LeaveNotice

_LEAVES_WITHIN_S = 300.0
"""Longest time that the process stays while the others form a generation."""


def on_stopped(state: State, worker: WorkerId, stopped: Stopped, at: float) -> Outcome:
    """Handle the end of a member's call; one whose GPU failed has to leave."""
    is_news = stopped.generation == state.generation and worker in state.ready and worker not in state.leaving
    if stopped.reason is not StopReason.DEVICE or not is_news:
        return lifecycle.on_stopped(state, worker, stopped, at)
    device = state.facts[worker].device if worker in state.facts else ""
    if device:
        failures = state.device_failures.get(device, 0) + 1
        state = replace(state, device_failures=with_entry(state.device_failures, device, failures))
    reason = text_of(stopped.error) if stopped.error is not None else "the GPU does not work"
    notice = LeaveNotice(
        workers=(worker,), reason=f"{device}: {reason}" if device else reason, within_s=_LEAVES_WITHIN_S
    )
    state, leaving = leave_notice.on_noticed(state, notice, at)
    return prepend(lifecycle.on_stopped(state, worker, stopped, at), leaving)
