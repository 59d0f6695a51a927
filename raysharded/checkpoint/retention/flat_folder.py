"""Checkpoints side by side: folders that each hold one, in a folder that is not a run.

Users choose the names. The newest checkpoint is the one with the highest step in its manifest. Reading thousands of
manifests would take long, so names that equal the newest's except for their only number are trusted.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from raysharded.checkpoint.format.encoding import ForeignManifest
from raysharded.checkpoint.format.identity import check_same_run
from raysharded.checkpoint.format.paths import MANIFEST_NAME, key_of
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.storage.optional_operations import list_links, list_times
from raysharded.checkpoint.threads import Threads
from raysharded.errors import CheckpointError

_log = logging.getLogger("raysharded.checkpoint")
_MOST_IN_DOUBT = 16
_AT_ONCE = 8
_NUMBER = re.compile(r"[0-9]+")


def side_by_side(storage: Storage) -> list[str]:
    """Top-level folders with a manifest, in the order of the last numbers in their names."""
    return sorted(_found(storage), key=_by_name)


def newest_beside(storage: Storage, *, key: SigningKey | None = None) -> Checkpoint | None:
    """The checkpoint of the highest step among the top-level folders of a storage; None if there are none.

    Of one step it is the one whose name ends in the highest number. Up to 16 manifests are read: of the newest by name,
    of the newest by time, and of names that are not trusted; with a key also of the second by name. If names and steps
    disagree among these, all manifests are read, which is logged. With a key, raises RefusedCheckpoint if the manifests
    that were read are of different runs. Raises as `open_checkpoint` if the newest by name or by time cannot be used.
    Others that cannot be used are skipped, which is logged too, and so are files of other programs that are named like
    a manifest.
    """
    found = _found(storage)
    while found:
        named = sorted(found, key=_by_name)
        latest = max(named, key=lambda name: (found[name] or 0.0, _by_name(name)))
        try:
            chosen = [*_chosen(named, latest, found), *(named[-2:-1] if key is not None else [])]
            return _newest_of(storage, named, list(dict.fromkeys(chosen)), {named[-1], latest}, key)
        except _Foreign as foreign:
            found = {name: at for name, at in found.items() if name not in foreign.names}
    return None


class _Foreign(Exception):
    """Folders that hold something else than a checkpoint."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(names)
        self.names = names


def _newest_of(
    storage: Storage, named: Sequence[str], chosen: Sequence[str], needed: set[str], key: SigningKey | None
) -> Checkpoint:
    opened = _open(storage, chosen, needed, key)
    if key is not None:
        check_same_run({name: checkpoint.manifest.run for name, checkpoint in opened.items()}, storage.url)
    if _disagree(opened):
        opened |= _open(storage, [name for name in named if name not in opened], needed, key)
        newest = _newest(opened)
        _log.warning(
            "the names of the checkpoints under %s do not follow their steps: %r is the newest of %d, with step %d. "
            "All their manifests were read to find it; name the one that is meant, or let each name end in its step",
            storage.url,
            newest,
            len(named),
            opened[newest].step,
        )
    return opened[_newest(opened)]


def _found(storage: Storage) -> dict[str, float | None]:
    """Top-level folders, each with its manifest's time in seconds since the Unix epoch, where known."""
    times = {tuple(key.split("/")): at for key, at in list_times(storage, MANIFEST_NAME).items()}
    found = {parts[0]: at for parts, at in times.items() if len(parts) == 2}
    return found | {link: at for link in list_links(storage) for at in _of_link(storage, link)}


def _of_link(storage: Storage, link: str) -> list[float | None]:
    at = key_of(link, MANIFEST_NAME)
    try:
        storage.size(at)
    except NoSuchKey:
        return []
    return [list_times(storage, MANIFEST_NAME, link).get(at)]


def _chosen(named: Sequence[str], latest: str, found: Mapping[str, float | None]) -> list[str]:
    """Folders whose manifests are read, out of `named`, of which the newest by name is last."""
    shapes = {name: _NUMBER.sub("#", name) for name in named}
    numbers = Counter((shapes[name], _by_name(name)[0]) for name in named)
    trusted = shapes[named[-1]] if shapes[named[-1]].count("#") == 1 else None
    doubtful = [name for name in named if shapes[name] != trusted or numbers[shapes[name], _by_name(name)[0]] > 1]
    doubtful.sort(key=lambda name: (found[name] or 0.0, _by_name(name)), reverse=True)
    return list(dict.fromkeys([named[-1], latest, *doubtful]))[:_MOST_IN_DOUBT]


def _open(storage: Storage, names: Sequence[str], needed: set[str], key: SigningKey | None) -> dict[str, Checkpoint]:
    foreign = set[str]()

    def one(name: str) -> Checkpoint | None:
        try:
            return open_checkpoint(storage, name, key=key)
        except ForeignManifest as error:
            foreign.add(name)
            _log.warning("skipping a folder beside checkpoints: %s", error)
            return None
        except CheckpointError as error:
            if name in needed:
                raise
            _log.warning("passing over a checkpoint beside others: %s", error)
            return None

    with Threads(_AT_ONCE, thread_name_prefix="raysharded-manifests") as pool:
        opened = dict(zip(names, pool.map(one, names), strict=True))
    if foreign:
        raise _Foreign(foreign)
    return {name: checkpoint for name, checkpoint in opened.items() if checkpoint is not None}


def _disagree(opened: Mapping[str, Checkpoint]) -> bool:
    steps = [opened[name].step for name in sorted(opened, key=_by_name)]
    return steps != sorted(steps)


def _newest(opened: Mapping[str, Checkpoint]) -> str:
    return max(opened, key=lambda name: (opened[name].step, _by_name(name)))


def _by_name(name: str) -> tuple[int, str]:
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else -1, name
