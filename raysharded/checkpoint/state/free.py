"""Whether a folder is free for a new checkpoint."""

from __future__ import annotations

from contextlib import suppress

from raysharded.checkpoint.format.paths import CHECKPOINTS_FOLDER, MANIFEST_NAME, key_of, parse_save_folder
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.storage.urls import join_url
from raysharded.errors import CheckpointError


def require_free(storage: Storage, prefix: str, step: int, uri: str) -> None:
    """Refuses the folder `prefix` if it is a checkpoint already, holds checkpoints, or is named after another step.

    `uri` names it in the message. Raises CheckpointError, or StorageError if storage fails.
    """
    named = parse_save_folder(prefix.rpartition("/")[2])
    if named is not None and named[0] != step:
        raise CheckpointError(f"{uri} is named after step {named[0]}, but this is step {step}. Choose another uri.")
    with suppress(NoSuchKey):
        storage.size(key_of(prefix, MANIFEST_NAME))
        raise CheckpointError(
            f"{uri} is a checkpoint already, and checkpoints are never overwritten. Choose a uri of its own for "
            "each save, such as one that ends in the step."
        )
    below = next((one for one in storage.list(prefix) if _is_of_another(one, prefix)), None)
    if below is not None:
        raise CheckpointError(
            f"{uri} holds checkpoints, and is none itself: there is {below}. Give a folder of its own below it, "
            f"such as {join_url(uri, f'step-{step}')}."
        )


def _is_of_another(key: str, prefix: str) -> bool:
    """Whether something below a folder is of a run, or of a checkpoint, that lies there."""
    first, *rest = key.removeprefix(f"{prefix}/").split("/")
    return bool(rest) and (rest == [MANIFEST_NAME] or first in ("claims", CHECKPOINTS_FOLDER))
