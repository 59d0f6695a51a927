"""Copies of raysharded checkpoints: with new data files, digests and writer's name; the rest stays as it was."""

from __future__ import annotations

from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.interop.locations import Place
from raysharded.checkpoint.interop.parts import chosen_part
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
    """Write the checkpoint, or the tensors and values that `names` (patterns) match, into the folder `dest`.

    Every byte is checked during the copy. A part of a state keeps its place: names and nesting are those of the whole
    state. A dict or list without tensors is one value, and is copied whole if a pattern matches any name in it. A list
    that loses items becomes a dict by index. Metadata and the position in the data are copied too.

    Raises CheckpointError if `dest` is not free, as in `save`, and if a pattern matches nothing. Raises
    CorruptCheckpoint for damage, StorageError if storage fails.
    """
    manifest = checkpoint.manifest
    wanted, tree = chosen_part(manifest, names)
    identity = Identity(
        run=manifest.run,
        generation=manifest.generation,
        tree=tree,
        data=manifest.data,
        metadata=manifest.metadata,
    )
    ingest = Ingest(dest, identity, writer="copy", step=manifest.step)
    for name in wanted:
        ingest.declare(name, manifest.tensors[name])
    for slab in read_slabs(checkpoint, cut_tensors(checkpoint, wanted)):
        ingest.add(slab)
        progress(len(slab.data))
    return ingest.commit(key)
