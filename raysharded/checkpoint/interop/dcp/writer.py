"""The `StorageWriter` for `torch.distributed.checkpoint.save`."""

from __future__ import annotations

import io
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from raysharded.checkpoint.format.limits import MAX_NUMBER
from raysharded.checkpoint.format.manifest import SAFETENSORS_DTYPES, FileRecord, Manifest, TensorInfo
from raysharded.checkpoint.format.paths import new_save_id
from raysharded.checkpoint.format.signing import SigningKey, signing_key_from_environment
from raysharded.checkpoint.interop.dcp.flatten import tensor_leaf, tree_of
from raysharded.checkpoint.interop.dcp.importer import decode_item
from raysharded.checkpoint.interop.dcp.planner_data import Planned
from raysharded.checkpoint.interop.dcp.torch_bytes import name_of
from raysharded.checkpoint.interop.locations import Place, absolute, named_save, place_of, prefix_of, url_of
from raysharded.checkpoint.sharded_io.checkpoint_uri import require_free, require_key
from raysharded.checkpoint.sharded_io.save import About
from raysharded.checkpoint.state_dict.shard_boxes import Held, Part
from raysharded.checkpoint.state_dict.staging import Piece, batches_of_bytes
from raysharded.checkpoint.state_dict.tree import Tree
from raysharded.checkpoint.writer import commit, write_shard
from raysharded.errors import CheckpointError

_NUMBER_AT_END = re.compile(r"[0-9]+\Z")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Written:
    """Report of one rank to the coordinator."""

    files: tuple[FileRecord, ...]
    tensors: Mapping[str, TensorInfo]
    values: Mapping[str, Tree]


class RayshardedWriter(StorageWriter):
    """A `storage_writer` for torch.distributed.checkpoint's `save` and `async_save`. One save at a time."""

    def __init__(
        self,
        uri: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        run: str = "",
        metadata: Mapping[str, Any] | None = None,
        overwrite: bool = False,
        key: SigningKey | None = None,
    ) -> None:
        """`uri`: the folder of one checkpoint, a path or any supported URL, unless `save` gets a `checkpoint_id`.

        A relative path is made absolute at once. `step`: by default the step in the folder's name, or the number at its
        end if that is at most 2^62, else 0. `metadata`: values that JSON can hold. `overwrite`: replace an existing
        checkpoint atomically. `key`: signs the manifest; by default the one in the environment, if any.

        Raises CheckpointError for a step, a run or metadata that cannot be stored, ConfigError for an invalid uri or
        key.
        """
        require_key(key)
        about = About.of(step or 0, run, metadata, None, None)
        self._uri = None if uri is None else absolute(uri)
        self._step, self._run, self._metadata = step, about.run, about.metadata
        self._overwrite, self._key = overwrite, key
        self._older: bytes | None = None
        self._is_coordinator, self._rank = False, 0
        self._save_id = new_save_id()
        self.digest: str | None = None
        """Digest of the last committed manifest. The coordinator knows it when `save` has returned."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._uri = absolute(checkpoint_id)

    @property
    def checkpoint_id(self) -> str | None:
        return self._uri

    def storage_meta(self) -> StorageMeta | None:
        """Information for planners about the save that begins: its folder, and a new id."""
        self._save_id = new_save_id()
        return self._meta()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives=False makes one checkpoint per rank, which is unsupported. Leave it out."
            )
        self._is_coordinator = is_coordinator
        self._rank = kwargs.get("rank") or 0
        self.digest = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if self._is_coordinator:
            place = self._place()
            step = self._identity(place[1])[0]
            self._older = require_free(*place, step, url_of(place), overwrite=self._overwrite)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write one data file with the tensors that are contiguous in host memory, without copying them.

        Each batch of the other tensors becomes one more file. They are copied to host memory, a bounded amount at a
        time.
        """
        values: dict[str, Tree] = {}
        pieces: list[Piece] = []
        for item in plan.items:
            data = planner.resolve_data(item)
            if item.type == WriteItemType.BYTE_IO:
                assert isinstance(data, io.BytesIO)
                values[item.index.fqn] = decode_item(item.index.fqn, data.getvalue())
            else:
                assert isinstance(data, torch.Tensor)
                pieces.append(_piece(item, data))
        infos = {piece.held.name: TensorInfo(dtype=piece.held.dtype, shape=piece.held.shape) for piece in pieces}
        storage, prefix = self._place()
        # A folder for this rank and this save alone: its name needs no agreement, and is never used again.
        subfolder = new_save_id()
        files: list[FileRecord] = []
        for number, tensors in enumerate(batches_of_bytes([piece for piece in pieces if 0 not in piece.part.sizes])):
            writer = f"rank{self._rank:05d}-{number:04d}"
            files += write_shard(storage, prefix, writer=writer, tensors=tensors, subfolder=subfolder)
        written = _Written(files=tuple(files), tensors=infos, values=values)
        size = sum(file.size_bytes for file in files)
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(MetadataIndex(f"rank{self._rank}"), size, written)])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the checkpoint. Called on the coordinator when every rank has written."""
        parts: list[_Written] = [result.storage_data for rank in results for result in rank]
        tensors = _all_tensors(metadata, parts)
        values = {key: value for part in parts for key, value in part.values.items()}
        planned = Planned.of(metadata)
        tree = tree_of(
            (planned.path(key), tensor_leaf(key) if key in tensors else values[key])
            for key in metadata.state_dict_metadata
        )
        storage, prefix = self._place()
        step, save_id = self._identity(prefix)
        manifest = Manifest(
            run=self._run,
            step=step,
            generation=0,
            save_id=save_id,
            writer=f"torch.distributed.checkpoint-{new_save_id()}",  # unique to this save, as in `save`
            created_at=time.time(),
            tensors=tensors,
            files=tuple(file for part in parts for file in part.files),
            tree=tree,
            metadata={**self._metadata, **planned.recorded()},
        )
        key = self._key or signing_key_from_environment()
        self.digest = commit(storage, prefix, manifest, key=key, instead_of=self._older)
        if self.digest is None:
            raise CheckpointError(f"{self._uri}: another writer committed a checkpoint there meanwhile.")
        metadata.storage_meta = self._meta()  # for the caller of `save`

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(os.fspath(checkpoint_id))

    def _meta(self) -> StorageMeta:
        prefix = prefix_of(self._uri) if self._uri else ""
        return StorageMeta(checkpoint_id=self._uri, save_id=self._identity(prefix)[1])

    def _place(self) -> Place:
        if not self._uri:
            raise CheckpointError("no folder was given: RayshardedWriter(uri), or checkpoint_id=... in save.")
        return place_of(self._uri)

    def _identity(self, prefix: str) -> tuple[int, str]:
        """The pair (step, save id). A folder named like a run's own determines both, unless `step` was given."""
        named = named_save(prefix) or (_number_at_end(prefix), self._save_id)
        return named[0] if self._step is None else self._step, named[1]


