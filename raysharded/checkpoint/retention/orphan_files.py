"""Remains of broken saves in the folders of checkpoints that belong to no run.

Retried saves share a folder, each with its own subfolder inside. Without a manifest, any of them may still be in
progress. A manifest is put once: the files that it does not name belong to saves that can never be committed. The
exception is an overwritten manifest, which the overwriting save copies first. For a day from then on, files that no
manifest names may still be written, and files that the copy names may still be read. Only files named as a save names
its files count as a save's: others are the user's.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raysharded.checkpoint.format.encoding import digest_of
from raysharded.checkpoint.format.index import is_index
from raysharded.checkpoint.format.limits import MAX_MANIFEST_BYTES
from raysharded.checkpoint.format.manifest import Manifest
from raysharded.checkpoint.format.paths import MANIFEST_NAME, data_path, is_replaced, key_of, replaced_name
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.reader import open_checkpoint
from raysharded.checkpoint.retention.gc import Pruned
from raysharded.checkpoint.retention.orphan_saves import Left
from raysharded.checkpoint.storage import NoSuchKey, Storage, Unfinished
from raysharded.checkpoint.storage.optional_operations import last_part, list_times
from raysharded.checkpoint.storage.small_objects import is_lost_on_disk, read_small
from raysharded.errors import CheckpointError

_OVERWRITTEN = (
    "it was overwritten within a day, or is being overwritten: files that may still be written, or read by readers of "
    "the older one, stay for a day; --now deletes them"
)
_NO_MANIFEST = (
    f"it has no {MANIFEST_NAME}, so that its save may still be in progress: if it is not, delete the folder, or save "
    "there again"
)
GRACE_S = 24 * 3600.0
"""Time in seconds for which overwritten files, and those that an overwriting save has written, stay."""
_DATA = re.compile(r"(?:[0-9a-f]{2}/)?([0-9a-f]{12})/([A-Za-z0-9][A-Za-z0-9._-]*)\.safetensors(?:\.b3)?")
"""Data file of a save in its own subfolder, relative to the checkpoint's folder: (subfolder, writer)."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Files that saves wrote into one folder, or are writing."""

    prefix: str
    has_manifest: bool
    files: Sequence[str]
    """Keys of data files."""
    writes: Sequence[Unfinished]
    replaced: Sequence[str]
    """Keys of copied manifests, and of box indexes if there is a copy."""


def sweep(
    storage: Storage,
    prefix: str | None = None,
    *,
    grace_s: float = GRACE_S,
    dry_run: bool = False,
    key: SigningKey | None = None,
    wall: Callable[[], float] = time.time,
) -> Pruned:
    """Delete what broken saves left in the folder `prefix`, or in every top-level folder; return what was done.

    Where a checkpoint was or is being overwritten, files that may still be written or read stay for `grace_s`. The
    storage's times and this machine's clock (`wall`) determine their age. With 0 they go, and nobody may be saving
    there. With `dry_run`, nothing is deleted. With a `key`, a manifest that was not signed with it proves nothing.
    """
    debris: list[str] = []
    left: list[Left] = []
    for found in _survey(storage, prefix):
        try:
            unnamed = _unnamed(storage, found, key, wall() - grace_s if grace_s else math.inf)
        except CheckpointError as error:
            left.append(Left(found.prefix, str(error).rstrip(".") if found.has_manifest else _NO_MANIFEST))
            continue
        if unnamed.stays:
            left.append(Left(found.prefix, _OVERWRITTEN))
        if not dry_run:
            storage.discard(unnamed.writes)
            storage.delete(unnamed.files)
        gone = (*unnamed.files, *(write.key for write in unnamed.writes))
        debris += sorted({_shown(found.prefix, at) for at in gone})
    return Pruned(debris=tuple(debris), left=tuple(left))


@dataclass(frozen=True, slots=True)
class _Unnamed:
    """Files and writes that a manifest does not name."""

    files: Sequence[str]
    """Keys to delete."""
    writes: Sequence[Unfinished]
    """Writes to discard."""
    stays: bool
    """Whether further files stay."""


