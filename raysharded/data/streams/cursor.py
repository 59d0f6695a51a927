"""A shard of a source that is being read: from its beginning, or from a state that another reading had."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from raysharded.data.access.repeat_check import add_item
from raysharded.data.streams.source import Restartable, StreamSource
from raysharded.errors import DataError


@dataclass(slots=True)
class Cursor:
    """A shard that is being read."""

    item: int
    """Number of the next item, over all epochs."""
    epoch: int
    opened: Restartable
    items: Iterator[Any]
    hasher: blake3 = field(default_factory=blake3)
    """Digest of items, as far as its owner feeds them to it."""
    num_items: int = 1
    """Items of this epoch so far; it begins above 0 where a cursor begins in the middle of one."""


def cursor_at(source: StreamSource, shard: int, *, item: int = 0, epoch: int = 0, state: Any = None) -> Cursor:
    """A cursor before an item. `state`: the source's there; None: the beginning of the epoch."""
    opened = source.open_shard(shard, epoch)
    if state is not None:
        opened.load_state_dict(state)
    return Cursor(item, epoch, opened, iter(opened), num_items=0 if state is None else 1)


def digest_of(item: Any) -> str:
    """Digest of an item's bytes; objects of unknown classes count with their type alone."""
    hasher = blake3()
    add_item(hasher, item)
    return str(hasher.hexdigest())


def not_restarting(what: str) -> DataError:
    """The error for a source whose state does not bring it back to its place."""
    return DataError(
        f"{what}: after load_state_dict() the source does not continue with the item that followed its state_dict(). "
        "Give one that restarts exactly: not one that is shuffled through a buffer, or draws."
    )
