"""Budget of losses: they are counted against a limit. Handlers of the machine.

The final error names the first cause: later ones are often its consequence.
"""

from __future__ import annotations

from raysharded.driver.checkpoints import saves
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, Outcome, Record, prepend
from raysharded.driver.state.state import State
from raysharded.driver.workers import departures, node_verdicts
from raysharded.errors import RunFailed, StepFailed
from raysharded.ids import WorkerId
from raysharded.protocol.worker_launcher import WorkerLost


def count_loss(state: State, event: WorkerLost, at: float) -> Outcome:
    """The state without a lost worker that was ready; ends the run if too many were lost.

    A worker that got a leave notice does not count.
    """
    worker, told = event.worker, event.worker in state.leaving
    again = not told and state.generation != state.losing_generation
    first = "" if told else _told(state, worker, event.reason)
    node_id = event.node_id or (state.facts[worker].node_id if worker in state.facts else "")
    state = replace(
        departures.forget(state, worker),
        losses=state.losses + (not told),
        losses_without_step=state.losses_without_step + again,
        losing_step=max(state.losing_step, state.current_step) if again else state.losing_step,
        losing_generation=state.generation if again else state.losing_generation,
        first_loss=state.first_loss or first,
        first_loss_without_step=state.first_loss_without_step or first,
    )
    commands: list[Command] = [
        Record(kind="worker_lost", fields={"worker": worker, "step": state.step, "reason": event.reason}, durable=True)
    ]
    if not told or event.node_died:
        state, avoiding = node_verdicts.count_failure(state, node_id, event.reason, at, died=event.node_died)
        commands.extend(avoiding)
    state, abandoned = saves.abandon_those_of(state, worker)
    commands.extend(abandoned)
    error = _too_many_losses(state, _told(state, worker, event.reason))
    if error is None or state.ending is not None:  # then its last checkpoint is being written
        return state, commands
    return prepend(saves.end(state, error, at), commands)


def _told(state: State, worker: WorkerId, reason: str) -> str:
    return f"worker {worker} in step {state.current_step}: {reason}"


def _too_many_losses(state: State, last: str) -> RunFailed | None:
    limits = state.limits
    if limits.max_worker_losses is not None and state.losses > limits.max_worker_losses:
        return RunFailed(
            f"{state.losses} workers were lost, more than FailureConfig.max_worker_losses={limits.max_worker_losses}. "
            f"{_first_and_last(state.first_loss, last)}"
        )
    if state.losses_without_step > limits.max_losses_without_step:
        return StepFailed(
            f"workers were lost {state.losses_without_step} times in a row, and the run did not get past step "
            f"{state.losing_step}. {_first_and_last(state.first_loss_without_step, last)} Something in that step seems "
            "to end their processes: look at the workers' logs."
        )
    return None


def got_further(state: State) -> State:
    """The state after a new step or checkpoint: losses are counted anew."""
    ahead = tuple(death for death in state.deaths if death.step > state.step)  # its workers were ahead of their reports
    return replace(state, losses_without_step=0, losing_step=0, first_loss_without_step="", deaths=ahead)


def _first_and_last(first: str, last: str) -> str:
    return f"The first: {first}." if first == last else f"The first: {first}. The last: {last}."
