"""Writing a checkpoint: every worker writes its shard, then one worker (or the driver) writes the manifest.

    records = write_shard(storage, prefix, writer="w0003", tensors=...)     on every worker, in parallel
    commit(storage, prefix, Manifest(..., files=tuple(all records)))        once, when all have returned

Until `commit` the save is invisible: a killed writer leaves only files that nobody reads. In a run the save is visible
after its commit claim; see `raysharded.checkpoint.claims.commit_claimed`.
"""

from __future__ import annotations

from collections.abc import Sequence

from raysharded.checkpoint.format.encoding import Encoded, decode, digest, digest_of, encode
from raysharded.checkpoint.format.manifest import DIGEST_BYTES, FileRecord, Manifest
from raysharded.checkpoint.format.paths import MANIFEST_NAME, data_path, key_of, parse_save_folder
from raysharded.checkpoint.format.shardfile import ShardTensor as ShardTensor, chunk_digests, chunk_size_for, lay_out
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.storage.optional_operations import swap
from raysharded.checkpoint.threads import Threads
from raysharded.errors import CheckpointError, IncompleteCheckpoint
from raysharded.locations import join_url

MAX_INLINE_CHUNKS = 64
"""Maximum chunks of a file with digests in the manifest. More go into a file beside it, to keep manifests small."""

_LISTINGS = 16  # concurrently


def write_shard(
    storage: Storage,
    prefix: str,
    *,
    writer: str,
    tensors: Sequence[ShardTensor],
    subfolder: str = "",
    chunk_size_bytes: int | None = None,
) -> list[FileRecord]:
    """Write a shard; return its records for the manifest: one data file, or none if all pieces are empty.

    Durable on return. The data is not copied; it must not change until the call returns. `writer` must differ
    between the workers of one save, and the prefix or its `subfolder` between saves. Raises CheckpointError for invalid
    pieces, StorageError if storage fails.
    """
    path = data_path(prefix, writer, partitioned=storage.traits.partitioned, subfolder=subfolder)
    parts, boxes = lay_out(tensors, {"format": "pt", "raysharded.version": "2", "raysharded.writer": writer})
    if not len(boxes):
        return []
    chunk = chunk_size_bytes or chunk_size_for([len(part) for part in parts[1:]])
    key = key_of(prefix, path)
    with Threads(1, thread_name_prefix="raysharded-digest") as pool:  # in parallel with the write
        digesting = pool.submit(chunk_digests, parts, chunk)
        storage.write(key, parts)
        digests = digesting.result()
    table = ""
    if len(digests) > MAX_INLINE_CHUNKS * DIGEST_BYTES:
        table, digests = digest(digests), b""
        storage.write(f"{key}.b3", [digesting.result()])
    size_bytes = sum(len(part) for part in parts)
    return [
        FileRecord(
            path=path,
            size_bytes=size_bytes,
            chunk_size_bytes=chunk,
            digests=digests,
            digest_table=table,
            boxes=boxes,
        )
    ]


def commit(
    storage: Storage,
    prefix: str,
    manifest: Manifest,
    *,
    key: SigningKey | None = None,
    instead_of: bytes | None = None,
) -> str | None:
    """Put the manifest, which makes the save a checkpoint; in a run, the claim must follow.

    Returns the manifest's digest, or None if another writer's manifest is in place. An existing manifest of the same
    save, writer and generation counts as this call's own, because the reply may have been lost. With `instead_of`, a
    manifest as stored, the new one replaces that one and no other. The manifest is signed if a key is given.

    Raises IncompleteCheckpoint if boxes or files are missing, CheckpointError if `prefix` is not this save's.
    Raises StorageError if storage fails. The save may then be committed or not: repeat the call to find out.
    """
    named = parse_save_folder(prefix.rsplit("/", 1)[-1])
    if named is not None and named != (manifest.step, manifest.save_id):
        raise CheckpointError(
            f"{join_url(storage.url, prefix)} is the folder of step {named[0]}, save {named[1]!r}, but the manifest is "
            f"of step {manifest.step}, save {manifest.save_id!r}. Give save_prefix(step, save_id)."
        )
    encoded = encode(manifest, key)
    _require_files(storage, prefix, manifest)
    if encoded.index_path:
        storage.write(key_of(prefix, encoded.index_path), [encoded.index])
    at = key_of(prefix, MANIFEST_NAME)
    if instead_of is not None:
        ours = swap(storage, at, instead_of, encoded.manifest) or _holds(storage, at, encoded.manifest)
        return encoded.digest if ours else None
    return _put_manifest(storage, prefix, encoded, manifest, key)


def _put_manifest(
    storage: Storage, prefix: str, encoded: Encoded, manifest: Manifest, key: SigningKey | None
) -> str | None:
    at = key_of(prefix, MANIFEST_NAME)
    if storage.put_if_absent(at, encoded.manifest):
        return encoded.digest
    found = storage.read(at)
    if found == encoded.manifest:
        return encoded.digest
    other = decode(
        found,
        f"{join_url(storage.url, at)}",
        key=key,
        read_index=lambda path, size: storage.read(key_of(prefix, path), 0, size + 1),
    )
    return digest_of(found) if _identity(other) == _identity(manifest) else None


def _holds(storage: Storage, key: str, data: bytes) -> bool:
    try:
        return storage.read(key) == data
    except NoSuchKey:
        return False


def _require_files(storage: Storage, prefix: str, manifest: Manifest) -> None:
    paths = [file.path for file in manifest.files]
    paths += [file.table_path for file in manifest.files if file.digest_table]
    present = _listed(storage, {key_of(prefix, path).rpartition("/")[0] for path in paths})
    missing = [path for path in paths if key_of(prefix, path) not in present]
    if missing:
        raise IncompleteCheckpoint(
            f"step {manifest.step}: {len(missing)} of {len(paths)} files are not under "
            f"{join_url(storage.url, prefix)}; first: {missing[0]}. Save the step again."
        )


def _listed(storage: Storage, folders: set[str]) -> set[str]:
    """Keys below some folders: one, or up to 256 of this save on partitioned storage."""
    if len(folders) < 2:
        return {key for folder in folders for key in storage.list(folder)}
    with Threads(min(len(folders), _LISTINGS), thread_name_prefix="raysharded-list") as pool:
        return {key for keys in pool.map(storage.list, sorted(folders)) for key in keys}


def _identity(manifest: Manifest) -> tuple[str, str, int]:
    return manifest.save_id, manifest.writer, manifest.generation
