"""Persistent (immutable) mappings with cheap single-entry updates.

Thousands of workers answer one after the other, and each answer makes a new state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Table(Mapping[K, V], Generic[K, V]):
    """A persistent mapping in the order of a `dict`.

    With n entries, an update costs about a copy of sqrt(n) entries.
    """

    __slots__ = ("_gone", "_newest", "_rest", "_size")

    def __init__(self, entries: Mapping[K, V]) -> None:
        self._rest: Mapping[K, V] = entries
        self._newest: dict[K, V] = {}
        """Entries that override those of the rest; few."""
        self._gone: frozenset[K] = frozenset()
        """Keys of the rest that were removed; few, and none of the newest."""
        self._size = len(entries)

    def __getitem__(self, key: K) -> V:
        if key in self._newest:
            return self._newest[key]
        if key in self._gone:
            raise KeyError(key)
        return self._rest[key]

    def __contains__(self, key: object) -> bool:
        return key in self._newest or (key in self._rest and key not in self._gone)

    def __iter__(self) -> Iterator[K]:
        for key in self._rest:
            if key not in self._gone:
                yield key
        for key in self._newest:
            if key not in self._rest:
                yield key

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return repr(dict(self))

    def with_entry(self, key: K, value: V) -> Table[K, V]:
        """A mapping that has this entry, too."""
        if key in self._gone:  # it is last then, as in a dict
            return Table({**self, key: value})
        return self._changed({**self._newest, key: value}, self._gone, self._size + (key not in self))

    def without(self, key: K) -> Table[K, V]:
        """A mapping without this key; this one if the key is missing."""
        if key not in self:
            return self
        newest = {other: value for other, value in self._newest.items() if other != key}
        gone = self._gone | {key} if key in self._rest else self._gone
        return self._changed(newest, gone, self._size - 1)

    def _changed(self, newest: dict[K, V], gone: frozenset[K], size: int) -> Table[K, V]:
        after = Table(self._rest)
        after._newest, after._gone, after._size = newest, gone, size
        if (len(newest) + len(gone)) ** 2 > size:
            return Table({key: after[key] for key in after} if gone else {**self._rest, **newest})
        return after


def with_entry(entries: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """`{**entries, key: value}`; neither mapping may be changed in place."""
    return _table(entries).with_entry(key, value)


def without(entries: Mapping[K, V], key: K) -> Mapping[K, V]:
    """The entries except for this key, if it exists; neither mapping may be changed in place."""
    return _table(entries).without(key)


def _table(entries: Mapping[K, V]) -> Table[K, V]:
    return entries if isinstance(entries, Table) else Table(entries)
