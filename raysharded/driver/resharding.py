"""Another mesh by choice, at a step boundary. Handlers of the machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from raysharded.driver import asked, generations
from raysharded.driver.events import Record, ReshardRequested
from raysharded.driver.meshes import Grouping
from raysharded.driver.outcome import Outcome, then
from raysharded.driver.state import Phase, State
from raysharded.layout import possible_degree


def ask(state: State, event: ReshardRequested, at: float) -> Outcome:
    """Form shard groups as is wanted from the next generation on, and form that soon if it would be another mesh."""
    grouping, before = event.grouping, state.limits.tensor
    fields: dict[str, Any] = {"step": state.step, "shard_group_size": grouping.shards if grouping else None}
    reason = refusal(state, grouping)
    limits = state.limits if reason else replace(state.limits, grouping=grouping)
    wanted = grouping.tensor if grouping else 1
    if (wanted, before) != (1, 1):
        fields["tensor_parallel_degree"] = wanted
    if reason:
        return state, [Record(kind="reshard_refused", fields={**fields, "reason": reason}, durable=True)]
    state = replace(state, limits=limits, resharding=True)
    outcome = generations.consider_joining(state, at) if state.phase is Phase.TRAINING else (state, [])
    return then(outcome, [Record(kind="reshard", fields=fields, durable=True)])


def asked_last(entries: Iterable[Mapping[str, Any]], scaling: Mapping[str, Any]) -> tuple[int | None, int] | None:
    """(shard group size, tensor parallel degree) that somebody asked for last, by the run's journal, of drivers that
    had this configuration of their workers, as this one has; None: nobody did, or it was configured otherwise since.
    """
    return asked.asked_last(entries, scaling, "reshard", _mesh_of)


def _mesh_of(entry: Mapping[str, Any]) -> tuple[int | None, int]:
    return entry["shard_group_size"], int(entry.get("tensor_parallel_degree", 1))


def refusal(state: State, grouping: Grouping | None) -> str:
    """Why the run cannot go on with the tensor parallel degree that is asked for; empty if it can."""
    degree, least = grouping.tensor if grouping else 1, state.limits.min_workers
    if degree > least:
        return (
            f"a tensor parallel degree of {degree} needs {degree} workers, and the run may go on with {least}. Take a "
            "smaller degree, or a larger minimum of workers."
        )
    return (possible_degree(state.spec, degree) or "") if state.spec is not None else ""
