"""The checkpoint whose weights a new run begins with: found once, and recorded in the run's journal."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from raysharded.errors import ConfigError, CorruptCheckpoint
from raysharded.locations import refuse_password

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from raysharded.checkpoint import SigningKey, Storage
    from raysharded.protocol.job import InitialWeights
    from raysharded.run.spec import RunSpec


def with_initial_weights(
    spec: RunSpec,
    storage: Storage,
    starts: Sequence[Mapping[str, Any]],
    key: SigningKey | None,
    *,
    vouched: bool = True,
) -> RunSpec:
    """The specification with the checkpoint that `RunConfig.start_from` names, or that the run began with.

    A fork begins with its own checkpoint: `start_from` then has no effect.

    `storage`: the run's; `starts`: the journal entries with which the run's drivers began; `key`: the key of the
    checkpoint's signature; `vouched`: whether the entries are signed where there is a key.

    Raises ConfigError if the run began with another one; CheckpointError if there is none at `start_from`, or if the
    journal alone names it, in a place that is not allowed (`url_named`); RefusedCheckpoint if the key did not sign it.
    """
    from raysharded.checkpoint import list_checkpoints, open_checkpoint, open_storage
    from raysharded.checkpoint.sharded_io.open_from_uri import open_uri
    from raysharded.journal.log import refusing_damage
    from raysharded.protocol.job import InitialWeights

    uri = spec.run.start_from
    with refusing_damage(storage):
        is_fork = _is_fork(storage, starts)
    if is_fork:
        return spec
    if starts:
        recorded = starts[-1].get("start_from")
        before = recorded.get("uri") if isinstance(recorded, dict) else None
        if uri is not None and uri != before:
            raise ConfigError(
                f"run {spec.run.name!r} was started with start_from={before!r} and is resumed with {uri!r}. Resume it "
                "with the same value or without one, or give the run another name."
            )
        weights = _recorded(recorded, uri, storage) if recorded else None
        if weights is not None and not vouched and not any(ref.complete for ref in list_checkpoints(storage, key=key)):
            open_checkpoint(open_storage(weights.url), weights.prefix, key=key, digest=weights.digest)  # raises
        return replace(spec, initial_weights=weights)
    if uri is None:
        return spec
    refuse_password(str(uri), "The run's journal records start_from.", ConfigError)
    found = open_uri(uri, key=key)
    weights = InitialWeights(uri=str(uri), url=found.storage.url, prefix=found.prefix, digest=found.digest)
    return replace(spec, initial_weights=weights)


def _recorded(recorded: Any, uri: str | os.PathLike[str] | None, storage: Storage) -> InitialWeights:
    """The checkpoint that the journal names. Its place is the user's `uri`, if given: the journal may be a stranger's.

    Raises CorruptCheckpoint if the entry is damaged, RefusedCheckpoint if its place is not allowed.
    """
    from raysharded.checkpoint import open_storage
    from raysharded.checkpoint.sharded_io.checkpoint_uri import split
    from raysharded.checkpoint.storage.named_places import is_same_place, url_named
    from raysharded.protocol.job import InitialWeights

    names = [field.name for field in fields(InitialWeights)]
    if not isinstance(recorded, dict) or any(not isinstance(recorded.get(name), str) for name in names):
        raise CorruptCheckpoint(
            f"the journal of the run at {storage.url} does not state the weights that it began with: start_from="
            f"{recorded!r:.200}. Restore its first segments, or give the run another name."
        )
    weights = InitialWeights(**{name: recorded[name] for name in names})
    given: list[str] = []
    if uri is not None:
        given = [open_storage(os.fspath(uri)).url]
        with suppress(ConfigError):  # it may be the top of a bucket
            given.append(open_storage(split(uri)[0]).url)
    url = next((one for one in given if is_same_place(one, weights.url)), None)
    return replace(weights, url=url or url_named(weights.url, storage.url, f"the journal of the run at {storage.url}"))


def _is_fork(storage: Storage, starts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the run had a checkpoint before its first driver started."""
    if starts:
        return bool(starts[0]["resumed_after_step"])
    from raysharded.checkpoint import list_checkpoints

    return any(ref.complete for ref in list_checkpoints(storage))