def _survey(storage: Storage, prefix: str | None) -> list[_Found]:
    """The folders in which saves left files or unfinished writes."""
    writes = storage.unfinished(prefix or "")
    keys = storage.list(prefix or "")
    every = {prefix} if prefix else {at.partition("/")[0] for at in (*keys, *(write.key for write in writes))}
    found = [_found(storage, folder, keys, writes) for folder in sorted(every)]
    return [one for one in found if one.files or one.writes or one.replaced]


def _found(storage: Storage, folder: str, keys: Sequence[str], writes: Sequence[Unfinished]) -> _Found:
    manifest = key_of(folder, MANIFEST_NAME)
    inside = [at for at in keys if at.startswith(f"{folder}/") and at.endswith(f"/{MANIFEST_NAME}") and at != manifest]
    inner = tuple(at.removesuffix(MANIFEST_NAME) for at in inside)  # other checkpoints, whose files are ignored

    def is_data(at: str) -> bool:
        return not at.startswith(inner) and _is_data(folder, at, storage.traits.partitioned)

    names = {at: at.removeprefix(f"{folder}/") for at in keys if at.startswith(f"{folder}/")}
    overwritten = any(is_replaced(name) for name in names.values())
    return _Found(
        prefix=folder,
        has_manifest=manifest in keys,
        files=[at for at in keys if is_data(at)],
        writes=[write for write in writes if is_data(write.key) or write.key == manifest],
        replaced=[at for at, name in names.items() if overwritten and (is_replaced(name) or is_index(name))],
    )


def _unnamed(storage: Storage, found: _Found, key: SigningKey | None, since: float) -> _Unnamed:
    """Files and writes that the manifest does not name. Raises CheckpointError without one.

    In a folder that was overwritten, or is to be, files written after `since` stay. They may still be written, or the
    older manifest that names them was replaced after that. The copy of the current manifest stays too: a save that is
    to overwrite it may have just begun.
    """
    checkpoint = open_checkpoint(storage, found.prefix, key=key)
    data = read_small(storage, key_of(found.prefix, MANIFEST_NAME), MAX_MANIFEST_BYTES)
    is_overwritten = bool(found.replaced) or any(map(is_replaced, map(last_part, storage.list(found.prefix))))
    times = list_times(storage, None, found.prefix) if is_overwritten else {}

    def is_young(at: str) -> bool:
        told = times.get(at)
        return is_overwritten and since < math.inf and (told is None or told > since)

    copies = [at for at in found.replaced if is_replaced(last_part(at))]
    young = [at for at in copies if is_young(at)]
    named = {*_named(found.prefix, checkpoint.manifest, data), key_of(found.prefix, replaced_name(digest_of(data)))}
    for copy in young:
        try:
            copied = read_small(storage, copy, MAX_MANIFEST_BYTES)
            older = open_checkpoint(storage, found.prefix, key=key, digest=digest_of(copied))
            named |= {copy, *_named(found.prefix, older.manifest, copied)}
        except NoSuchKey:
            continue
        except CheckpointError as error:
            if is_lost_on_disk(error):
                raise
    files = [at for at in (*found.files, *found.replaced) if at not in named]
    gone = [at for at in files if not is_young(at)]
    stays = bool(young) or len(gone) < len(files)
    return _Unnamed(files=gone, writes=[] if stays else list(found.writes), stays=stays)


def _named(prefix: str, manifest: Manifest, data: bytes) -> set[str]:
    """Keys of the files that a manifest, stored as `data`, names."""
    index = json.loads(data).get("index")
    paths = [path for file in manifest.files for path in (file.path, file.table_path)]
    return {key_of(prefix, path) for path in (*paths, *([str(index["path"])] if index else []))}


def _is_data(folder: str, at: str, partitioned: bool) -> bool:
    """Whether a save into the folder gives a data file, or its table of digests, this key."""
    match = _DATA.fullmatch(at[len(folder) + 1 :]) if at.startswith(f"{folder}/") else None
    if match is None:
        return False
    path = data_path(folder, match[2], partitioned=partitioned, subfolder=match[1])
    return at.removesuffix(".b3") == key_of(folder, path)


def _shown(folder: str, at: str) -> str:
    """Name of a file in results: the folder of its save, or its own key."""
    above = at.rpartition("/")[0]
    return at if above == folder else above
