"""The checkpoint whose weights a new run begins with: found once, and recorded in the run's journal."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raysharded.errors import ConfigError
from raysharded.locations import refuse_password

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from raysharded.checkpoint import SigningKey, Storage
    from raysharded.run.spec import RunSpec


def with_initial_weights(
    spec: RunSpec, storage: Storage, starts: Sequence[Mapping[str, Any]], key: SigningKey | None
) -> RunSpec:
    """The specification with the checkpoint that `RunConfig.start_from` names, or that the run began with.

    A fork begins with its own checkpoint: `start_from` then has no effect.

    `storage`: the run's; `starts`: the journal entries with which the run's drivers began; `key`: the key of the
    checkpoint's signature.

    Raises ConfigError if the run began with another one; CheckpointError if there is none at `start_from`.
    """
    from raysharded.checkpoint.sharded_io.open_from_uri import open_uri
    from raysharded.protocol.job import InitialWeights

    uri = spec.run.start_from
    if _is_fork(storage, starts):
        return spec
    if starts:
        recorded = starts[-1].get("start_from")
        before = recorded["uri"] if recorded else None
        if uri is not None and uri != before:
            raise ConfigError(
                f"run {spec.run.name!r} was started with start_from={before!r} and is resumed with {uri!r}. Resume it "
                "with the same value or without one, or give the run another name."
            )
        return replace(spec, initial_weights=InitialWeights(**recorded) if recorded else None)
    if uri is None:
        return spec
    refuse_password(str(uri), "The run's journal records start_from.", ConfigError)
    found = open_uri(uri, key=key)
    weights = InitialWeights(uri=str(uri), url=found.storage.url, prefix=found.prefix, digest=found.digest)
    return replace(spec, initial_weights=weights)


def _is_fork(storage: Storage, starts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the run had a checkpoint before its first driver started."""
    if starts:
        return bool(starts[0]["resumed_after_step"])
    from raysharded.checkpoint import list_checkpoints

    return any(ref.complete for ref in list_checkpoints(storage))
