"""Public calls for sharded torch states: `save`, `load`, `open`, and `AsyncSaver` for asynchronous saves.

They work in one process, and on all ranks of a process group, which must then all make the same calls. Neither Ray nor
the trainer is needed. The guide is docs/checkpoints.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from raysharded.checkpoint.async_save.async_saver import AsyncSaver as AsyncSaver
from raysharded.checkpoint.async_save.pending_save import PendingSave as PendingSave
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.sharded_io.checkpoint_uri import Uri, key_or_default
from raysharded.checkpoint.sharded_io.coordinator import TIMEOUT_S, Coordinator, PeerFailed as PeerFailed
from raysharded.checkpoint.sharded_io.load import Loaded as Loaded, Options, load_into
from raysharded.checkpoint.sharded_io.open_from_uri import open_together, open_uri
from raysharded.checkpoint.sharded_io.save import About, Saved as Saved, Target, content_of, write
from raysharded.checkpoint.sharded_io.tensor_reader import OpenCheckpoint as OpenCheckpoint
from raysharded.checkpoint.state_dict.entries import saved_form
from raysharded.checkpoint.state_dict.matching import Chosen


def save(
    uri: Uri,
    state: Any,
    *,
    step: int = 0,
    run: str = "",
    metadata: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    data: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    key: SigningKey | None = None,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Saved:
    """Save a state as the checkpoint in the folder `uri`, complete and durable when the call returns on any rank.

    `state` is a module, `{"model": module, "optimizer": optimizer}`, or nested dicts and lists of tensors, DTensors,
    numbers, text, bytes, bools and None. Each rank passes its own shards; data that several ranks hold is written once.
    Values with the same name must be equal on all ranks, and plain tensors are assumed to be equal. Values that differ
    between ranks need different names. Nothing may change the state during the call, which does not copy it.

    `metadata` and `data` (the position in the training data) are anything that JSON can hold. `metrics` is stored in
    the metadata, for retention of the best. Rank 0's values of the three are stored. With `overwrite`, the save
    replaces an existing checkpoint in one step. Readers that opened the old one can continue; of two saves that
    overwrite the same checkpoint, one fails. `key` signs the checkpoint; the default is the key in the environment, if
    any. `timeout_s` is how long one rank waits for another, including all that the other has to write.

    Raises CheckpointError for a state that cannot be stored, and for a uri that is or contains a checkpoint. Raises it
    too if ranks pass different uris, steps, runs or values. Raises StorageError if storage fails, PeerFailed if another
    rank fails. After an error this save left no checkpoint, unless the very last operation failed. A new call may use
    the same uri.
    """
    coordinator = Coordinator.of(process_group, timeout_s)
    with coordinator.guarded():
        target = Target.of(uri, key, overwrite=overwrite)
        about = About.of(step, run, metadata, metrics, data)
        content = content_of(saved_form(state))
        return write(content, target, about, coordinator)


def load(
    uri: Uri,
    into: Any,
    *,
    names: str | Sequence[str] | None = None,
    strict: bool = True,
    cast: bool = False,
    key: SigningKey | None = None,
    require_signed: bool = False,
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Loaded:
    """Fill `into` from the checkpoint in the folder `uri`, or from the newest complete one of the run in it.

    `into` is a module, or a dict as `save` takes: `{"model": module, "optimizer": optimizer}`, or nested dicts and
    lists of tensors and values. Modules, optimizers and tensors are filled in place; the result's `state` has the
    checkpoint's values. Layouts may differ from those of the save: each rank reads the boxes that it holds. Boxes that
    several ranks hold are read by one rank, which sends them to the others. `names` selects tensors and values by name
    or pattern, such as `layers.0.*`. `cast` converts dtypes. With a key (default: the one in the environment) only
    checkpoints signed with it are read. `require_signed` makes it an error that there is no key.

    Top-level entries of the checkpoint that `into` does not have are ignored: the model of a checkpoint can be loaded
    alone. With `strict`, all other names of tensors and values that are missing on either side are an error that lists
    them; otherwise the result lists them. A name of the checkpoint has a place if any rank's `into` has one.
    Within a part without tensors nothing is compared: it is returned as it was stored. An optimizer's settings that
    depend on torch's version, or that a scheduler adds, may be missing on either side. Shapes and dtypes must always
    fit. An optimizer saved before its first step has no state after the load either.

    All ranks pass the same uri, names and settings. Raises NoCheckpoint if there is none, as at a first start. Raises
    CheckpointError, CorruptCheckpoint or IncompleteCheckpoint, StorageError, and PeerFailed if another rank failed.
    After an error the contents of `into` are undefined.
    """
    coordinator = Coordinator.of(process_group, timeout_s)
    with coordinator.guarded():
        options = Options(chosen=Chosen.of(names), strict=strict, cast=cast)
        chosen_key = key_or_default(key, require_signed=require_signed)
        checkpoint = open_together(uri, coordinator, key=chosen_key, options=options.to_json())
        return load_into(checkpoint, into, options, coordinator, process_group)


def open(  # noqa: A001 - read as checkpoint.open
    uri: Uri, *, key: SigningKey | None = None, require_signed: bool = False
) -> OpenCheckpoint:
    """The checkpoint in the folder `uri`, or the newest complete one of the run in it, for reading parts of it.

    `key` and `require_signed` as in `load`. Reads only the manifest. Raises NoCheckpoint if there is none;
    CheckpointError, CorruptCheckpoint or IncompleteCheckpoint.
    """
    return OpenCheckpoint(open_uri(uri, key=key_or_default(key, require_signed=require_signed)))
