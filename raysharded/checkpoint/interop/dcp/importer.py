"""Import of a `torch.distributed.checkpoint` folder. No code in a pickle is run."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import torch

from raysharded.checkpoint.format.manifest import TensorInfo
from raysharded.checkpoint.format.paths import key_of
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.interop.dcp.flatten import encode_value, tensor_leaf, tree_of
from raysharded.checkpoint.interop.dcp.item_reader import read_item, tensor_slabs
from raysharded.checkpoint.interop.dcp.metadata import METADATA_NAME, Item, Metadata, Tensor, parse
from raysharded.checkpoint.interop.locations import Place, url_of
from raysharded.checkpoint.interop.names import chosen, matches
from raysharded.checkpoint.interop.results import Imported
from raysharded.checkpoint.interop.slabs import Progress, Slab
from raysharded.checkpoint.interop.writer_stream import Identity, Ingest
from raysharded.checkpoint.state_dict.tree import Tree
from raysharded.checkpoint.storage import NoSuchKey
from raysharded.display.plain_text import brief
from raysharded.errors import CheckpointError
from raysharded.locations import join_url

MAX_METADATA_BYTES = 1 << 30
MAX_VALUE_BYTES = 64 << 20


def import_dcp(
    source: Place,
    dest: Place,
    *,
    names: tuple[str, ...] = (),
    skip: tuple[str, ...] = (),
    step: int | None = None,
    run: str = "",
    metadata: Mapping[str, Any] | None = None,
    key: SigningKey | None = None,
    progress: Progress = lambda _: None,
) -> Imported:
    """Write the DCP checkpoint in the folder `source` into the folder `dest`. Keys become the tensors' names.

    `names` and `skip`: patterns of keys (such as `optimizer.*`) to import and to leave out. Values other than tensors
    are kept if JSON can hold them. `step`: by default the step in the name of `dest`, if it is named as a save, else 0.

    Raises CheckpointError if `dest` is not free, or if step, run or `metadata` cannot be stored. It also lists the
    values that cannot be kept, and names what a pickle requests beyond that. Raises CorruptCheckpoint and
    IncompleteCheckpoint for damage, StorageError if storage fails. After an error `dest` is not a checkpoint.
    """
    table = _table(source)
    wanted = _wanted(table, names, skip)
    values = _values(source, {k: table.values[k] for k in wanted if k in table.values})
    tensors = {k: table.tensors[k] for k in wanted if k in table.tensors}
    paths = table.paths or {k: (k,) for k in wanted}
    tree = tree_of((paths[k], tensor_leaf(k) if k in tensors else values[k]) for k in wanted)
    identity = Identity(run=run, tree=tree, metadata=metadata or {})
    ingest = Ingest(dest, identity, writer="import-dcp", step=step)
    for name, tensor in tensors.items():
        ingest.declare(name, _info(tensor))
        _take(ingest, source, name, tensor, progress)
    return ingest.commit(key)


def _table(source: Place) -> Metadata:
    storage, prefix = source
    at = key_of(prefix, METADATA_NAME)
    try:
        size = storage.size(at)
    except NoSuchKey as error:
        raise CheckpointError(
            f"{url_of(source)} has no {METADATA_NAME}: it is no complete checkpoint of torch.distributed.checkpoint."
        ) from error
    if size > MAX_METADATA_BYTES:
        raise CheckpointError(f"{join_url(storage.url, at)} has {size} bytes; at most {MAX_METADATA_BYTES} are read.")
    return parse(storage.read(at), join_url(storage.url, at))


def _wanted(table: Metadata, names: tuple[str, ...], skip: tuple[str, ...]) -> list[str]:
    return [k for k in chosen(table.keys, names) if not any(matches(k, pattern) for pattern in skip)]


def _values(source: Place, items: Mapping[str, Item]) -> dict[str, Tree]:
    """The values as trees. Raises CheckpointError that lists all values that cannot be kept."""
    found: dict[str, Tree] = {}
    problems: list[str] = []
    for key, item in items.items():
        try:
            found[key] = decode_item(key, _read_value(source, key, item))
        except CheckpointError as error:
            problems.append(str(error))
    if problems:
        raise CheckpointError(
            f"{len(problems)} of {len(items)} values cannot be kept; leave them out with skip=(key, ...) or --skip: "
            + " | ".join(problems[:10])
        )
    return found


def _read_value(source: Place, key: str, item: Item) -> bytes:
    if item.length > MAX_VALUE_BYTES:
        raise CheckpointError(f"{key}: {item.length} bytes of pickle, at most {MAX_VALUE_BYTES} are read.")
    storage, prefix = source
    return read_item(storage, prefix, item)


def decode_item(key: str, data: bytes) -> Tree:
    """A value that `torch.save` wrote, as a tree. Raises CheckpointError with the key if JSON cannot hold it."""
    try:
        value = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a broken or hostile pickle may raise anything
        reason = brief(str(error), 300)
        raise CheckpointError(f"{key}: cannot be read without running what is pickled in it ({reason})") from None
    return encode_value(key, value)


def _info(tensor: Tensor) -> TensorInfo:
    return TensorInfo(dtype=tensor.dtype, shape=tensor.shape)


def _take(ingest: Ingest, source: Place, name: str, tensor: Tensor, progress: Progress) -> None:
    storage, prefix = source
    for chunk in tensor.chunks:
        for (offsets, sizes), data in tensor_slabs(storage, prefix, chunk.item, tensor.dtype, chunk.sizes):
            at = tuple(a + b for a, b in zip(chunk.offsets, offsets, strict=True))
            ingest.add(Slab(name=name, info=_info(tensor), offsets=at, sizes=sizes, data=data))
            progress(len(data))
