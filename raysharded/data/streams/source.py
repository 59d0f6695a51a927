"""Sources that are read one item after the other and can be restarted: places in them, and how others' become such."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from blake3 import blake3

from raysharded.data.access.repeat_check import add_item
from raysharded.errors import ConfigError, DataError


class Restartable(Protocol):
    """An iterable that continues where another one stopped."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> Mapping[str, Any]:
        """The place after the item that was read last, as a dict for JSON."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> None:
        """Have the next iteration begin after the item that was the last one then."""
        ...


@runtime_checkable
class StreamSource(Protocol):
    """A source of shards. It must be picklable, and a shard must have the same items in every reading of an epoch."""

    @property
    def num_shards(self) -> int:
        """The number of shards; constant."""
        ...

    def open_shard(self, shard: int, epoch: int) -> Restartable:
        """The items of a shard from the beginning, in epoch 0, 1, ...; each call gives a new iterable."""
        ...


class HuggingFaceStream:
    """The shards of a `datasets.IterableDataset`."""

    def __init__(self, dataset: Any) -> None:
        """Raises ConfigError for one that is shuffled through a buffer, whose state lacks what is in the buffer."""
        part = getattr(dataset, "_ex_iterable", None)
        while part is not None:
            if "BufferShuffled" in type(part).__name__:
                raise ConfigError(
                    "Stream.source: the datasets.IterableDataset is shuffled through a buffer, and would continue with "
                    "other items after a restart. Leave shuffle() out, or shuffle the files ahead."
                )
            part = getattr(part, "ex_iterable", None)
        self._dataset = dataset

    @property
    def num_shards(self) -> int:
        return int(self._dataset.num_shards)

    def open_shard(self, shard: int, epoch: int) -> Restartable:
        opened = self._dataset.shard(num_shards=self.num_shards, index=shard)
        opened.set_epoch(epoch)
        found: Restartable = opened
        return found


class _OneShard:
    """A restartable iterable as the only shard."""

    num_shards = 1

    def __init__(self, iterable: Any) -> None:
        self._iterable = iterable

    def open_shard(self, shard: int, epoch: int) -> Restartable:
        opened = copy.deepcopy(self._iterable)
        if callable(set_epoch := getattr(opened, "set_epoch", None)):
            set_epoch(epoch)
        found: Restartable = opened
        return found


def as_source(given: Any) -> StreamSource:
    """The source that an object is. Raises ConfigError for one that cannot be restarted."""
    if isinstance(given, StreamSource):
        return given
    restarts = callable(getattr(given, "state_dict", None)) and callable(getattr(given, "load_state_dict", None))
    if restarts and all(hasattr(given, name) for name in ("shard", "set_epoch", "num_shards")):
        return HuggingFaceStream(given)
    if restarts and hasattr(given, "__iter__"):
        return _OneShard(given)
    raise ConfigError(
        f"Stream.source={given!r}: give an object with num_shards and open_shard(shard, epoch), a "
        "datasets.IterableDataset, or an iterable with state_dict() and load_state_dict()."
    )


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
