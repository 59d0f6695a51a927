"""Checkpoints side by side: folders that each hold one, in a folder that is no run."""

from __future__ import annotations

import re

from raysharded.checkpoint.format.paths import MANIFEST_NAME, key_of
from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.checkpoint.storage.folders import list_links


def side_by_side(storage: Storage) -> list[str]:
    """The folders with a manifest right below a storage; last the newest: whose name ends in the highest number."""
    parts = [key.split("/") for key in storage.list()]
    found = [part[0] for part in parts if len(part) == 2 and part[1] == MANIFEST_NAME]
    found += [link for link in list_links(storage) if _has_manifest(storage, link)]
    return sorted(found, key=_number)


def _has_manifest(storage: Storage, folder: str) -> bool:
    try:
        return storage.size(key_of(folder, MANIFEST_NAME)) > 0
    except NoSuchKey:
        return False


def _number(name: str) -> tuple[int, str]:
    numbers = re.findall(r"[0-9]+", name)
    return int(numbers[-1]) if numbers else -1, name
