"""Checkpoints side by side: folders that each hold one, in a folder that is no run."""

from __future__ import annotations

import re

from raysharded.checkpoint.format.paths import MANIFEST_NAME
from raysharded.checkpoint.storage import Storage


def side_by_side(storage: Storage) -> list[str]:
    """The folders with a manifest right below a storage; last the newest: whose name ends in the highest number."""
    parts = [key.split("/") for key in storage.list()]
    return sorted((part[0] for part in parts if len(part) == 2 and part[1] == MANIFEST_NAME), key=_number)


def _number(name: str) -> tuple[int, str]:
    numbers = re.findall(r"[0-9]+", name)
    return int(numbers[-1]) if numbers else -1, name
