"""A fork's own copy of the checkpoint that it began with: afterwards it does not need its parent.

The data files are copied byte by byte, and every chunk is checked. The manifest is the parent's, except for its run,
writer, generation, save id and paths. The claim of the fork's owner commits the copy, as it does every save.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from raysharded.checkpoint.chunk_reader import DataFiles, Span, View
from raysharded.checkpoint.claims import Claims, commit_claimed
from raysharded.checkpoint.format.manifest import VERSION, FileRecord
from raysharded.checkpoint.format.paths import data_path, key_of, save_prefix
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.reader import Checkpoint
from raysharded.checkpoint.retention.catalog import CheckpointRef, list_checkpoints, open_ref
from raysharded.checkpoint.retention.fork_reference import open_reference
from raysharded.checkpoint.retention.forks.fork import drop_reference
from raysharded.checkpoint.storage import Storage
from raysharded.errors import CheckpointError, RefusedCheckpoint
from raysharded.locations import join_url, name_of


def copy_parent(
    run: Storage, ref: CheckpointRef, claims: Claims, generation: int, *, key: SigningKey | None = None
) -> None:
    """Give the fork a copy of the checkpoint that `ref` refers to, unless it has a newer one; then drop the reference.

    `claims` own the fork since `generation`. After a failure, a repeated call copies anew; the fork's next `prune`
    deletes what the first one left.

    Raises CheckpointError if the parent's checkpoint cannot be read, and RefusedCheckpoint if it is signed and there is
    no key.
    """
    if not _has_its_own(run, key):
        found = open_reference(run, ref.prefix, key=key)
        if found.signed and key is None:
            raise RefusedCheckpoint(
                f"{join_url(found.storage.url, found.prefix)} is signed: a copy of it needs the key. Set "
                "RAYSHARDED_CHECKPOINT_KEY or RAYSHARDED_CHECKPOINT_KEY_FILE, as its writers did."
            )
        _copy(found, run, claims, generation, key)
    drop_reference(run, ref, key=key)


def _has_its_own(run: Storage, key: SigningKey | None) -> bool:
    for ref in list_checkpoints(run, key=key):
        if ref.state == "committed":
            try:
                open_ref(run, ref, key=key)
            except CheckpointError:
                continue
            return True
    return False


def _copy(found: Checkpoint, run: Storage, claims: Claims, generation: int, key: SigningKey | None) -> None:
    save_id = f"g{generation:06d}_{claims.writer}"
    prefix = save_prefix(found.step, save_id)
    source = DataFiles(found.storage, found.prefix, found.manifest.files)
    files = [_copied(source, file, number, run, prefix) for number, file in enumerate(found.manifest.files)]
    manifest = replace(
        found.manifest,
        run=name_of(run.url),
        generation=generation,
        save_id=save_id,
        writer=claims.writer,
        files=tuple(files),
        version=VERSION,
    )
    commit_claimed(run, claims, prefix, manifest, key=key)


def _copied(source: DataFiles, file: FileRecord, number: int, run: Storage, prefix: str) -> FileRecord:
    path = data_path(prefix, f"copy{number:05d}", partitioned=run.traits.partitioned)
    run.write(key_of(prefix, path), _Chunks(source, file))
    if file.digest_table:
        run.write(f"{key_of(prefix, path)}.b3", [source.digests(file)])
    return replace(file, path=path)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """A file's chunks, each read and checked when it is needed: every attempt to write them reads them again."""

    source: DataFiles
    file: FileRecord

    def __iter__(self) -> Iterator[memoryview]:
        for chunk in range(self.file.num_chunks):
            span = Span(self.file, chunk, chunk + 1)
            data = np.empty(span.size_bytes, np.uint8)
            views = [View(span.start, data)]
            self.source.read(span, views)
            for damage in self.source.corruption(span, views):
                raise damage
            yield data.data
