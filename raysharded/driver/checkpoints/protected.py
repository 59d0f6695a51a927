"""The run's checkpoints: those that a rollback may go back to or delete, and those that retention must keep. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raysharded.driver.state.state import Checkpointed, State
from raysharded.ids import GenerationId
from raysharded.protocol.messages import FromCheckpoint, save_prefix


def known(state: State) -> tuple[Checkpointed, ...]:
    """The run's checkpoints, oldest first."""
    return (*state.older_checkpoints, *([state.checkpoint] if state.checkpoint else []))


def due_before(state: State, step: int) -> int:
    """The newest step before this one whose checkpoint was due; the first one of a run that was forked; or 0."""
    every = state.limits.save_every_steps
    due = (step - 1) // every * every if every else 0
    return max([due, *(checkpoint.step for checkpoint in known(state) if checkpoint.url)])


def is_undone(state: State, generation: GenerationId, step: int) -> bool:
    """Whether a rollback has undone a step of a generation."""
    after = state.invalidated_after
    return after is not None and generation <= state.invalidated_up_to and step > after


def unconfirmed_after(state: State, step: int) -> list[str]:
    """Folders of checkpoints of later steps whose commit failed: storage may have them all the same."""
    return [prefix for of_step, prefix in state.unconfirmed_saves if of_step > step]


def with_unconfirmed(state: State, step: int, prefix: str) -> tuple[tuple[int, str], ...]:
    """The unconfirmed checkpoints and this one, without those that no rollback can undo any more."""
    oldest = min((one.step for one in known(state)), default=0)
    return (*(one for one in state.unconfirmed_saves if one[0] > oldest), (step, prefix))


@dataclass(frozen=True, kw_only=True, slots=True)
class ProtectedCheckpoints:
    """Checkpoints that must stay."""

    prefixes: frozenset[str] = frozenset()
    """Folders that are being written, that the generation is formed from, or that the run may go back to: on request,
    after wrong numbers, or after a number that is not finite."""
    lasting: frozenset[str] = frozenset()
    """Those of them that stay when the run has done its last step: it may be resumed with more steps."""
    parents: bool = False
    """Whether the parent run's checkpoint, from which this run was forked, must stay."""


def protected_checkpoints(state: State) -> ProtectedCheckpoints:
    """Checkpoints that must stay now."""
    needed = list(_gone_back_to(state))
    went_back = state.checkpoint is not None and state.invalidated_after is not None
    if state.checkpoint is not None and (went_back or state.checkpoint.url == ""):
        needed.append(state.checkpoint)
    is_read = not state.has_trained  # from then on its members hold it in memory
    source = [state.source.prefix] if isinstance(state.source, FromCheckpoint) and is_read else []
    writing = [save_prefix(step, generation, state.driver) for generation, step in state.saves]
    needed += [*_newest_up_to(state, state.verified_step)] if state.limits.audits else []
    lasting = _newest_up_to(state, due_before(state, state.step + 1)) if state.limits.rewind else ()
    needed += lasting
    prefixes = frozenset([*writing, *source, *(one.prefix for one in needed if not one.url)])
    return ProtectedCheckpoints(
        prefixes=prefixes,
        lasting=frozenset(one.prefix for one in lasting if not one.url),
        parents=any(one.url for one in needed),
    )


def _gone_back_to(state: State) -> Iterator[Checkpointed]:
    """Targets of requested rewinds."""
    if state.wanted_rewind is not None:
        yield state.wanted_rewind.checkpoint
    if state.plan is not None and state.plan.rewind is not None:
        yield state.plan.rewind.checkpoint


def _newest_up_to(state: State, step: int) -> tuple[Checkpointed, ...]:
    """The newest checkpoint up to a step that a rollback goes back to, if there is one."""
    return tuple(checkpoint for checkpoint in known(state) if 0 < checkpoint.step <= step)[-1:]
