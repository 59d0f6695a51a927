"""Writing a checkpoint: every worker its shard, then one of them (or the driver) the manifest.

    records = write_shard(storage, prefix, writer="w0003", tensors=...)     on every worker, in parallel
    commit(storage, prefix, Manifest(..., files=tuple(all records)))        once, when all have returned

Until `commit` the save is invisible; killed at any moment, it leaves nothing but files that `catalog.prune` removes.
"""

from __future__ import annotations

from collections.abc import Sequence

from raysharded.checkpoint.encoding import decode, encode
from raysharded.checkpoint.manifest import CHUNK_SIZE_BYTES, FileRecord, Manifest
from raysharded.checkpoint.paths import MANIFEST_NAME, data_file_name, parse_save_folder
from raysharded.checkpoint.shardfile import ShardTensor as ShardTensor, chunk_digests, lay_out
from raysharded.checkpoint.storage import Storage
from raysharded.errors import CheckpointError, IncompleteCheckpoint


def write_shard(
    storage: Storage,
    prefix: str,
    *,
    writer: str,
    tensors: Sequence[ShardTensor],
    chunk_size_bytes: int = CHUNK_SIZE_BYTES,
) -> list[FileRecord]:
    """What was written, for the manifest: one file `<prefix>/<writer>.safetensors`, or none if all pieces are empty.

    Durable on return. The data is not copied; it must not change until the call returns. `writer` must differ
    between the workers of one save. Raises CheckpointError for wrong pieces, StorageError if storage fails.
    """
    path = data_file_name(writer)
    parts, boxes = lay_out(tensors, {"format": "pt", "raysharded.version": "1", "raysharded.writer": writer})
    if not boxes:
        return []
    digests = chunk_digests(parts, chunk_size_bytes)
    storage.write(f"{prefix}/{path}", parts)
    return [
        FileRecord(
            path=path,
            size_bytes=sum(len(part) for part in parts),
            chunk_size_bytes=chunk_size_bytes,
            digests=digests,
            boxes=tuple(boxes),
        )
    ]


def commit(storage: Storage, prefix: str, manifest: Manifest) -> bool:
    """Makes the save real. True if this manifest is the one in place, False if another writer's is.

    A manifest that is already there and names the same save, writer and generation is our own (a lost reply): True.
    Raises IncompleteCheckpoint if boxes or files are missing, CheckpointError if `prefix` is not this save's,
    StorageError if storage fails (then the save may or may not be committed: call again to find out).
    """
    named = parse_save_folder(prefix.rsplit("/", 1)[-1])
    if named is not None and named != (manifest.step, manifest.save_id):
        raise CheckpointError(
            f"{storage.url}/{prefix} is the folder of step {named[0]}, save {named[1]!r}, but the manifest is of step "
            f"{manifest.step}, save {manifest.save_id!r}. Give save_prefix(step, save_id)."
        )
    data = encode(manifest)
    present = set(storage.list(prefix))
    missing = [file.path for file in manifest.files if f"{prefix}/{file.path}" not in present]
    if missing:
        raise IncompleteCheckpoint(
            f"step {manifest.step}: {len(missing)} of {len(manifest.files)} data files are not under "
            f"{storage.url}/{prefix}; first: {missing[0]}. Save the step again."
        )
    key = f"{prefix}/{MANIFEST_NAME}"
    if storage.put_if_absent(key, data):
        return True
    found = storage.read(key)
    return found == data or _identity(decode(found, f"{storage.url}/{key}")) == _identity(manifest)


def _identity(manifest: Manifest) -> tuple[str, str, int]:
    return manifest.save_id, manifest.writer, manifest.generation
