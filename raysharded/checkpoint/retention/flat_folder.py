"""Checkpoints side by side: folders that each hold one, in a folder that is no run.

Their names are people's own. The newest is the one of the highest step, which the manifests say. Reading all of those
would take long where there are thousands, so names that can be trusted are: those that are alike but for one number.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from raysharded.checkpoint.format.paths import MANIFEST_NAME, key_of
from raysharded.checkpoint.format.signing import SigningKey
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.storage.folders import list_links, list_times
from raysharded.checkpoint.threads import Threads
from raysharded.errors import CheckpointError

_log = logging.getLogger("raysharded.checkpoint")
_MOST_IN_DOUBT = 16
_AT_ONCE = 8
_NUMBER = re.compile(r"[0-9]+")


def side_by_side(storage: Storage) -> list[str]:
    """The folders with a manifest right below a storage, in the order of the last numbers in their names."""
    return sorted(_found(storage), key=_by_name)


def newest_beside(storage: Storage, *, key: SigningKey | None = None) -> Checkpoint | None:
    """The checkpoint of the highest step among those side by side right below a storage; None if there are none.

    Of one step it is the one whose name ends in the highest number. Manifests are read of the newest by name, of the
    newest by time, and of those whose names are not like that of the newest but for one number, up to 16 in all; if
    names and steps disagree among these, of all, which is in the log. Raises as `open_checkpoint` if the newest by
    name or by time cannot be used; others that cannot are passed over, which is in the log too.
    """
    found = _found(storage)
    if not found:
        return None
    named = sorted(found, key=_by_name)
    latest = max(named, key=lambda name: (found[name] or 0.0, _by_name(name)))
    needed = {named[-1], latest}
    opened = _open(storage, _chosen(named, latest, found), needed, key)
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
    """The folders, each with the time of its manifest, in seconds since the Unix epoch, where the storage tells it."""
    times = {tuple(key.split("/")): at for key, at in list_times(storage, MANIFEST_NAME).items()}
    found = {parts[0]: at for parts, at in times.items() if len(parts) == 2}
    return found | {link: at for link in list_links(storage) for at in _of_link(storage, link)}


def _of_link(storage: Storage, link: str) -> list[float | None]:
    at = key_of(link, MANIFEST_NAME)
    try:
        if storage.size(at) == 0:
            return []
    except NoSuchKey:
        return []
    return [list_times(storage, MANIFEST_NAME, link).get(at)]


def _chosen(named: Sequence[str], latest: str, found: Mapping[str, float | None]) -> list[str]:
    """The folders whose manifests are read, of all `named`, the newest by name last."""
    shapes = {name: _NUMBER.sub("#", name) for name in named}
    numbers = Counter((shapes[name], _by_name(name)[0]) for name in named)
    trusted = shapes[named[-1]] if shapes[named[-1]].count("#") == 1 else None
    doubtful = [name for name in named if shapes[name] != trusted or numbers[shapes[name], _by_name(name)[0]] > 1]
    doubtful.sort(key=lambda name: (found[name] or 0.0, _by_name(name)), reverse=True)
    return list(dict.fromkeys([named[-1], latest, *doubtful]))[:_MOST_IN_DOUBT]


def _open(storage: Storage, names: Sequence[str], needed: set[str], key: SigningKey | None) -> dict[str, Checkpoint]:
    def one(name: str) -> Checkpoint | None:
        try:
            return open_checkpoint(storage, name, key=key)
        except CheckpointError as error:
            if name in needed:
                raise
            _log.warning("passing over a checkpoint beside others: %s", error)
            return None

    with Threads(_AT_ONCE, thread_name_prefix="raysharded-manifests") as pool:
        opened = zip(names, pool.map(one, names), strict=True)
        return {name: checkpoint for name, checkpoint in opened if checkpoint is not None}


def _disagree(opened: Mapping[str, Checkpoint]) -> bool:
    steps = [opened[name].step for name in sorted(opened, key=_by_name)]
    return steps != sorted(steps)


def _newest(opened: Mapping[str, Checkpoint]) -> str:
    return max(opened, key=lambda name: (opened[name].step, _by_name(name)))


def _by_name(name: str) -> tuple[int, str]:
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else -1, name
