"""Copies of raysharded checkpoints: with new data files, digests and writer's name; the rest stays as it was.

A copy of a part has the tensors and values that patterns of names match, each at its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from raysharded.checkpoint.format.manifest import Manifest
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.interop.dcp.flatten import tensor_leaf
from raysharded.checkpoint.interop.locations import Place
from raysharded.checkpoint.interop.names import chosen, is_trainers
from raysharded.checkpoint.interop.results import Imported
from raysharded.checkpoint.interop.slabs import Progress, cut_tensors, read_slabs
from raysharded.checkpoint.interop.writer_stream import Identity, Ingest
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.state_dict.tree import Path, Tree, leaves, name_of

_IsWanted = Callable[[str], bool]


def chosen_part(manifest: Manifest, patterns: tuple[str, ...]) -> tuple[list[str], Tree | None]:
    """The pair (tensors, tree) of the part that the patterns match; all of the checkpoint without patterns.

    Law: a tensor that an export of the whole contains has the same name in an export of the part. A trainer's
    checkpoint has no tree, nor has its part. Raises CheckpointError if a pattern matches neither a tensor
    nor a value, CorruptCheckpoint for an invalid tree.
    """
    if not patterns:
        return list(manifest.tensors), manifest.tree
    values = [] if manifest.tree is None else [name_of(path) for path, name, _ in leaves(manifest.tree) if name is None]
    wanted = set(chosen([*manifest.tensors, *values], patterns))
    tensors = [name for name in manifest.tensors if name in wanted]
    if manifest.tree is not None:
        return tensors, _part(manifest.tree, (), wanted.__contains__) or {"dict": []}
    if is_trainers(manifest.tensors):
        return tensors, None
    # Without a tree, a part might have only names that a trainer would give, and be taken for a trainer's state.
    return tensors, {"dict": [[name, tensor_leaf(name)] for name in tensors]}


def _part(tree: Tree, path: Path, is_wanted: _IsWanted) -> Tree | None:
    """The tree's wanted tensors and values; None if there are none.

    A dict or a list without tensors is one value, as for a load: it is kept whole if any name in it is wanted. A list
    that loses items becomes a dict by index, as names have the index.
    """
    if all(name is None for _, name, _ in leaves(tree)):
        return tree if any(map(is_wanted, _names(tree, path))) else None
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tree if is_wanted(content) else None
    children = content if kind == "dict" else enumerate(content)
    parts = [[key, _part(child, (*path, key), is_wanted)] for key, child in children]
    kept = [[key, part] for key, part in parts if part is not None]
    if kind == "dict" or len(kept) < len(parts):
        return {"dict": kept} if kept else None
    return {kind: [part for _, part in kept]}


def _names(tree: Tree, path: Path) -> Iterator[str]:
    return (name_of((*path, *below)) for below, _, _ in leaves(tree))


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
