"""Saving of a sharded state: every rank writes its boxes, rank 0 the manifest, and all ranks learn the same outcome.

1. Each rank reports its boxes to rank 0, which assigns each box to one rank, so that it is written once.
2. Each rank writes its files into a folder that only this save uses, and reports them to rank 0.
3. Rank 0 puts the manifest, which commits the checkpoint, and notifies all ranks.

A failure before step 3 leaves no checkpoint, and each rank removes its files. From step 3 on a rank cannot know whether
the manifest exists, and removes nothing.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np

from raysharded.checkpoint.format.boxes import BoxTable
from raysharded.checkpoint.format.encoding import encode
from raysharded.checkpoint.format.limits import MAX_NUMBER
from raysharded.checkpoint.format.manifest import FileRecord, Manifest, TensorInfo, check_tensors, shown
from raysharded.checkpoint.format.paths import data_path, key_of, new_save_id, parse_save_folder
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.read_plan.dedup import Job, Share, assign, check_coverage, global_tensors
from raysharded.checkpoint.sharded_io.checkpoint_uri import Uri, key_or_default, require_free, storage_above
from raysharded.checkpoint.sharded_io.coordinator import Coordinator, PeerFailed
from raysharded.checkpoint.state_dict import tree
from raysharded.checkpoint.state_dict.rank_merge import merge, require_same
from raysharded.checkpoint.state_dict.replicated import digests_of, warn_of_differences
from raysharded.checkpoint.state_dict.shard_boxes import Held, held_of
from raysharded.checkpoint.state_dict.staging import STAGE_BYTES, Piece, batches_of_bytes
from raysharded.checkpoint.storage import Storage
from raysharded.checkpoint.writer import commit, write_shard
from raysharded.display.plain_text import masked
from raysharded.errors import CheckpointError, RayshardedError
from raysharded.locations import join_url


def file_as_json(file: FileRecord) -> dict[str, Any]:
    """JSON form of a file record. Law: file_of_json(file_as_json(file)) == file."""
    boxes = file.boxes
    return {
        "path": file.path,
        "size_bytes": file.size_bytes,
        "chunk_size_bytes": file.chunk_size_bytes,
        "digests": file.digests.hex(),
        "digest_table": file.digest_table,
        "names": boxes.names,
        "tensor": boxes.tensor.tolist(),
        "ndim": boxes.ndim.tolist(),
        "offsets": boxes.offsets.tolist(),
        "sizes": boxes.sizes.tolist(),
        "start": boxes.start.tolist(),
    }


def file_of_json(value: dict[str, Any]) -> FileRecord:
    count = len(value["start"])
    return FileRecord(
        path=value["path"],
        size_bytes=value["size_bytes"],
        chunk_size_bytes=value["chunk_size_bytes"],
        digests=bytes.fromhex(value["digests"]),
        digest_table=value["digest_table"],
        boxes=BoxTable(
            names=tuple(value["names"]),
            tensor=np.array(value["tensor"], np.int32),
            ndim=np.array(value["ndim"], np.int32),
            offsets=np.array(value["offsets"], np.int64).reshape(count, -1),
            sizes=np.array(value["sizes"], np.int64).reshape(count, -1),
            start=np.array(value["start"], np.int64),
        ),
    )


_COMMITTING = "committing"
"""Phase of a rank that reports, or has reported, what it wrote. From then on the checkpoint may be committed."""
_REJECTED = "rejected"
"""Phase of rank 0 once another save has the uri: this one can never be committed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint that is complete and durable."""

    uri: str
    """Folder of the checkpoint."""
    step: int
    """The optimizer step that `save` was given."""
    digest: str
    """Digest of the manifest. It stands for every byte of the checkpoint."""
    size_bytes: int
    """Size of all data files, of all ranks."""
    seconds: float
    """Time from the call until the checkpoint was durable, on this rank."""

    def __repr__(self) -> str:
        what = ", ".join(f"{name}={getattr(self, name)!r}" for name in ("step", "digest", "size_bytes", "seconds"))
        return f"Saved(uri={masked(self.uri)!r}, {what})"


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """Contents of a save other than the state."""

    step: int = 0
    run: str = ""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(
        step: int,
        run: str,
        metadata: Mapping[str, Any] | None,
        metrics: Mapping[str, float] | None,
        data: Mapping[str, Any] | None,
    ) -> About:
        """A copy of the arguments of the public calls. Metrics become a part of the metadata.

        Raises CheckpointError for values that a manifest cannot hold, before anything is written.
        """
        _require_plain(step, run, metadata, metrics, data)
        more = {"metrics": dict(metrics)} if metrics else {}
        about = About(step=step, run=run, metadata={**(metadata or {}), **more}, data=dict(data or {}))
        for what, part in (("metadata", replace(about, data={})), ("data", replace(about, metadata={}))):
            if not (part.run or part.metadata or part.data):  # nothing to check, and training is waiting
                continue
            try:
                encode(_manifest_of(part))
            except CheckpointError as error:
                raise CheckpointError(f"{what}= cannot be stored: {error}") from error
        return replace(about, metadata=deepcopy(about.metadata), data=deepcopy(about.data))


def _require_plain(step: Any, run: Any, metadata: Any, metrics: Any, data: Any) -> None:
    if type(step) is not int or not 0 <= step <= MAX_NUMBER:
        raise CheckpointError(f"step={shown(step)}: give a whole number from 0 to 2^62.")
    if not isinstance(run, str):
        raise CheckpointError(f"run={run!r}: give a name, as text.")
    for name, value in (("metadata", metadata), ("metrics", metrics), ("data", data)):
        if value is not None and not isinstance(value, Mapping):
            raise CheckpointError(f"{name}= is a {type(value).__qualname__}: give a dict.")
    if metrics and "metrics" in (metadata or {}):
        raise CheckpointError("metadata= has 'metrics' too, which is where metrics= goes. Give one of the two.")
    for name, metric in (metrics or {}).items():
        if not isinstance(name, str) or not _is_finite_number(metric):
            raise CheckpointError(
                f"metrics= has {name!r}: {shown(metric)}. Give finite numbers by name, as float(loss)."
            )


def _is_finite_number(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _manifest_of(about: About) -> Manifest:
    """The part of the manifest that is known before anything is written."""
    return Manifest(
        run=about.run,
        step=about.step,
        generation=0,
        save_id="x",
        writer="x",
        created_at=0.0,
        tensors={},
        files=(),
        data=about.data,
        metadata=about.metadata,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Destination of a save."""

    uri: str
    storage: Storage
    prefix: str
    key: SigningKey | None = None
    overwrite: bool = False
    """Whether an existing checkpoint is replaced."""

    @staticmethod
    def of(uri: Uri, key: SigningKey | None, *, overwrite: bool = False) -> Target:
        """The folder `uri`, signed with the given key, or else with the one in the environment, if any."""
        storage, prefix = storage_above(uri)
        return Target(uri=os.fspath(uri), storage=storage, prefix=prefix, key=key_or_default(key), overwrite=overwrite)


