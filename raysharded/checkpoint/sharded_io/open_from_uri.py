"""Opening of a checkpoint from a URI, on one rank or on all ranks. An error names folders that the URI may mean."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from raysharded.checkpoint.format.encoding import ForeignManifest
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.checkpoint.retention.catalog import newest_complete
from raysharded.checkpoint.retention.flat_folder import newest_beside
from raysharded.checkpoint.sharded_io.checkpoint_uri import Uri, split, text_of
from raysharded.checkpoint.sharded_io.coordinator import Coordinator
from raysharded.checkpoint.state_dict.rank_merge import require_same
from raysharded.checkpoint.storage import open_storage
from raysharded.checkpoint.storage.optional_operations import list_folders
from raysharded.errors import CheckpointError, ConfigError, IncompleteCheckpoint, NoCheckpoint, RayshardedError
from raysharded.locations import join_url

_NAMES = 3
_DEPTH = 4
"""Mistyped parts of a path, counted from its end, that are looked for at most."""


def similar(uri: str, depth: int = _DEPTH) -> list[str]:
    """At most three existing folders whose paths are similarly spelled, the most similar first. Never raises.

    Each part of the path may be mistyped. Lists only the folders on the way.
    """
    try:
        above, name = split(uri)
        inside = list_folders(open_storage(above))
        if not inside and depth > 1:
            return [found for other in similar(above, depth - 1) for found in _named(other, name)][:_NAMES]
        return _named(above, name)
    except RayshardedError:  # this must not hide the error that it belongs to
        return []


def _named(folder: str, name: str) -> list[str]:
    inside = list_folders(open_storage(folder))
    close = [name] if name in inside else difflib.get_close_matches(name, inside, n=_NAMES, cutoff=0.6)
    return [join_url(folder, other) for other in close]


def open_uri(uri: Uri, *, key: SigningKey | None = None) -> Checkpoint:
    """The checkpoint in a folder, or the newest complete one of a run or of checkpoints side by side in it.

    Of checkpoints side by side it is the one of the highest step, as `newest_beside` finds it. Raises
    NoCheckpoint if there is none, with the folders of a similar name if there is nothing at all.
    """
    text = text_of(uri)
    try:
        above, name = split(text)
    except ConfigError:  # the top of a bucket or file system: it may hold checkpoints
        return _newest(text, key, None)
    try:
        return open_checkpoint(open_storage(above), name, key=key)
    except (IncompleteCheckpoint, ForeignManifest) as error:
        return _newest(text, key, error)


def open_together(
    uri: Uri, coordinator: Coordinator, *, key: SigningKey | None = None, options: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Open one checkpoint on every rank: rank 0 opens it and sends its digest to the others.

    Every rank must call it. Only rank 0 needs the key: the digest vouches for every byte. Raises CheckpointError unless
    all ranks give the same uri and the same `options`, which JSON must be able to hold.
    """
    same = {"uris": open_storage(text_of(uri)).url, **(options or {})}
    everyone = coordinator.gather(same)
    if everyone is None:
        found = coordinator.scatter(None)
        return open_checkpoint(open_storage(found["url"]), found["prefix"], digest=found["digest"])
    for what in same:
        require_same(what, [one[what] for one in everyone])
    checkpoint = open_uri(uri, key=key)
    found = {"url": checkpoint.storage.url, "prefix": checkpoint.prefix, "digest": checkpoint.digest}
    coordinator.scatter([found] * coordinator.world_size)
    return checkpoint


def _newest(uri: str, key: SigningKey | None, error: CheckpointError | None) -> Checkpoint:
    storage = open_storage(uri)
    checkpoint = newest_complete(storage, key=key).checkpoint
    if checkpoint is not None:
        return checkpoint
    beside = newest_beside(storage, key=key)
    if beside is not None:
        return beside
    if not storage.list():
        close = similar(uri)
        advice = f"Did you mean {' or '.join(close)}?" if close else "Check the spelling."
        raise NoCheckpoint(
            f"there is nothing at {storage.url}: neither a checkpoint, nor a folder that holds complete checkpoints. "
            f"{advice}"
        ) from error
    if error is None:
        raise NoCheckpoint(f"{storage.url} holds no complete checkpoint.")
    kinds = (ForeignManifest, NoCheckpoint)
    kind = next((one for one in kinds if isinstance(error, one)), IncompleteCheckpoint)
    raise kind(f"{error} {_nature(storage.list())}") from error


def _nature(keys: Sequence[str]) -> str:
    """A sentence about a folder without checkpoints."""
    files = {key for key in keys if "/" not in key}
    if ".metadata" in files or any(file.endswith(".safetensors") for file in files):
        what = "torch.distributed.checkpoint" if ".metadata" in files else "Hugging Face"
        return f"It has files of {what}: `raysharded checkpoint import FOLDER NEW` makes a checkpoint of them."
    return "It is not a folder that holds complete checkpoints either."
