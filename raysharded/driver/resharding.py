"""Another mesh by choice, at a step boundary. Handlers of the machine."""

from __future__ import annotations

from dataclasses import replace

from raysharded.driver import generations
from raysharded.driver.events import Record, ReshardRequested
from raysharded.driver.outcome import Outcome, then
from raysharded.driver.state import Phase, State


def ask(state: State, event: ReshardRequested, at: float) -> Outcome:
    """Form shard groups as is wanted from the next generation on, and form that soon if it would be another mesh."""
    shards = event.grouping.shards if event.grouping else None
    record = Record(kind="reshard", fields={"step": state.step, "shard_group_size": shards}, durable=True)
    limits = replace(state.limits, grouping=event.grouping)
    state = replace(state, limits=limits, resharding=True)
    outcome = generations.consider_joining(state, at) if state.phase is Phase.TRAINING else (state, [])
    return then(outcome, [record])
