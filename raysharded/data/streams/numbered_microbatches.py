"""Whole microbatches by their number: from a stream for each logical microbatch of a step, or from a function.

Microbatch `index` of step `s` has the number `(s - 1) * M + index`, with `M` microbatches in a step.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Self

from raysharded.data.access import generators
from raysharded.data.access.read_errors import explaining
from raysharded.data.mixtures.schedule import ENDLESS
from raysharded.data.plain_data import plain, restored
from raysharded.data.streams.source import Cursor, Restartable, cursor_at, digest_of
from raysharded.errors import TaskError
from raysharded.ids import derive_seed


class MicrobatchNumbers:
    """The data of a run whose session reads its own microbatches: the sample at a position is the position."""

    order_digest = 2

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, position: int, /) -> int:
        return position


class Place(int):
    """A microbatch's number, with the state that its stream has before it."""

    state: str | None
    """None: the beginning, or unknown."""

    def __new__(cls, number: int, state: str | None = None) -> Self:
        found = super().__new__(cls, number)
        found.state = state
        return found

    def __reduce__(self) -> Any:
        return Place, (int(self), self.state)


class Given(NamedTuple):
    """The result of reading a microbatch."""

    batch: Any
    state: str = ""
    """State of the stream after it, as text; empty for a function."""
    digest: str = ""
    """Digest of its bytes; empty if the stream has ended."""

    @property
    def has_ended(self) -> bool:
        """True if there was none."""
        return not self.digest


class MicrobatchFunction:
    """A user's pure function of (step, index), as microbatches by number."""

    def __init__(self, read: Callable[[int, int], Any], num_microbatches: int) -> None:
        self._read, self._num = read, num_microbatches

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, number: int, /) -> Given:
        step, index = number // self._num + 1, number % self._num
        with _explaining(f"read(step={step}, index={index}) of session.reads"):
            batch = self._read(step, index)
        return Given(batch, digest=digest_of(batch))

    def origin(self, index: int) -> str:
        """Name of the source of a microbatch, for errors."""
        return f"session.reads: read(step, {index})"


class MicrobatchStreams:
    """A user's streams, one for each microbatch of a step, as microbatches by number.

    A stream is read on where it stands, or made anew from the state that its `Place` has. It holds the streams that
    it has read in the newest step, and reads one at a time.
    """

    def __init__(self, make: Callable[[int, int], Any], num_microbatches: int, seed: int) -> None:
        """`make(index, num)`: a new stream. `seed`: the run's; what `make` draws depends on it and the index alone."""
        self._make, self.num_shards, self._seed = make, num_microbatches, seed
        self._cursors: dict[int, Cursor] = {}

    def __len__(self) -> int:
        return ENDLESS

    def origin(self, index: int) -> str:
        """Name of the source of a microbatch, for errors."""
        return f"session.streams: stream {index} of {self.num_shards}"

    def open_shard(self, shard: int, epoch: int) -> Restartable:
        """A new stream. Raises TaskError for one that cannot be restarted."""
        opened = self._make(shard, self.num_shards)
        missing = [name for name in ("__iter__", "state_dict", "load_state_dict") if not hasattr(opened, name)]
        if missing:
            raise TaskError(
                f"session.streams: make({shard}, {self.num_shards}) gave a {type(opened).__name__} without "
                f"{' and '.join(missing)}: its place could not be kept. Give an iterable with state_dict() and "
                "load_state_dict(), as torchdata's StatefulDataLoader; or a function: session.reads(read)."
            )
        found: Restartable = opened
        return found

    def __getitem__(self, number: int, /) -> Given:
        item, shard = divmod(int(number), self.num_shards)
        with _explaining(f"{self.origin(shard)}, for step {item + 1},"):
            return self._read(shard, item, number.state if isinstance(number, Place) else None)

    def _read(self, shard: int, item: int, state: str | None) -> Given:
        cursor = self._cursors.pop(shard, None)
        if cursor is None or cursor.item != item:
            cursor = self._opened(shard, item, state)
        try:
            batch = next(cursor.items)
        except StopIteration:
            return Given(None)
        after = plain(cursor.opened.state_dict(), "state_dict()", _REFUSAL, whole=True)
        cursor.item += 1
        self._cursors = {key: one for key, one in self._cursors.items() if one.item >= item} | {shard: cursor}
        return Given(batch, to_text(after), digest_of(batch))

    def _opened(self, shard: int, item: int, state: str | None) -> Cursor:
        assert not item or state is not None, f"microbatch {item} of stream {shard} has no state"
        with generators.kept():
            generators.seed(derive_seed(self._seed, "stream", shard))
            return cursor_at(self, shard, item=item, state=from_text(state) if item and state is not None else None)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cursors": {}}


_REFUSAL = (
    "the state of a stream must be plain data: numbers, texts, None, bytes, arrays, tensors, and lists, tuples and "
    "dicts of them. Return those from state_dict()."
)


def to_text(state: Any) -> str:
    """A state that `plain` has made, as text."""
    return json.dumps(state, separators=(",", ":"))


def from_text(text: str) -> Any:
    """The state that was made text."""
    return restored(json.loads(text))


def _explaining(what: str) -> AbstractContextManager[None]:
    return explaining(what, "while it was read", " Its traceback is in user_traceback.")
