"""The `StorageReader` for `torch.distributed.checkpoint.load`."""

from __future__ import annotations

import io
import logging
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from raysharded.checkpoint.format.paths import new_save_id
from raysharded.checkpoint.format.signing import SigningKey, signing_key_from_environment
from raysharded.checkpoint.interop.dcp.flatten import Entry, TensorEntry, ValueEntry, entries_of
from raysharded.checkpoint.interop.dcp.planner_data import Planned
from raysharded.checkpoint.interop.dcp.torch_bytes import saved, value_of
from raysharded.checkpoint.interop.locations import absolute, place_of
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.checkpoint.state_dict.staging import STAGE_BYTES, bytes_of, is_in_place, torch_dtype
from raysharded.errors import CheckpointError, RayshardedError

_log = logging.getLogger("raysharded.checkpoint")


class RayshardedReader(StorageReader):
    """A `storage_reader` for torch.distributed.checkpoint's `load`, for any raysharded checkpoint at any layout.

    A rank reads only the bytes of its boxes, straight into tensors that are contiguous in host memory. A trainer's
    checkpoint appears as {"model": {...}, "optimizer": {"state": {...}}}. Each rank opens the manifest. Its digest goes
    with the rank's plan: if ranks opened different checkpoints, `load` fails on every rank. A planner that makes both
    the local and the global plans anew drops the digest, and nothing is compared.
    """

    def __init__(self, uri: str | os.PathLike[str] | None = None, *, key: SigningKey | None = None) -> None:
        """`uri`: a checkpoint's folder, unless `load` gets a `checkpoint_id`. A relative path is made absolute at once.

        `key`: by default the one in the environment, if any. With a key, a checkpoint that was not signed with it is
        rejected.
        """
        self._uri = None if uri is None else absolute(uri)
        self._key = key
        self._load_id = new_save_id()
        self._checkpoint: Checkpoint | None = None
        self._entries: dict[str, Entry] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._uri = absolute(checkpoint_id)
        self._checkpoint, self._entries = None, {}
        self._load_id = new_save_id()

    @property
    def checkpoint_id(self) -> str | None:
        return self._uri

    def read_metadata(self) -> Metadata:
        """Metadata with every tensor as one chunk. The files of its parts are found when they are read."""
        if not self._uri:
            raise CheckpointError("no folder was given: RayshardedReader(uri), or checkpoint_id=... in load.")
        try:
            storage, prefix = place_of(self._uri)
            checkpoint = open_checkpoint(storage, prefix, key=self._key or signing_key_from_environment())
        except RayshardedError as error:
            _log.error("%s", error)  # torch 2.9 drops the error and reports only that there is no metadata
            raise
        self._checkpoint = checkpoint
        planned = Planned.recorded_in(checkpoint.manifest.metadata)
        self._entries = {entry.key: entry for entry in entries_of(checkpoint.manifest, is_flat=planned.is_flat)}
        return Metadata(
            state_dict_metadata={k: _described(checkpoint, entry) for k, entry in self._entries.items()},
            planner_data=planned.data({k: entry.path for k, entry in self._entries.items()}),
            storage_data={},
            storage_meta=StorageMeta(
                checkpoint_id=self._uri, save_id=checkpoint.manifest.save_id, load_id=self._load_id
            ),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return self._with_digest(plan)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Called on the coordinator. Raises CheckpointError if a rank opened another checkpoint."""
        for rank, plan in enumerate(plans):
            self._require_same(plan, f"rank {rank}")
        return [self._with_digest(plan) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        checkpoint = self._opened()
        self._require_same(plan, "the coordinator")  # again: a planner may have dropped the digest of the local plan
        wanted: list[_Target] = []
        for item in plan.items:
            entry = self._entries[item.storage_index.fqn]
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(saved(value_of(checkpoint, entry))))
            elif 0 not in item.lengths:
                assert isinstance(entry, TensorEntry)
                wanted.append(_Target.of(entry.name, item, planner.resolve_tensor(item).detach(), checkpoint))
        for targets in _batches(wanted):
            self._fill(checkpoint, targets, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _opened(self) -> Checkpoint:
        assert self._checkpoint is not None, "read_metadata comes first"
        return self._checkpoint

    def _with_digest(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=_Digest(self._opened().digest))

    def _require_same(self, plan: LoadPlan, whose: str) -> None:
        """Raise CheckpointError if the plan carries the digest of another checkpoint. `whose`: the other's reader."""
        theirs, ours = plan.storage_data, self._opened().digest
        if isinstance(theirs, _Digest) and theirs.value != ours:
            raise CheckpointError(
                f"{self._uri}: this rank opened the checkpoint of digest {ours}, {whose} that of {theirs.value}. It "
                "was replaced in between, or the ranks were given different folders. Give the same folder on all "
                "ranks, and load again."
            )

    def _fill(self, checkpoint: Checkpoint, targets: list[_Target], planner: LoadPlanner) -> None:
        staged = [target.buffer() for target in targets]
        checkpoint.read_many(
            (target.name, target.offsets, target.sizes, bytes_of(buffer))
            for target, buffer in zip(targets, staged, strict=True)
        )
        for target, buffer in zip(targets, staged, strict=True):
            if buffer is target.tensor:
                increment_version(target.tensor)
            else:
                target.tensor.copy_(buffer)
            planner.commit_tensor(target.item, target.tensor)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))


@dataclass(frozen=True, slots=True)
class _Digest:
    """Digest of the manifest that a plan was made from."""

    value: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Target:
    """A tensor to fill with a box of one of the checkpoint's tensors."""

    item: ReadItem
    tensor: torch.Tensor
    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: torch.dtype
    """Dtype in the checkpoint."""

    @staticmethod
    def of(name: str, item: ReadItem, tensor: torch.Tensor, checkpoint: Checkpoint) -> _Target:
        dtype = torch_dtype(checkpoint.manifest.tensors[name].dtype)
        offsets, sizes = tuple(item.storage_offsets), tuple(item.lengths)
        if tuple(tensor.shape) != sizes:
            raise CheckpointError(f"{name}: {sizes} elements were planned for a tensor of shape {tuple(tensor.shape)}.")
        return _Target(item=item, tensor=tensor, name=name, offsets=offsets, sizes=sizes, dtype=dtype)

    @property
    def is_direct(self) -> bool:
        """Whether bytes can be read straight into the tensor's memory."""
        return is_in_place(self.tensor) and self.tensor.dtype == self.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.sizes) * self.dtype.itemsize

    def buffer(self) -> torch.Tensor:
        """The memory to read into: the tensor itself where possible."""
        return self.tensor if self.is_direct else torch.empty(self.sizes, dtype=self.dtype)


def _batches(targets: list[_Target]) -> Iterator[list[_Target]]:
    """First the targets that are filled in place, then batches of the others, of a bounded number of bytes each."""
    yield [target for target in targets if target.is_direct]
    batch: list[_Target] = []
    held = 0
    for target in targets:
        if target.is_direct:
            continue
        if batch and held + target.size_bytes > STAGE_BYTES:
            yield batch
            batch, held = [], 0
        batch.append(target)
        held += target.size_bytes
    yield batch


def _described(checkpoint: Checkpoint, entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if isinstance(entry, ValueEntry) or entry.as_number:
        return BytesStorageMetadata()
    info = checkpoint.manifest.tensors[entry.name]
    shape = torch.Size(info.shape)
    chunk = ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)
    return TensorStorageMetadata(TensorProperties(dtype=torch_dtype(info.dtype)), shape, [chunk])
