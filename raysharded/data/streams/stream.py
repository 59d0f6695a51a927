"""A dataset of a source that is read one item after the other, whose item p is the sample at position p of a run.

The positions take turns among the shards: position p is item p // S of shard p modulo S. The items of a shard are those
of its epochs, one after the other. So the sample at a position follows from the source alone.

A reader has a cursor for each shard that it reads. At every multiple of `every` items of a shard it has a restart: the
source's state, and the digest of the items since the last one. Where a folder for states is given, restarts are
files there, the same ones from every writer. A reader that has to go to another place begins at the nearest restart
before it. One that comes to a restart that is there compares the digests: a source that gave other items is
found there. Digests of another `every` cover other items, and are not compared.

The files of the newest 64 restarts of a shard stay. Of older ones those stay that are about a 64th of their distance to
the newest apart, so their number grows with the logarithm of the number of items. Files are not needed, but save
reading: without them a shard is read from its beginning.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from raysharded.checkpoint.storage import NoSuchKey, Storage, open_storage
from raysharded.data.access.repeat_check import add_item
from raysharded.data.mixtures.schedule import ENDLESS
from raysharded.data.streams.source import Cursor, StreamSource, as_source, cursor_at, digest_of, not_restarting
from raysharded.data.text.files import PathLike, as_paths
from raysharded.errors import ConfigError, DataError, StorageError
from raysharded.ids import derive_seed

_log = logging.getLogger("raysharded.data")
_RESTARTS = 8
"""Restarts of a shard in memory."""
_NEWEST = 64
"""Files of restarts of a shard that stay, as the newest ones."""
_CHECKED = 4
"""Items that are read again after a restart, before training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Restart:
    """The place before an item of a shard, counted over all epochs, and how to begin there."""

    item: int
    epoch: int = 0
    state: Any = None
    """None: the beginning of the epoch."""
    digest: str = ""
    """Digest of the items since the restart before it."""
    every: int | None = None
    """Number of items that the digest covers; None where it is not known."""


