"""Import of a Hugging Face folder, or of one safetensors file."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

import numpy as np

from raysharded.checkpoint.format.paths import is_inside, key_of
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.interop.huggingface.exporter import (
    CONFIG_NAME,
    INDEX_NAME,
    OUTPUT_HEADS,
    WEIGHTS_NAME,
    is_tied,
)
from raysharded.checkpoint.interop.huggingface.safetensors_file import Stored, read_header
from raysharded.checkpoint.interop.locations import Place, url_of
from raysharded.checkpoint.interop.names import INTO_MODEL, NameMap
from raysharded.checkpoint.interop.results import Imported
from raysharded.checkpoint.interop.slabs import SLAB_BYTES, Progress, Slab, cut
from raysharded.checkpoint.interop.writer_stream import Identity, Ingest
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.display.quantities import count as counted
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, StorageError
from raysharded.locations import join_url

_PART = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{1,9})-of-(?P<total>[0-9]{1,9})\.safetensors", re.DOTALL)
"""Name of a numbered file of a folder's weights."""


def import_huggingface(
    source: Place,
    dest: Place,
    *,
    name_map: NameMap = INTO_MODEL,
    step: int | None = None,
    run: str = "",
    metadata: Mapping[str, Any] | None = None,
    key: SigningKey | None = None,
    progress: Progress = lambda _: None,
) -> Imported:
    """Write the tensors in the folder or file `source` into the folder `dest`.

    `name_map`: from their names to raysharded's, the inverse of the map for `export_huggingface`. By default `x`
    becomes `model.x`, as in a training state. `step`: by default the step in the name of `dest`, if it is named as a
    save, else 0. A tied output head is missing in the files, and therefore in the checkpoint.

    Raises CheckpointError for dtypes that the raysharded format lacks, for colliding names, and if `dest` is not free.
    Raises it too for a step, a run or `metadata` that cannot be stored. Raises CorruptCheckpoint and
    IncompleteCheckpoint for damage, StorageError if storage fails. After an error `dest` is not a checkpoint.
    """
    files = _files(source)
    names = [name for tensors in files.values() for name in tensors]
    name_map.require(names, spare=OUTPUT_HEADS if _says_tied(source) else ())
    renamed = name_map.apply(names)
    if not renamed:
        raise CheckpointError(f"the name map leaves none of the tensors of {url_of(source)}. Give one that fits them.")
    ingest = Ingest(dest, Identity(run=run, metadata=metadata or {}), writer="import-safetensors", step=step)
    for file, tensors in files.items():
        for name, stored in tensors.items():
            if name in renamed:
                _take(ingest, source[0], file, renamed[name], stored, progress)
    return ingest.commit(key)


def _says_tied(source: Place) -> bool:
    """Whether a config.json beside the weights ties the output head to the embedding.

    The files then lack the head.
    """
    storage, prefix = source
    try:
        return is_tied(storage.read(key_of(prefix, CONFIG_NAME)))
    except (CheckpointError, StorageError):  # an unusable config does not matter otherwise
        return False


def _take(ingest: Ingest, storage: Storage, file: str, name: str, stored: Stored, progress: Progress) -> None:
    ingest.declare(name, stored.info)
    for slab in _slabs(storage, file, name, stored):
        ingest.add(slab)
        progress(len(slab.data))


def _slabs(storage: Storage, file: str, name: str, stored: Stored) -> Iterator[Slab]:
    at, item_bytes = stored.start, stored.info.item_bytes
    for offsets, sizes in cut(stored.info.shape, item_bytes, SLAB_BYTES):
        data = np.empty(int(np.prod(sizes, dtype=np.int64)) * item_bytes, np.uint8)
        if storage.read_into(file, at, [data.data]) != len(data):
            raise IncompleteCheckpoint(f"{join_url(storage.url, file)} is cut off in {name!r}. Get the file again.")
        yield Slab(name=name, info=stored.info, offsets=offsets, sizes=sizes, data=data)
        at += len(data)


def _files(source: Place) -> dict[str, dict[str, Stored]]:
    """Map from the key of each file to its tensors: files of the index, the only file, or the given file."""
    storage, prefix = source
    if prefix.endswith(".safetensors"):
        return {prefix: read_header(storage, prefix)}
    try:
        index = storage.read(key_of(prefix, INDEX_NAME))
    except NoSuchKey:
        return {key_of(prefix, _single(source)): read_header(storage, key_of(prefix, _single(source)))}
    wanted = _weight_map(index, f"{join_url(storage.url, key_of(prefix, INDEX_NAME))}")
    found: dict[str, dict[str, Stored]] = {}
    for file in sorted(set(wanted.values())):
        at = key_of(prefix, file)
        header = read_header(storage, at)
        missing = [name for name, where in wanted.items() if where == file and name not in header]
        if missing:
            raise IncompleteCheckpoint(
                f"{join_url(storage.url, at)} lacks {counted(len(missing), 'tensor')} that {INDEX_NAME} names; first: "
                f"{missing[0]!r}. The folder is a mixture of two; get it again."
            )
        found[at] = {name: stored for name, stored in header.items() if wanted.get(name) == file}
    return found


def _single(source: Place) -> str:
    """Name of the one safetensors file of a folder without an index."""
    storage, prefix = source
    skip = len(prefix) + 1 if prefix else 0
    names = [name for key in storage.list(prefix) if "/" not in (name := key[skip:]) and name.endswith(".safetensors")]
    if WEIGHTS_NAME in names:
        return WEIGHTS_NAME
    missing = _missing_part(names)
    if missing is not None:
        raise IncompleteCheckpoint(
            f"{url_of(source)} has no {INDEX_NAME}, and lacks {missing}: its weights are in several files, and not all "
            "of them are here. Get the whole folder."
        )
    if len(names) != 1:
        raise CheckpointError(
            f"{url_of(source)} has no {INDEX_NAME} and {counted(len(names), 'safetensors file')}. Give a folder with "
            "an index or with one such file, or the file itself."
        )
    return names[0]


def _missing_part(names: list[str]) -> str | None:
    """The first name that a series of numbered files (as model-00001-of-00002.safetensors) lacks, if any."""
    present: dict[tuple[str, str], set[int]] = {}
    for name in names:
        part = _PART.fullmatch(name)
        if part is not None:
            present.setdefault((part["stem"], part["total"]), set()).add(int(part["number"]))
    for (stem, total), numbers in present.items():
        first = min(1, *numbers)  # some writers count from 0
        lacks = next(number for number in count(first) if number not in numbers)
        if lacks < first + int(total):
            return f"{stem}-{lacks:0{len(total)}d}-of-{total}.safetensors"
    return None


def _weight_map(index: bytes, where: str) -> dict[str, str]:
    try:
        found = json.loads(index)["weight_map"]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpoint(f"{where}: not an index with a weight_map ({type(error).__name__}: {error}).") from None
    if type(found) is not dict or any(type(file) is not str or not is_inside(file) for file in found.values()):
        raise CorruptCheckpoint(f"{where}: its weight_map does not name files of the folder.")
    return found
