"""Who takes part next, and where the next generation's state comes from: pure decisions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from raysharded.driver.messages import FromCheckpoint, FromMemory, FromStart, Source, Stopped
from raysharded.driver.state import Checkpointed, Limits
from raysharded.ids import WorkerId
from raysharded.layout import Held, StateSpec, order_workers, recoverable


def choose_source(
    holdings: Mapping[WorkerId, Stopped], alive: frozenset[WorkerId], checkpoint: Checkpointed | None
) -> Source:
    """The newest complete step that live workers hold, or else the newest checkpoint, or else the start.

    Memory wins a tie with a checkpoint: nothing has to be read.
    """
    held = [item for worker in sorted(alive & holdings.keys()) for item in holdings[worker].held]
    specs = {step: spec for worker in sorted(alive & holdings.keys()) for step, spec in holdings[worker].specs.items()}
    found = _newest_in_memory(held, specs)
    if found is not None and (checkpoint is None or found.step >= checkpoint.step):
        return found
    if checkpoint is not None:
        return FromCheckpoint(step=checkpoint.step, prefix=checkpoint.prefix)
    return FromStart()


def _newest_in_memory(held: Sequence[Held], specs: Mapping[int, StateSpec]) -> FromMemory | None:
    for step in sorted(specs, reverse=True):
        found = recoverable(specs[step], [item for item in held if item.step == step])
        if found is not None:
            return FromMemory(step=step, spec=specs[step], copies=found[1])
    return None


def order_members(source: Source, workers: frozenset[WorkerId], limits: Limits) -> tuple[WorkerId, ...]:
    """The members of the next generation, by rank: at most the maximum, in the order that moves the fewest bytes."""
    chosen = sorted(workers)[: limits.max_workers]
    if not isinstance(source, FromMemory):
        return tuple(chosen)
    holders = {holder for copy in source.copies for holder in copy.holders if holder is not None}
    if len(workers) > limits.max_workers:  # who holds state goes before who does not
        chosen = sorted(workers, key=lambda worker: (worker not in holders, worker))[: limits.max_workers]
    survivors = [worker for worker in chosen if worker in holders]
    joiners = [worker for worker in chosen if worker not in holders]
    return order_workers(source.spec, source.copies, survivors, joiners, limits.mirrors)


def describe_source(source: Source) -> str:
    """For people and the journal: memory, checkpoint or start."""
    match source:
        case FromMemory():
            return "memory"
        case FromCheckpoint():
            return "checkpoint"
        case FromStart():
            return "start"
