"""Checkpoints: written by all workers in parallel, valid only once their manifest exists, readable at any world size.

Users of torch call `save`, `load` and `open` (`api`, over `sharded_io`, `state_dict` and `async_save`). `interop`
handles checkpoints of other libraries. The other modules know neither torch nor Ray. Their reading order: `format` (the
contents of a checkpoint), `writer`, `reader`, `claims` (the commit log), `retention`. `storage` is the interface below
them. `docs/format.md` describes the format.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "raysharded.checkpoint":
    raise ImportError(
        f"this package was imported as {__name__!r}, which would make a second copy of every class in it. "
        "Import it as `raysharded.checkpoint`; the `checkpoint` link at the top of the repository is for reading only."
    )

_EXPORTS = {
    "save": "raysharded.checkpoint.api",
    "load": "raysharded.checkpoint.api",
    "open": "raysharded.checkpoint.api",
    "AsyncSaver": "raysharded.checkpoint.api",
    "PendingSave": "raysharded.checkpoint.api",
    "Saved": "raysharded.checkpoint.api",
    "Loaded": "raysharded.checkpoint.api",
    "OpenCheckpoint": "raysharded.checkpoint.api",
    "PeerFailed": "raysharded.checkpoint.api",
    "Storage": "raysharded.checkpoint.storage",
    "NoSuchKey": "raysharded.checkpoint.storage",
    "open_storage": "raysharded.checkpoint.storage",
    "check_writable": "raysharded.checkpoint.storage",
    "new_save_id": "raysharded.checkpoint.format.paths",
    "save_prefix": "raysharded.checkpoint.format.paths",
    "BoxTable": "raysharded.checkpoint.format.boxes",
    "FileBox": "raysharded.checkpoint.format.boxes",
    "FileRecord": "raysharded.checkpoint.format.manifest",
    "Manifest": "raysharded.checkpoint.format.manifest",
    "TensorInfo": "raysharded.checkpoint.format.manifest",
    "SigningKey": "raysharded.checkpoint.format.signing",
    "signing_key_from_environment": "raysharded.checkpoint.format.signing",
    "ShardTensor": "raysharded.checkpoint.writer",
    "write_shard": "raysharded.checkpoint.writer",
    "commit": "raysharded.checkpoint.writer",
    "Checkpoint": "raysharded.checkpoint.reader",
    "open_checkpoint": "raysharded.checkpoint.reader",
    "Claims": "raysharded.checkpoint.claims",
    "NotOwner": "raysharded.checkpoint.claims",
    "commit_claimed": "raysharded.checkpoint.claims",
    "BestCheckpoint": "raysharded.checkpoint.retention.best",
    "best_checkpoint": "raysharded.checkpoint.retention.best",
    "CheckpointRef": "raysharded.checkpoint.retention.catalog",
    "Newest": "raysharded.checkpoint.retention.catalog",
    "list_checkpoints": "raysharded.checkpoint.retention.catalog",
    "newest_complete": "raysharded.checkpoint.retention.catalog",
    "open_ref": "raysharded.checkpoint.retention.catalog",
    "Best": "raysharded.checkpoint.retention.policy",
    "Keep": "raysharded.checkpoint.retention.policy",
    "Pruned": "raysharded.checkpoint.retention.gc",
    "prune": "raysharded.checkpoint.retention.gc",
    "Pin": "raysharded.checkpoint.retention.pins",
    "list_pins": "raysharded.checkpoint.retention.pins",
    "pin": "raysharded.checkpoint.retention.pins",
    "unpin": "raysharded.checkpoint.retention.pins",
    "fork": "raysharded.checkpoint.retention.forks.fork",
}

if TYPE_CHECKING:
    from raysharded.checkpoint.api import (
        AsyncSaver as AsyncSaver,
        Loaded as Loaded,
        OpenCheckpoint as OpenCheckpoint,
        PeerFailed as PeerFailed,
        PendingSave as PendingSave,
        Saved as Saved,
        load as load,
        open as open,  # noqa: A004 - used as `checkpoint.open`
        save as save,
    )
    from raysharded.checkpoint.claims import Claims as Claims, NotOwner as NotOwner, commit_claimed as commit_claimed
    from raysharded.checkpoint.format.boxes import BoxTable as BoxTable, FileBox as FileBox
    from raysharded.checkpoint.format.manifest import (
        FileRecord as FileRecord,
        Manifest as Manifest,
        TensorInfo as TensorInfo,
    )
    from raysharded.checkpoint.format.paths import new_save_id as new_save_id, save_prefix as save_prefix
    from raysharded.checkpoint.format.signing import (
        SigningKey as SigningKey,
        signing_key_from_environment as signing_key_from_environment,
    )
    from raysharded.checkpoint.reader import Checkpoint as Checkpoint, open_checkpoint as open_checkpoint
    from raysharded.checkpoint.retention.best import (
        BestCheckpoint as BestCheckpoint,
        best_checkpoint as best_checkpoint,
    )
    from raysharded.checkpoint.retention.catalog import (
        CheckpointRef as CheckpointRef,
        Newest as Newest,
        list_checkpoints as list_checkpoints,
        newest_complete as newest_complete,
        open_ref as open_ref,
    )
    from raysharded.checkpoint.retention.forks.fork import fork as fork
    from raysharded.checkpoint.retention.gc import Pruned as Pruned, prune as prune
    from raysharded.checkpoint.retention.pins import Pin as Pin, list_pins as list_pins, pin as pin, unpin as unpin
    from raysharded.checkpoint.retention.policy import Best as Best, Keep as Keep
    from raysharded.checkpoint.storage import (
        NoSuchKey as NoSuchKey,
        Storage as Storage,
        check_writable as check_writable,
        open_storage as open_storage,
    )
    from raysharded.checkpoint.writer import ShardTensor as ShardTensor, commit as commit, write_shard as write_shard

__all__ = [*sorted(_EXPORTS)]  # noqa: PLE0604  # made from the table of exports


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'raysharded.checkpoint' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return __all__
