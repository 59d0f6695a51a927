"""Checkpoints: written by every worker in parallel, real only once their manifest exists, read at any size.

Knows neither torch nor Ray. Reading order: `manifest` (what a checkpoint is), `encoding`, `writer`, `reader`,
`catalog`; `storage` is the seam below them. The format is described in `docs/format.md`.
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
    "Storage": "raysharded.checkpoint.storage",
    "NoSuchKey": "raysharded.checkpoint.storage",
    "open_storage": "raysharded.checkpoint.storage",
    "check_writable": "raysharded.checkpoint.storage",
    "new_save_id": "raysharded.checkpoint.paths",
    "save_prefix": "raysharded.checkpoint.paths",
    "FileBox": "raysharded.checkpoint.manifest",
    "FileRecord": "raysharded.checkpoint.manifest",
    "Manifest": "raysharded.checkpoint.manifest",
    "TensorInfo": "raysharded.checkpoint.manifest",
    "ShardTensor": "raysharded.checkpoint.writer",
    "write_shard": "raysharded.checkpoint.writer",
    "commit": "raysharded.checkpoint.writer",
    "Checkpoint": "raysharded.checkpoint.reader",
    "open_checkpoint": "raysharded.checkpoint.reader",
    "CheckpointRef": "raysharded.checkpoint.catalog",
    "Newest": "raysharded.checkpoint.catalog",
    "list_checkpoints": "raysharded.checkpoint.catalog",
    "newest_complete": "raysharded.checkpoint.catalog",
    "prune": "raysharded.checkpoint.catalog",
}

if TYPE_CHECKING:
    from raysharded.checkpoint.catalog import (
        CheckpointRef as CheckpointRef,
        Newest as Newest,
        list_checkpoints as list_checkpoints,
        newest_complete as newest_complete,
        prune as prune,
    )
    from raysharded.checkpoint.manifest import (
        FileBox as FileBox,
        FileRecord as FileRecord,
        Manifest as Manifest,
        TensorInfo as TensorInfo,
    )
    from raysharded.checkpoint.paths import new_save_id as new_save_id, save_prefix as save_prefix
    from raysharded.checkpoint.reader import Checkpoint as Checkpoint, open_checkpoint as open_checkpoint
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
