"""How many bytes a Parquet file inflates to, from the headers of its pages. Pure; nothing is inflated.

A page of a few bytes may stand for gigabytes, and a reader makes room for what the page's header says before it
inflates it. The footer says so too, but need not be true. Both are structs in Thrift's compact encoding
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), with the fields of
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_MAGIC = b"PAR1"
_MAX_DEPTH = 16
_TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = 1, 2, 3, 7, 8, 9, 10, 11, 12
_INTEGERS = (4, 5, 6)

_ROW_GROUPS, _COLUMNS, _META_DATA = 4, 1, 3  # of FileMetaData, RowGroup, ColumnChunk
_NUM_VALUES, _CHUNK_BYTES, _DATA_AT, _DICTIONARY_AT = 5, 7, 9, 11  # of ColumnMetaData, compressed
_INFLATED_BYTES, _PAGE_BYTES = 2, 3  # of PageHeader


def inflated_bytes(data: bytes) -> int:
    """Of all pages. Raises ValueError for bytes that are no Parquet file, or whose pages do not lie end to end."""
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC or footer_bytes > len(data) - 12:
        raise ValueError("it does not begin and end as Parquet does")
    ends = len(data) - 8 - footer_bytes
    footer = _Compact(data, ends, len(data) - 8).struct()
    chunks = (chunk for group in _items(footer, _ROW_GROUPS) for chunk in _items(group, _COLUMNS))
    return sum(_of_chunk(data, _field(chunk, _META_DATA, dict), ends) for chunk in chunks)


def _of_chunk(data: bytes, chunk: dict[int, Any], ends: int) -> int:
    starts = [_field(chunk, number, int) for number in (_DATA_AT, _DICTIONARY_AT) if number in chunk]
    at = min(
        (start for start in starts if start), default=4
    )  # a column without rows has a dictionary, and no data at 0
    if _field(chunk, _NUM_VALUES, int) and not chunk.get(_DATA_AT):
        raise ValueError("a column has values, and no page of them")
    stop = at + _field(chunk, _CHUNK_BYTES, int)
    if not 4 <= at <= stop <= ends:
        raise ValueError(f"a column's pages are from byte {at} to {stop}")
    total = 0
    while at < stop:
        header = _Compact(data, at, stop)
        page = header.struct()
        inflated, size = _field(page, _INFLATED_BYTES, int), _field(page, _PAGE_BYTES, int)
        if inflated < 0 or not 0 <= size <= stop - header.at:
            raise ValueError(f"a page of {size} bytes is to become {inflated}")
        total, at = total + inflated, header.at + size
    return total


def _field(struct: dict[int, Any], number: int, kind: type) -> Any:
    value = struct.get(number)
    if type(value) is not kind:
        raise ValueError(f"field {number} of a header is missing, or of another type")
    return value


def _items(struct: dict[int, Any], number: int) -> list[dict[int, Any]]:
    items: list[dict[int, Any]] = _field(struct, number, list)
    if not all(type(item) is dict for item in items):
        raise ValueError(f"field {number} of a header is of another type")
    return items


class _Compact:
    """Reads Thrift's compact encoding from `at` on, and nothing from `stop` on. Raises ValueError for anything else."""

    def __init__(self, data: bytes, at: int, stop: int) -> None:
        self.at = at
        self._data, self._stop = data, stop

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Field number -> value: numbers, bytes, lists, structs. Of a field that is there twice, the last."""
        return dict(self._fields(depth))

    def _fields(self, depth: int) -> Iterator[tuple[int, Any]]:
        number = 0
        while (head := self._byte()) != 0:
            number = number + (head >> 4) if head >> 4 else self._signed()
            kind = head & 15
            yield number, kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise ValueError(f"a header is nested more than {_MAX_DEPTH} deep")
        if kind in (_TRUE, _FALSE, _BYTE):  # in a list a bool is a byte
            return self._byte()
        if kind in _INTEGERS:
            return self._signed()
        if kind == _DOUBLE:
            return self._bytes(8)
        if kind == _BINARY:
            return self._bytes(self._varint())
        if kind in (_LIST, _SET):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            return [self._value(head & 15, depth + 1) for _ in range(self._room_for(count))]
        if kind == _MAP:
            count = self._room_for(self._varint())
            kinds = self._byte() if count else 0
            return [(self._value(kinds >> 4, depth + 1), self._value(kinds & 15, depth + 1)) for _ in range(count)]
        if kind == _STRUCT:
            return self.struct(depth + 1)
        raise ValueError(f"a header has a value of unknown type {kind}")

    def _signed(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def _varint(self) -> int:
        number = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise ValueError("a header has a number of more than 64 bits")

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> bytes:
        self._room_for(count)
        self.at += count
        return self._data[self.at - count : self.at]

    def _room_for(self, count: int) -> int:
        """The count, if there may be so many bytes, or values of a byte or more."""
        if count > self._stop - self.at:
            raise ValueError("a header ends in the middle")
        return count