@dataclass(frozen=True, slots=True)
class Content:
    """Content that this rank saves."""

    held: list[Held]
    tree: tree.Tree


def content_of(state: Any) -> Content:
    """The state taken apart, without copies. Raises CheckpointError for values that cannot be stored."""
    flat = tree.flatten(state)
    return Content([held_of(name, tensor) for name, tensor in flat.tensors.items()], flat.tree)


def write(
    content: Content, target: Target, about: About, coordinator: Coordinator, *, stage_bytes: int = STAGE_BYTES
) -> Saved:
    """Carry out a save. Every rank must call it, in `guarded`. The content must not change until it returns.

    Raises the error of this rank, or PeerFailed if another rank failed. Then this save left no checkpoint, unless the
    failure was rank 0's put of the manifest: then it may have. With `overwrite` the older checkpoint stays.
    """
    began = time.monotonic()
    begun: list[str] = []
    try:
        save = _agree(content, target, about, coordinator)
        written = _write_own(save, content, target, coordinator.rank, stage_bytes, begun)
        report = [file_as_json(file) for file in written]
        if coordinator.rank != 0:  # rank 0 may commit as soon as it has the report, before `gather` returns here
            coordinator.phase = _COMMITTING
        everyone = coordinator.gather(report)
        coordinator.phase = _COMMITTING
        outcome = coordinator.scatter(_commit(everyone, save, target, about, coordinator))
    except BaseException as error:
        if (error.phase if isinstance(error, PeerFailed) else coordinator.phase) != _COMMITTING:
            _remove(target, begun)
        raise
    return Saved(
        uri=target.uri,
        step=about.step,
        digest=outcome["digest"],
        size_bytes=outcome["size_bytes"],
        seconds=time.monotonic() - began,
    )


@dataclass(frozen=True, slots=True)
class _Save:
    """Agreement of the ranks on one save."""

    save_id: str
    subfolder: str
    own: Sequence[Any]
    """Boxes for this rank to write, each [number of its tensor, number of the part, offsets, sizes]."""
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    tree: tree.Tree = None
    instead_of: bytes | None = None
    """The manifest to replace, if any. Only rank 0 has this and the two fields above."""


