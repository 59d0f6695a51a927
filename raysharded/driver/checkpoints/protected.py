"""Checkpoints that retention must not delete. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from raysharded.driver.state.state import Checkpointed, State
from raysharded.protocol.messages import FromCheckpoint, save_prefix


@dataclass(frozen=True, kw_only=True, slots=True)
class ProtectedCheckpoints:
    """Checkpoints that must stay."""

    prefixes: frozenset[str] = frozenset()
    """Folders that are being written, that the generation is formed from, or that the run may go back to."""
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
    prefixes = frozenset([*writing, *source, *_verified(state), *(one.prefix for one in needed if not one.url)])
    return ProtectedCheckpoints(prefixes=prefixes, parents=any(one.url for one in needed))


def _gone_back_to(state: State) -> Iterator[Checkpointed]:
    """Targets of requested rewinds."""
    if state.wanted_rewind is not None:
        yield state.wanted_rewind.checkpoint
    if state.plan is not None and state.plan.rewind is not None:
        yield state.plan.rewind.checkpoint


def _verified(state: State) -> list[str]:
    """Folder of the newest checkpoint up to the verified step, the target of a corruption rollback, if there is one.

    Without audits there is no such rollback.
    """
    if not state.limits.audits:
        return []
    known = (*state.older_checkpoints, *([state.checkpoint] if state.checkpoint else []))
    return [checkpoint.prefix for checkpoint in known if 0 < checkpoint.step <= state.verified_step][-1:]
