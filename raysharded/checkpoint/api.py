"""The public calls for sharded states of torch: `save`, `load`, `open`, and `AsyncSaver` for saves beside training.

They work in one process, and on all ranks of a process group, which must then all make the same calls. Ray and the
trainer are not needed. docs/checkpoints.md is their guide.
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
    """Saves a state as the checkpoint in the folder `uri`; it is complete and durable on return, on every rank.

    `state` is a module, `{"model": module, "optimizer": optimizer}`, or nested dicts and lists of tensors, DTensors,
    numbers, text, bytes, bools and None. Every rank gives its own shards; what several ranks hold is written once.
    Values must be equal wherever they have the same name, and tensors that are no DTensors are taken to be; what
    differs from rank to rank needs a name of its own. `metadata` and `data`
    (how far into its data a run is) are anything JSON can hold; `metrics` goes into the metadata, for keeping the best;
    of the three, rank 0's are stored.
    With `overwrite` it takes the place of a checkpoint that is there, in one step; who has opened that one reads on,
    and of two that overwrite the same one, one fails. `key` signs it; without one, the key in the environment, if there
    is one. `timeout_s` is how long one rank waits for another, all that the other has to write included.

    Raises CheckpointError for what cannot be stored, for a uri that is a checkpoint already or holds some, and if the
    ranks give different uris, steps, runs or values; StorageError if storage fails; PeerFailed if another rank fails.
    Then there is no checkpoint at the uri, unless the very last operation failed; a new call may use the same uri.
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
    process_group: dist.ProcessGroup | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Loaded:
    """Fills `into` from the checkpoint in the folder `uri`, or from the newest complete one of the run in it.

    `into` is what `save` takes: a module, `{"model": module, "optimizer": optimizer}`, or nested dicts of tensors,
    which are filled in place. Layouts need not be those of the save: each rank reads the boxes that it holds, and what
    several ranks hold is read by one of them, which sends it to the others. `names` chooses tensors and values by name
    or by pattern, as `layers.0.*`. `cast` converts dtypes.

    What a checkpoint has at its top beside what `into` has there is not looked at: the model of a checkpoint can be
    loaded alone. Beyond that, with `strict`, whatever is missing on either side is an error that lists all of it;
    without, it is listed in what is returned. Shapes and dtypes must always fit. An optimizer that had not stepped when
    it was saved has no state after the load either. All ranks give the same uri, names and settings. Raises
    CheckpointError, CorruptCheckpoint or IncompleteCheckpoint, StorageError, and PeerFailed if another rank failed;
    then the contents of `into` are undefined.
    """
    coordinator = Coordinator.of(process_group, timeout_s)
    with coordinator.guarded():
        options = Options(chosen=Chosen.of(names), strict=strict, cast=cast)
        checkpoint = open_together(uri, coordinator, key=key_or_default(key), options=options.to_json())
        return load_into(checkpoint, into, options, coordinator, process_group)


def open(uri: Uri, *, key: SigningKey | None = None) -> OpenCheckpoint:  # noqa: A001 - read as checkpoint.open
    """The checkpoint in the folder `uri`, or the newest complete one of the run in it, for reading parts of it.

    Reads the manifest alone. Raises CheckpointError, CorruptCheckpoint or IncompleteCheckpoint.
    """
    return OpenCheckpoint(open_uri(uri, key=key_or_default(key)))
