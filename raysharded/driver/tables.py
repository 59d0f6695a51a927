"""Mappings that never change, and of which one with another entry is had without copying all of them.

Thousands of workers answer one after the other, and each answer makes a new state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Table(Mapping[K, V], Generic[K, V]):
    """In the order of a `dict`. With n entries, one more costs as much as copying some sqrt(n)."""

    __slots__ = ("_newest", "_rest", "_size")

    def __init__(self, entries: Mapping[K, V]) -> None:
        self._rest: Mapping[K, V] = entries
        self._newest: dict[K, V] = {}
        """Entries that count before those of the rest; few."""
        self._size = len(entries)

    def __getitem__(self, key: K) -> V:
        return self._newest[key] if key in self._newest else self._rest[key]

    def __contains__(self, key: object) -> bool:
        return key in self._newest or key in self._rest

    def __iter__(self) -> Iterator[K]:
        yield from self._rest
        for key in self._newest:
            if key not in self._rest:
                yield key

    def __len__(self) -> int:
        return self._size

    def __repr__(self) -> str:
        return repr(dict(self))

    def with_entry(self, key: K, value: V) -> Table[K, V]:
        """Another one that has this entry, too."""
        newest = {**self._newest, key: value}
        if len(newest) ** 2 > self._size:
            return Table({**self._rest, **newest})
        after = Table(self._rest)
        after._newest, after._size = newest, self._size + (key not in self)
        return after


def with_entry(entries: Mapping[K, V], key: K, value: V) -> Mapping[K, V]:
    """As `{**entries, key: value}`; neither may be changed in place."""
    table = entries if isinstance(entries, Table) else Table(entries)
    return table.with_entry(key, value)