def _agree(content: Content, target: Target, about: About, coordinator: Coordinator) -> _Save:
    mine = json.dumps([_share(held).to_json() for held in content.held], separators=(",", ":"))
    where = join_url(target.storage.url, target.prefix)
    same = {"uris": where, "steps": about.step, "run names": about.run, "values of overwrite": target.overwrite}
    digests = digests_of(content.held) if coordinator.world_size > 1 else {}
    everyone = coordinator.gather({"shares": mine, "tree": content.tree, "digests": digests, "same": same})
    if everyone is None:
        return _Save(**coordinator.scatter(None))
    for what in same:
        require_same(what, [one["same"][what] for one in everyone])
    own, infos = _plan(tuple(one["shares"] for one in everyone))
    whole = merge([one["tree"] for one in everyone])
    with _as_content():
        encode(replace(_manifest_of(About()), tree=whole))
    warn_of_differences([one["digests"] for one in everyone])
    older = require_free(target.storage, target.prefix, about.step, target.uri, overwrite=target.overwrite)
    named = parse_save_folder(target.prefix)
    subfolder = new_save_id()
    save_id = named[1] if named else subfolder
    agreed = [{"save_id": save_id, "subfolder": subfolder, "own": one} for one in own]
    return _Save(**coordinator.scatter(agreed), tensors=infos, tree=whole, instead_of=older)


@lru_cache(maxsize=1)  # a program saves the same layout repeatedly; for hundreds of ranks this takes seconds
def _plan(everyone: tuple[str, ...]) -> tuple[list[list[Any]], dict[str, TensorInfo]]:
    """The pair (boxes for each rank to write, all tensors), from the JSON of each rank's shares."""
    shares = [[Share.from_json(share) for share in json.loads(one)] for one in everyone]
    check_coverage(shares)
    infos = {name: TensorInfo(dtype=share.dtype, shape=share.shape) for name, share in global_tensors(shares).items()}
    with _as_content():
        check_tensors(replace(_manifest_of(About()), tensors=infos), "its tensors")
    return _own_of(assign(shares), len(shares)), infos


@contextmanager
def _as_content() -> Iterator[None]:
    """Within it, an error of a manifest that is to be written is one of the content, and no checkpoint is corrupt."""
    try:
        yield
    except CheckpointError as error:
        raise CheckpointError(f"the state cannot be stored: {error}") from error


def _share(held: Held) -> Share:
    return Share(held.name, held.dtype, held.shape, tuple((part.offsets, part.sizes) for part in held.parts))


def _own_of(jobs: Sequence[Job], world_size: int) -> list[list[Any]]:
    own: list[list[Any]] = [[] for _ in range(world_size)]
    for job in jobs:
        _, number, which = job.place
        own[job.doer].append([number, which, *job.box])
    return own


def _write_own(
    save: _Save, content: Content, target: Target, rank: int, stage_bytes: int, begun: list[str]
) -> list[FileRecord]:
    """Write this rank's boxes. `begun` gets the path of every file before it is begun."""
    pieces = [_piece(content.held[number], which, *box) for number, which, *box in save.own]
    storage, prefix = target.storage, target.prefix
    written: list[FileRecord] = []
    for number, batch in enumerate(batches_of_bytes(pieces, stage_bytes)):
        writer = f"rank{rank:05d}" if number == 0 else f"rank{rank:05d}-{number:04d}"
        begun.append(data_path(prefix, writer, partitioned=storage.traits.partitioned, subfolder=save.subfolder))
        written += write_shard(storage, prefix, writer=writer, tensors=batch, subfolder=save.subfolder)
    return written


def _piece(held: Held, which: int, offsets: Sequence[int], sizes: Sequence[int]) -> Piece:
    return Piece(held, held.parts[which].within(offsets, sizes))


def _commit(
    everyone: list[Any] | None, save: _Save, target: Target, about: About, coordinator: Coordinator
) -> list[Any] | None:
    """Put the manifest on rank 0. Returns the outcome for each rank."""
    if everyone is None:
        return None
    files = tuple(file_of_json(file) for one in everyone for file in one)
    manifest = Manifest(
        run=about.run,
        step=about.step,
        generation=0,
        save_id=save.save_id,
        writer=f"save-{save.subfolder}",  # unique: of two that race for a uri, one must learn that it lost
        created_at=time.time(),
        tensors=save.tensors,
        files=files,
        tree=save.tree,
        data=about.data,
        metadata=about.metadata,
    )
    digest = commit(target.storage, target.prefix, manifest, key=target.key, instead_of=save.instead_of)
    if digest is None:
        coordinator.phase = _REJECTED
        raise CheckpointError(f"{target.uri}: another save was committed there in the meantime. Choose another uri.")
    return [{"digest": digest, "size_bytes": sum(f.size_bytes for f in files)}] * coordinator.world_size


def _remove(target: Target, begun: Sequence[str]) -> None:
    """Delete the files of a save that can no longer be committed. If storage fails, they stay."""
    with suppress(RayshardedError, OSError):
        target.storage.delete([key_of(target.prefix, path) for file in begun for path in (file, f"{file}.b3")])
