"""Copies of raysharded checkpoints: with new data files, digests and writer's name; the rest stays as it was."""

from __future__ import annotations

from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.interop.locations import Place
from raysharded.checkpoint.interop.names import chosen
from raysharded.checkpoint.interop.results import Imported
from raysharded.checkpoint.interop.slabs import Progress, cut_tensors, read_slabs
from raysharded.checkpoint.interop.writer_stream import Identity, Ingest
from raysharded.checkpoint.reader import Checkpoint


def copy_checkpoint(
    checkpoint: Checkpoint,
    dest: Place,
    *,
    names: tuple[str, ...] = (),
    key: SigningKey | None = None,
    progress: Progress = lambda _: None,
) -> Imported:
    """Write the checkpoint, or the tensors that `names` (patterns) match, into the folder `dest`.

    Every byte is checked during the copy. A part of a state is written without the tree of the whole state. Raises
    CheckpointError if `dest` is not free, as in `save`, CorruptCheckpoint for damage, StorageError if storage fails.
    """
    manifest = checkpoint.manifest
    wanted = chosen(manifest.tensors, names)
    ingest = Ingest(dest, writer="copy", step=manifest.step)
    for name in wanted:
        ingest.declare(name, manifest.tensors[name])
    for slab in read_slabs(checkpoint, cut_tensors(checkpoint, wanted)):
        ingest.add(slab)
        progress(len(slab.data))
    identity = Identity(
        run=manifest.run,
        generation=manifest.generation,
        tree=manifest.tree if len(wanted) == len(manifest.tensors) else None,
        data=manifest.data,
        metadata=manifest.metadata,
    )
    return ingest.commit(identity, key)