class Stream:
    """The items of a restartable source, in its order, without end.

    Position p of a run is item p // S of shard p modulo S, with S shards: a function of the source alone. A shard that
    ends is opened again for its next epoch. Any number of workers reads the same samples, after any loss, if the source
    gives the same items in each reading, and continues exactly at its state. Both are checked: at the start for
    a few items, and later at every `every`-th item of a shard that is read again.

    A worker reads the shards of its positions. With as many shards as samples in a step, or a multiple or a divisor,
    these are the same ones in every step.
    """

    def __init__(self, source: Any, *, states: PathLike | None = None, every: int = 1000) -> None:
        """`source`: a `StreamSource`, a `datasets.IterableDataset`, or an iterable with `state_dict()` and
        `load_state_dict()`, which is one shard.

        `states`: a folder or URL that all workers share, for the source's states; without it a worker that begins in
        the middle reads its shards from their beginning. `every`: items of a shard between two states. Raises
        ConfigError; reads nothing.
        """
        self._source: StreamSource = as_source(source)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise ConfigError(f"Stream.every={every!r}: give a whole number of 1 or more.")
        self.every = every
        self.states = None if states is None else as_paths(states, "Stream.states")[0]
        self.num_shards = self._source.num_shards
        if not isinstance(self.num_shards, int) or self.num_shards < 1:
            raise ConfigError(f"Stream.source: {self.num_shards!r} shards: give a source with at least 1.")
        self._begin()

    def _begin(self) -> None:
        self._cursors: dict[int, Cursor] = {}
        self._restarts: dict[int, OrderedDict[int, _Restart]] = {}
        self._storage: Storage | None = None
        self._has_failed = False
        """Whether the folder could not be used, which is reported once."""
        self._on_pass: Callable[[], object] = lambda: None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Stream({type(self._source).__name__}, {self.num_shards} shards)"

    @property
    def order_digest(self) -> int:
        """Digest of what decides the shard and the item of a position; above 1."""
        return 2 + derive_seed("stream", self.num_shards) // 4

    @property
    def contents_digest(self) -> str:
        """The source's own; empty if it has none."""
        return str(getattr(self._source, "contents_digest", ""))

    @property
    def num_checked(self) -> int:
        """Number of samples among which some are read twice before training."""
        return self.num_shards * _CHECKED

    def origin(self, position: int) -> tuple[int, int]:
        """(shard, item counted over all its epochs) of the sample at a position."""
        if position < 0:
            raise IndexError(f"position {position} is negative: positions count from 0")
        item, shard = divmod(position, self.num_shards)
        return shard, item

    def __len__(self) -> int:
        """2^60: a source that ends is repeated."""
        return ENDLESS

    def __getitem__(self, position: int, /) -> Any:
        """The sample at a position. Raises DataError for a source that misbehaves, and what the source raises."""
        shard, item = self.origin(int(position))
        with self._lock:
            cursor = self._cursors.pop(shard, None)
            if cursor is None or not 0 <= item - cursor.item <= self.every:
                restart = self._nearest(shard, item)
                if cursor is None or not restart.item < cursor.item <= item:
                    cursor = self._opened(shard, restart)
            while cursor.item < item:
                self._next(shard, cursor)
                self._on_pass()
            found = self._next(shard, cursor)
            self._cursors[shard] = cursor  # after an error it is opened anew
            return found

    def note_passed(self, on_pass: Callable[[], object]) -> None:
        """Call a function in this process for each item that is passed over on the way to a position."""
        self._on_pass = on_pass

    def validate(self) -> None:
        """Check that the first shard continues after a state as it does without one. Raises DataError."""
        one = self._opened(0, _Restart(item=0))
        self._draw(0, one)
        state = self._state_of(0, one)
        further = [digest_of(self._draw(0, one)) for _ in range(_CHECKED)]
        other = self._opened(0, _Restart(item=1, epoch=0, state=state))
        if further != [digest_of(self._draw(0, other)) for _ in range(_CHECKED)]:
            raise not_restarting(repr(self))

    # -- places --

    def _nearest(self, shard: int, item: int) -> _Restart:
        """The last restart up to an item: from memory, from the folder, or the beginning."""
        known: Mapping[int, _Restart] = self._restarts.get(shard, {})
        here = max((at for at in known if at <= item), default=0)
        if self.states is not None and item - here > self.every:
            try:
                names = list(self._folder().list(_folder_of(shard)))
            except StorageError as error:
                names = []
                self._report(error)
            there = [int(name.removeprefix(f"{_folder_of(shard)}/item-").removesuffix(".json")) for name in names]
            furthest = max((at for at in there if at <= item and at % self.every == 0), default=0)
            found = self._read(shard, furthest) if furthest > here else None
            if found is not None:
                return found
        return known[here] if here else _Restart(item=0)

    def _opened(self, shard: int, restart: _Restart) -> Cursor:
        return cursor_at(self._source, shard, item=restart.item, epoch=restart.epoch, state=restart.state)

    # -- items --

    def _next(self, shard: int, cursor: Cursor) -> Any:
        """The next item; at a multiple of `every` its restart is kept, or compared."""
        item = self._draw(shard, cursor)
        add_item(cursor.hasher, item)
        if cursor.item % self.every == 0:
            self._keep(shard, cursor)
        return item

    def _draw(self, shard: int, cursor: Cursor) -> Any:
        while True:
            try:
                item = next(cursor.items)
            except StopIteration:
                if not cursor.num_items:
                    raise DataError(
                        f"{self!r}: shard {shard} has no items in epoch {cursor.epoch}. Give a source without empty "
                        "shards."
                    ) from None
                cursor.epoch, cursor.num_items = cursor.epoch + 1, 0
                cursor.opened = self._source.open_shard(shard, cursor.epoch)
                cursor.items = iter(cursor.opened)
                continue
            cursor.item, cursor.num_items = cursor.item + 1, cursor.num_items + 1
            return item

    # -- restarts --

    def _keep(self, shard: int, cursor: Cursor) -> None:
        digest, cursor.hasher = cursor.hasher.hexdigest(), blake3()
        known = self._restarts.setdefault(shard, OrderedDict())
        before = known.get(cursor.item)
        restart = _Restart(
            item=cursor.item, epoch=cursor.epoch, state=self._state_of(shard, cursor), digest=digest, every=self.every
        )
        if before is None and self.states is not None:
            before = self._put(shard, restart)
        if before is not None and before.every in (None, self.every) and before.digest != digest:
            raise DataError(
                f"{self!r}: items {cursor.item - self.every} to {cursor.item - 1} of shard {shard} are others than "
                "when they were read before. The source must give the same items in every reading, also after "
                "load_state_dict()."
            )
        known[cursor.item] = restart
        if len(known) > _RESTARTS:
            known.popitem(last=False)

    def _put(self, shard: int, restart: _Restart) -> _Restart | None:
        """Write a restart, and remove older ones; returns the one that is there already."""
        entries = {"epoch": restart.epoch, "state": restart.state, "digest": restart.digest, "every": restart.every}
        data = json.dumps(entries).encode()
        try:
            is_new = self._folder().put_if_absent(_key(shard, restart.item), data)
            superfluous = [number * self.every for number in superseded(restart.item // self.every)]
            self._folder().delete([_key(shard, item) for item in superfluous])
        except StorageError as error:
            self._report(error)
            return None
        return None if is_new else self._read(shard, restart.item)

    def _report(self, error: StorageError) -> None:
        if not self._has_failed:
            self._has_failed = True
            _log.warning("%r reads on without states, which can be neither written nor read: %s", self, error)

    def _state_of(self, shard: int, cursor: Cursor) -> Any:
        """The source's state as JSON gives it back. Raises DataError if it is no JSON."""
        state: Mapping[str, Any] = cursor.opened.state_dict()
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"{self!r}: the state of shard {shard} cannot be written as JSON: {error}. Return dicts, lists, "
                "numbers and texts from state_dict()."
            ) from error

    def _folder(self) -> Storage:
        assert self.states is not None
        if self._storage is None:
            self._storage = open_storage(self.states)
        return self._storage

    def _read(self, shard: int, item: int) -> _Restart | None:
        try:
            told = json.loads(self._folder().read(_key(shard, item)))
            epoch, digest, every = int(told["epoch"]), str(told["digest"]), told.get("every")
            return _Restart(item=item, epoch=epoch, state=told["state"], digest=digest, every=every)
        except NoSuchKey:
            return None
        except StorageError as error:
            self._report(error)
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{self.states}: {_key(shard, item)} is damaged: {error!r}. Delete it: it is written again."
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_cursors", "_restarts", "_storage", "_has_failed", "_on_pass", "_lock")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._begin()


def superseded(newest: int) -> list[int]:
    """Numbers of the restarts that go when restart `newest` is written, counted from 1.

    Law: the newest 64 stay. Of an older one, let 2^k be the largest power of two up to (newest - number) / 32. It stays
    if 2^k divides its number.
    """
    found, step = [], 2
    while (number := newest - _NEWEST // 2 * step) > 0:
        if number % step and number % (step // 2) == 0:
            found.append(number)
        step *= 2
    return found


def _folder_of(shard: int) -> str:
    return f"shard-{shard:05d}"


def _key(shard: int, item: int) -> str:
    return f"{_folder_of(shard)}/item-{item:012d}.json"