def _number_at_end(name: str) -> int:
    """The number at the end of a name as a step; 0 if there is none, or one that is too large for a step."""
    found = _NUMBER_AT_END.search(name)
    digits = found[0].lstrip("0") if found else ""
    if not digits or len(digits) > len(str(MAX_NUMBER)):
        return 0
    return int(digits) if int(digits) <= MAX_NUMBER else 0


def _piece(item: WriteItem, data: torch.Tensor) -> Piece:
    assert item.tensor_data is not None
    name, dtype = item.index.fqn, name_of(data.dtype)
    if dtype not in SAFETENSORS_DTYPES or data.layout != torch.strided:
        raise CheckpointError(
            f"{name}: a tensor of {data.dtype}, {data.layout} cannot be stored. Convert it to one of: "
            f"{', '.join(SAFETENSORS_DTYPES)}."
        )
    sizes = tuple(item.tensor_data.chunk.sizes)
    part = Part(tuple(item.tensor_data.chunk.offsets), sizes, (0,) * len(sizes))
    if tuple(data.shape) != sizes:
        raise CheckpointError(f"{name}: {sizes} elements were planned, but the tensor has shape {tuple(data.shape)}.")
    local = data.detach().resolve_conj().resolve_neg()
    return Piece(Held(name=name, dtype=dtype, shape=tuple(item.tensor_data.size), local=local, parts=(part,)), part)


def _all_tensors(metadata: Metadata, parts: list[_Written]) -> dict[str, TensorInfo]:
    """Infos of all tensors: as written, or as planned where there was nothing to write."""
    found: dict[str, TensorInfo] = {}
    for key, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            dtype = name_of(entry.properties.dtype)
            found[key] = TensorInfo(dtype=dtype, shape=tuple(entry.size))
    for part in parts:
        found |= part.tensors
    return found
