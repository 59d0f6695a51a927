"""The best of a run's checkpoints: by the metric of `CheckpointConfig.keep_best`, which every manifest records.

The order is that of `policy.ranked`, by which old checkpoints are deleted too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.retention.catalog import CheckpointRef, list_checkpoints, open_ref
from raysharded.checkpoint.retention.policy import Best, Candidate, ranked
from raysharded.checkpoint.storage import Storage
from raysharded.checkpoint.threads import Threads
from raysharded.errors import CheckpointError, ConfigError

_RULE = "keep_best"
"""Key of the rule in a manifest's metadata: [metric, mode, count]."""
_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class BestCheckpoint:
    """A committed checkpoint with its value of a metric."""

    ref: CheckpointRef
    """Save, as it is listed."""
    checkpoint: Checkpoint
    """Checkpoint, opened."""
    metric: str
    """Name of the metric."""
    value: float
    """Value of the metric."""


def recorded(best: Best) -> dict[str, list[str | int]]:
    """The rule, as metadata of the checkpoints that it is applied to."""
    return {_RULE: [best.metric, best.mode, best.count]}


def best_checkpoint(
    storage: Storage, rule: Best | None = None, *, key: SigningKey | None = None
) -> BestCheckpoint | None:
    """The best of the run's committed checkpoints; None if none has the metric, or without a rule.

    `rule`: None for the one with which the newest checkpoint was written. Of equal values the newest is best. With a
    key, only checkpoints that it signed count.
    """
    found = by_value(storage, list_checkpoints(storage, key=key), rule, key=key)
    return found[0] if found else None


def by_value(
    storage: Storage, refs: Sequence[CheckpointRef], rule: Best | None = None, *, key: SigningKey | None = None
) -> list[BestCheckpoint]:
    """The committed checkpoints among `refs` (oldest first) with their values, best first; as `best_checkpoint`.

    Reads a single manifest if there is no rule. Omits checkpoints that cannot be used, and those being deleted.
    """
    own = {ref.prefix: ref for ref in refs if ref.state == "committed" and not ref.marked}

    def opened(ref: CheckpointRef) -> Checkpoint | None:
        with suppress(CheckpointError):
            return open_ref(storage, ref, key=key)
        return None

    rule = rule or _rule_of_newest(list(own.values()), opened)
    if rule is None:
        return []
    with Threads(_AT_ONCE, thread_name_prefix="raysharded-manifests") as pool:
        found = dict(zip(own, pool.map(opened, own.values()), strict=True))
    usable = {prefix: checkpoint for prefix, checkpoint in found.items() if checkpoint is not None}
    candidates = [Candidate(prefix, own[prefix].step) for prefix in usable]
    order = ranked(candidates, rule, lambda prefix: numbers_of(usable[prefix]))
    return [
        BestCheckpoint(ref=own[at.prefix], checkpoint=usable[at.prefix], metric=rule.metric, value=float(value))
        for at, value in order
    ]


def numbers_of(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """The metrics that a checkpoint's manifest records, as they are there."""
    metrics = checkpoint.manifest.metadata.get("metrics")
    return metrics if isinstance(metrics, dict) else {}


def _rule_of_newest(refs: Sequence[CheckpointRef], opened: Callable[[CheckpointRef], Checkpoint | None]) -> Best | None:
    """The rule in the manifest of the newest checkpoint that can be used; None if it has none."""
    newest = next((found for ref in reversed(refs) if (found := opened(ref)) is not None), None)
    told = newest.manifest.metadata.get(_RULE) if newest is not None else None
    if not isinstance(told, list | tuple) or len(told) != 3:
        return None
    metric, mode, count = told
    if not isinstance(metric, str) or not isinstance(count, int):
        return None
    with suppress(ConfigError):
        return Best(metric=metric, mode=mode, count=count)
    return None
