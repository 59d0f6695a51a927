"""Requested changes at the next step boundary: learning rate, mixture, rewind, mesh. Handlers of the machine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raysharded.driver.checkpoints import protected
from raysharded.driver.generation import lifecycle
from raysharded.driver.rollback import pending_overrides, rewind
from raysharded.driver.startup import persisted_requests
from raysharded.driver.state.changed import replace
from raysharded.driver.state.commands import Command, DeleteCheckpoints, Outcome, Record, prepend
from raysharded.driver.state.events import (
    Deleted,
    LearningRateRequested,
    MixtureWeightsRequested,
    Recorded,
    ReshardRequested,
    RewindRequested,
)
from raysharded.driver.state.mesh_choice import Grouping
from raysharded.driver.state.state import Phase, State, WantedRate, WantedWeights
from raysharded.layout import possible_degree


def rate_refusal(state: State, factor: float) -> str:
    """Reason why the learning rate cannot be the task's times `factor`, in one sentence; empty if it can."""
    if not math.isfinite(factor) or factor < 0:
        return f"the learning rate cannot be the task's times {factor}: give a finite factor of 0 or more."
    return (
        pending_overrides.last_step_is_done(state)
        if pending_overrides.first_step(state) > state.limits.max_steps
        else ""
    )


def weights_refusal(state: State, weights: Sequence[tuple[str, float]]) -> str:
    """Reason why the mixture cannot have these weights, in one sentence; empty if it can, as its sources decide."""
    if not all(math.isfinite(weight) and weight >= 0 for _, weight in weights) or not sum(w for _, w in weights) > 0:
        return "the weights of a mixture are finite numbers of 0 or more, and one of them is above 0."
    return pending_overrides.has_no_weights(state) or (
        pending_overrides.last_step_is_done(state)
        if pending_overrides.first_step(state) > state.limits.max_steps
        else ""
    )


rewind_refusal = rewind.refusal


def ask_rate(state: State, event: LearningRateRequested, at: float) -> Outcome:
    """Train with another learning rate from the next boundary on."""
    why = rate_refusal(state, event.factor)
    if why:
        return state, [pending_overrides.refused_rate(state, event.factor, why)]
    number = state.changes_asked + 1
    wanted = WantedRate(factor=event.factor, number=number)
    return _soon(replace(state, wanted_rate=wanted, changes_asked=number), at)


def ask_weights(state: State, event: MixtureWeightsRequested, at: float) -> Outcome:
    """Read the sources with other weights from the next boundary on."""
    why = weights_refusal(state, event.weights)
    if why:
        return state, [pending_overrides.refused_weights(state, event.weights, why)]
    number = state.changes_asked + 1
    wanted = WantedWeights(weights=event.weights, number=number)
    return _soon(replace(state, wanted_weights=wanted, changes_asked=number), at)


def ask_rewind(state: State, event: RewindRequested, at: float) -> Outcome:
    """Go back to a checkpoint at the next boundary."""
    why = rewind.refusal(state, event.step)
    if why:
        return state, [pending_overrides.refused_rewind(state, event.step, why)]
    number = state.changes_asked + 1
    rewinding = rewind.wanted(state, event.step, skip_data=event.skip_data, number=number)
    return _soon(replace(state, wanted_rewind=rewinding, changes_asked=number), at)


def _soon(state: State, at: float) -> Outcome:
    return lifecycle.maybe_request_change(state, at) if state.phase is Phase.TRAINING else (state, [])


def on_recorded(state: State, event: Recorded, at: float) -> Outcome:
    """Start training and delete what was undone: the journal has the generation's decisions."""
    if state.unrecorded is None or event.generation < state.unrecorded:
        return state, []
    commands: list[Command] = [DeleteCheckpoints(prefixes=state.rolled_back)] if state.rolled_back else []
    state = replace(state, unrecorded=None, rolled_back=())
    waits = state.phase is Phase.FORMING and not state.awaited
    return prepend(lifecycle.train(state, at) if waits else (state, []), commands)


def on_deleted(state: State, event: Deleted) -> State:
    """The state without checkpoints that retention has deleted: no rewind can use them.

    The newest known checkpoint stays if it is the only one; reading it then fails.
    """
    known = protected.known(state)
    left = tuple(one for one in known if one.prefix not in event.prefixes and not (event.parents and one.url))
    return replace(state, checkpoint=left[-1], older_checkpoints=left[:-1]) if left and left != known else state


def ask_reshard(state: State, event: ReshardRequested, at: float) -> Outcome:
    """Form the requested shard groups from the next generation on, and soon if the mesh would change."""
    grouping, before = event.grouping, state.limits.tensor
    fields: dict[str, Any] = {"step": state.step, "shard_group_size": grouping.shards if grouping else None}
    reason = reshard_refusal(state, grouping)
    limits = state.limits if reason else replace(state.limits, grouping=grouping)
    wanted = grouping.tensor if grouping else 1
    if (wanted, before) != (1, 1):
        fields["tensor_parallel_degree"] = wanted
    if reason:
        return state, [Record(kind="reshard_refused", fields={**fields, "reason": reason}, durable=True)]
    state = replace(state, limits=limits, resharding=True)
    outcome = lifecycle.maybe_request_change(state, at) if state.phase is Phase.TRAINING else (state, [])
    return prepend(outcome, [Record(kind="reshard", fields=fields, durable=True)])


def asked_mesh(entries: Iterable[Mapping[str, Any]], scaling: Mapping[str, Any]) -> tuple[int | None, int] | None:
    """(shard group size, tensor parallel degree) of the last request in the run's journal; None without one.

    Only requests to drivers count that had the same worker configuration as this one, with no other since.
    """
    return persisted_requests.asked_last(entries, scaling, "reshard", _mesh_of)


def _mesh_of(entry: Mapping[str, Any]) -> tuple[int | None, int]:
    return entry["shard_group_size"], int(entry.get("tensor_parallel_degree", 1))


def reshard_refusal(state: State, grouping: Grouping | None) -> str:
    """Reason why the run cannot continue with the requested tensor parallel degree; empty if it can."""
    degree, least = grouping.tensor if grouping else 1, state.limits.min_workers
    if degree > least:
        return (
            f"a tensor parallel degree of {degree} needs {degree} workers, and the run may go on with {least}. Take a "
            "smaller degree, or a larger minimum of workers."
        )
    return (possible_degree(state.spec, degree) or "") if state.spec is not None else ""
