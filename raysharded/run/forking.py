"""Another run that begins with a checkpoint of this one, and is otherwise specified as it is."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from raysharded.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from raysharded.checkpoint import Storage
    from raysharded.checkpoint.keeping.catalog import CheckpointRef
    from raysharded.run.spec import RunSpec


def forked(spec: RunSpec, storage: Storage, name: str, step: int | None, where: str | None) -> RunSpec:
    """The specification of the run `name` under `where`, which begins with the committed checkpoint of `step`
    (None: the newest) of the run at `storage`. Nothing is started."""
    from raysharded.checkpoint import fork, open_storage

    run = dataclasses.replace(spec.run, name=name, storage_path=where or spec.run.storage_path)
    other = dataclasses.replace(spec, run=run)
    if open_storage(other.url).url == storage.url:
        raise ConfigError(f"Run.fork: {name!r} is this run's own name. Give the fork another name or storage_path.")
    fork(storage, _chosen(storage, step), open_storage(other.url))
    return other


def _chosen(storage: Storage, step: int | None) -> CheckpointRef:
    from raysharded.checkpoint import list_checkpoints

    committed = [ref for ref in list_checkpoints(storage) if ref.state == "committed"]
    found = [ref for ref in committed if step in (None, ref.step)]
    if found:
        return found[-1]
    steps = ", ".join(map(str, sorted({ref.step for ref in committed}))) or "none; Run.checkpoint() has one written"
    of = "" if step is None else f" of step {step}"
    raise CheckpointError(f"the run at {storage.url} has no committed checkpoint{of}; there are: {steps}.")
