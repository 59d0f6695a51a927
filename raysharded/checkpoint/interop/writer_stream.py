"""Writer of a new checkpoint from a stream of slabs. It holds one data file's bytes at a time."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raysharded.checkpoint.format.manifest import FileRecord, Manifest, TensorInfo
from raysharded.checkpoint.format.paths import new_save_id
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.interop.locations import Place, named_save, url_of
from raysharded.checkpoint.interop.results import Imported
from raysharded.checkpoint.interop.slabs import Slab
from raysharded.checkpoint.sharded_io.checkpoint_uri import require_free
from raysharded.checkpoint.sharded_io.save import About
from raysharded.checkpoint.writer import ShardTensor, commit, write_shard
from raysharded.errors import CheckpointError

FILE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """Fields of a new checkpoint's manifest that describe its origin."""

    run: str = ""
    generation: int = 0
    tree: Any = None
    data: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)


class Ingest:
    """Collector of slabs, in any order, into one checkpoint. Not thread-safe."""

    def __init__(
        self, place: Place, identity: Identity, *, writer: str, step: int | None, file_bytes: int = FILE_BYTES
    ) -> None:
        """`writer`: the kind of writer. The manifest's name for it is unique to this attempt.

        `step` None: the step in the folder's name if it is named as a save, else 0. Raises CheckpointError if the
        folder is not free, as in `save`, and for a step, a run or metadata that cannot be stored.
        """
        named = named_save(place[1])
        self._step = step if step is not None else named[0] if named else 0
        About.of(self._step, identity.run, identity.metadata, None, identity.data)
        self._identity = identity
        require_free(*place, self._step, url_of(place))
        self._place = place
        self._file_bytes = file_bytes
        self._subfolder = new_save_id()  # unique to this attempt
        self._save_id = named[1] if named else self._subfolder
        self._writer = f"{writer}-{self._subfolder}"  # of two that race for a folder, one must learn that it lost
        self._held: list[Slab] = []
        self._held_bytes = 0
        self._tensors: dict[str, TensorInfo] = {}
        self._files: list[FileRecord] = []

    def declare(self, name: str, info: TensorInfo) -> None:
        """Declare a tensor before its slabs. A tensor without elements needs no more than this.

        Raises CheckpointError for a name that was declared before.
        """
        if name in self._tensors:
            raise CheckpointError(f"two tensors would be called {name!r}. Give a name map that keeps them apart.")
        self._tensors[name] = info

    def add(self, slab: Slab) -> None:
        """Keep a slab until a file is full."""
        if self._held and self._held_bytes + len(slab.data) > self._file_bytes:
            self._flush()
        self._held.append(slab)
        self._held_bytes += len(slab.data)

    def commit(self, key: SigningKey | None = None) -> Imported:
        """Commit the checkpoint.

        Raises IncompleteCheckpoint if slabs are missing, CheckpointError if another writer committed first.
        """
        self._flush()
        identity = self._identity
        manifest = Manifest(
            run=identity.run,
            step=self._step,
            generation=identity.generation,
            save_id=self._save_id,
            writer=self._writer,
            created_at=time.time(),
            tensors=self._tensors,
            files=tuple(self._files),
            tree=identity.tree,
            data=identity.data,
            metadata=identity.metadata,
        )
        storage, prefix = self._place
        digest = commit(storage, prefix, manifest, key=key)
        if digest is None:
            raise CheckpointError(f"{url_of(self._place)}: another writer committed a checkpoint there meanwhile.")
        return Imported(
            digest=digest,
            step=manifest.step,
            num_tensors=len(self._tensors),
            size_bytes=sum(info.size_bytes for info in self._tensors.values()),
        )

    def _flush(self) -> None:
        if not self._held:
            return
        storage, prefix = self._place
        self._files += write_shard(
            storage,
            prefix,
            writer=f"part{len(self._files):05d}",
            tensors=[_piece(slab) for slab in self._held],
            subfolder=self._subfolder,
        )
        self._held, self._held_bytes = [], 0


def _piece(slab: Slab) -> ShardTensor:
    return ShardTensor(
        name=slab.name,
        dtype=slab.info.dtype,
        shape=slab.info.shape,
        offsets=slab.offsets,
        sizes=slab.sizes,
        data=slab.data,
    )
