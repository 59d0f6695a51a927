"""Inflated size of a Parquet file, from the headers of its pages. Pure; nothing is inflated.

A page of a few bytes may stand for gigabytes, and readers allocate the size in its header before they inflate it. The
footer has the size too, but may be wrong. Both are structs in Thrift's compact encoding
(https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md), with the fields of
https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift.

The reader that follows must see the same pages. Therefore anything that two readers of Thrift could interpret
differently is rejected: repeated or unordered fields, known fields of another type, containers where none are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_MAGIC = b"PAR1"
_MAX_DEPTH = 16
_MAX_FIELD = 100
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 12

_Shape = Mapping[int, Any]
"""Shape of a struct: its fields that are lists or structs with lists in them.

A list has (the items' type, their shape if they are structs), a struct has its shape. All other fields are numbers,
texts, bools, and structs of these.
"""
_PLAIN: _Shape = {}
_COLUMN_META_DATA: _Shape = {
    2: (_I32, _PLAIN),
    3: (_BINARY, _PLAIN),
    8: (_STRUCT, _PLAIN),
    13: (_STRUCT, _PLAIN),
    16: {2: (_I64, _PLAIN), 3: (_I64, _PLAIN)},
    17: {2: (_I32, _PLAIN)},
}
_ROW_GROUP: _Shape = {1: (_STRUCT, {3: _COLUMN_META_DATA}), 4: (_STRUCT, _PLAIN)}
_FILE_META_DATA: _Shape = {
    2: (_STRUCT, _PLAIN),
    4: (_STRUCT, _ROW_GROUP),
    5: (_STRUCT, _PLAIN),
    7: (_STRUCT, _PLAIN),
}

_ROW_GROUPS, _CREATED_BY = 4, 6  # of FileMetaData
_COLUMNS, _META_DATA = 1, 3  # of RowGroup, ColumnChunk
_NUM_VALUES, _CHUNK_BYTES, _DATA_AT, _DICTIONARY_AT = 5, 7, 9, 11  # of ColumnMetaData; the bytes are compressed
_INFLATED_BYTES, _PAGE_BYTES = 2, 3  # of PageHeader
_ODD_WRITER = b"parquet-mr"
"""Writer some of whose versions wrote pages beyond those in the footer, which readers read too."""


def inflated_bytes(data: bytes, max_pages: int) -> int:
    """Inflated bytes of all pages.

    Raises ValueError for bytes that are not Parquet, and for more than `max_pages`. Raises it too for pages that do not
    lie end to end or belong to several columns, and for anything that readers could interpret differently.
    """
    footer_bytes = int.from_bytes(data[-8:-4], "little")
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC or footer_bytes > len(data) - 12:
        raise ValueError("it does not begin and end as Parquet does")
    ends = len(data) - 8 - footer_bytes
    footer = _Compact(data, ends, len(data) - 8).struct(_FILE_META_DATA)
    if _CREATED_BY in footer and _ODD_WRITER in _field(footer, _CREATED_BY, _BINARY).lower():
        raise ValueError("it is from a writer whose files readers interpret differently")
    chunks = [
        _field(chunk, _META_DATA, _STRUCT)
        for group in _field(footer, _ROW_GROUPS, _LIST)
        for chunk in _field(group, _COLUMNS, _LIST)
    ]
    if sum(_field(chunk, _CHUNK_BYTES, _I64) for chunk in chunks) > ends:
        raise ValueError("columns share pages")
    total = 0
    for chunk in chunks:
        for inflated in _pages(data, chunk, ends):
            total, max_pages = total + inflated, max_pages - 1
            if max_pages < 0:
                raise ValueError("it has too many pages")
    return total


def _pages(data: bytes, chunk: dict[int, tuple[int, Any]], ends: int) -> Iterator[int]:
    """Inflated bytes of each page of a column."""
    starts = [_field(chunk, number, _I64) for number in (_DATA_AT, _DICTIONARY_AT) if number in chunk]
    at = min((start for start in starts if start), default=4)
    if _field(chunk, _NUM_VALUES, _I64) and not _field(chunk, _DATA_AT, _I64):  # 0 if there is only a dictionary
        raise ValueError("a column has values, and no page of them")
    stop = at + _field(chunk, _CHUNK_BYTES, _I64)
    if not 4 <= at <= stop <= ends:
        raise ValueError(f"a column's pages are from byte {at} to {stop}")
    while at < stop:
        header = _Compact(data, at, stop)
        page = header.struct(_PLAIN)
        inflated, size = _field(page, _INFLATED_BYTES, _I32), _field(page, _PAGE_BYTES, _I32)
        if inflated < 0 or not 0 <= size <= stop - header.at:
            raise ValueError(f"a page of {size} bytes inflates to {inflated}")
        yield inflated
        at = header.at + size


def _field(struct: dict[int, tuple[int, Any]], number: int, kind: int) -> Any:
    found, value = struct.get(number, (0, None))
    if found != kind:
        raise ValueError(f"field {number} of a header is missing, or of another type")
    return value


class _Compact:
    """Reader of Thrift's compact encoding from `at` to before `stop`. Raises ValueError for anything else."""

    def __init__(self, data: bytes, at: int, stop: int) -> None:
        self.at = at
        self._data, self._stop = data, stop

    def struct(self, shape: _Shape, depth: int = 0) -> dict[int, tuple[int, Any]]:
        """Map from field number to its type and value: a number, bytes, a list, a struct."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"a header is nested more than {_MAX_DEPTH} deep")
        found: dict[int, tuple[int, Any]] = {}
        number = 0
        while (head := self._byte()) != 0:
            before, kind = number, head & 15
            number = number + (head >> 4) if head >> 4 else self._signed()
            if not before < number <= _MAX_FIELD:
                raise ValueError(f"field {number} of a header comes after field {before}")
            found[number] = kind, self._value(kind, shape.get(number), depth)
        return found

    def _value(self, kind: int, known: Any, depth: int) -> Any:
        if isinstance(known, tuple) != (kind == _LIST) or (isinstance(known, dict) and kind != _STRUCT):
            raise ValueError("a header has a list where none is known, or none where one is")
        if kind == _LIST:
            items, shape = known
            return self._list(items, shape, depth)
        if kind == _STRUCT:
            return self.struct(known or _PLAIN, depth + 1)
        return (kind == _TRUE) if kind in (_TRUE, _FALSE) else self._item(kind, _PLAIN, depth)

    def _list(self, kind: int, shape: _Shape, depth: int) -> list[Any]:
        head = self._byte()
        if head & 15 != kind:
            raise ValueError("a header has a list of items of another type")
        count = head >> 4 if head >> 4 < 15 else self._varint()
        return [self._item(kind, shape, depth) for _ in range(self._room_for(count))]

    def _item(self, kind: int, shape: _Shape, depth: int) -> Any:
        match kind:
            case 3:  # a byte
                return self._byte()
            case 4 | 5 | 6:  # _I16, _I32, _I64
                return self._signed()
            case 7:  # a double
                return self._bytes(8)
            case 8:  # _BINARY
                return self._bytes(self._varint())
            case 12:  # _STRUCT
                return self.struct(shape, depth + 1)
        raise ValueError(f"a header has a value of type {kind}")

    def _signed(self) -> int:
        number = self._varint()
        return (number >> 1) ^ -(number & 1)

    def _varint(self) -> int:
        number = 0
        for shift in range(0, 63, 7):
            byte = self._byte()
            number |= (byte & 127) << shift
            if byte < 128:
                return number
        raise ValueError("a header has a number of more than 63 bits")

    def _byte(self) -> int:
        return self._bytes(1)[0]

    def _bytes(self, count: int) -> bytes:
        self._room_for(count)
        self.at += count
        return self._data[self.at - count : self.at]

    def _room_for(self, count: int) -> int:
        """The count, if that many bytes, or values of at least a byte, may follow."""
        if count > self._stop - self.at:
            raise ValueError("a header ends in the middle")
        return count
