"""Planner data of `torch.distributed.checkpoint`: `Metadata.planner_data`.

torch's planner stores every key's path, which the tree of a state contains already. Further data, and whether the state
was left unflattened, is kept in the manifest's `metadata` under the name `torch.distributed.checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata

from raysharded.checkpoint.interop.dcp.flatten import decode_value, encode_value
from raysharded.checkpoint.state_dict.tree import Path

_NAME = "torch.distributed.checkpoint"


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """`planner_data` in two parts."""

    paths: Mapping[str, Path]
    more: Any
    """Data beyond the paths of keys: a dict, or any other value that replaces all paths."""
    is_flat: bool
    """Whether no key has a path: each key is in the first level of the state, with everything below it."""

    @staticmethod
    def of(metadata: Metadata) -> Planned:
        """The planner data of a save."""
        data, keys = metadata.planner_data, metadata.state_dict_metadata
        if not isinstance(data, Mapping):
            return Planned(paths={}, more=data, is_flat=True)
        paths = {key: tuple(data[key]) for key in keys if _is_path(data.get(key))}
        more = {key: value for key, value in data.items() if key not in paths}
        return Planned(paths=paths, more=more, is_flat=bool(keys) and not paths)

    @staticmethod
    def recorded_in(metadata: Mapping[str, Any]) -> Planned:
        """The planner data in a manifest's `metadata`, without paths: those are in the tree.

        Raises CorruptCheckpoint for an invalid tree.
        """
        record = metadata.get(_NAME)
        if not isinstance(record, Mapping) or "planner_data" not in record:
            return Planned(paths={}, more={}, is_flat=False)
        return Planned(paths={}, more=decode_value(record["planner_data"]), is_flat=record.get("is_flat") is True)

    def path(self, key: str) -> Path:
        """Path of the key in the state."""
        return self.paths.get(key, (key,))

    def recorded(self) -> dict[str, Any]:
        """The entry for the manifest's `metadata`, empty without data beyond paths.

        Raises CheckpointError for a value that JSON cannot hold.
        """
        if not self.is_flat and not self.more:
            return {}
        return {_NAME: {"planner_data": encode_value("planner_data", self.more), "is_flat": self.is_flat}}

    def data(self, paths: Mapping[str, Path]) -> Any:
        """The `planner_data` of a load, with these paths of keys."""
        if self.is_flat or not isinstance(self.more, dict):
            return self.more
        return {**paths, **self.more}


def _is_path(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and bool(value) and all(isinstance(part, (str, int)) for part in value)
