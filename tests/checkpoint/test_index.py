"""Boxes in columns are equal to their source, and come back from Parquet unchanged, or not at all."""

from __future__ import annotations

import uuid
from contextlib import suppress
from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings, strategies as st

from raysharded.checkpoint import commit, open_checkpoint, open_storage
from raysharded.checkpoint.format import encoding
from raysharded.checkpoint.format.boxes import BoxTable, FileBox, joined, padded
from raysharded.checkpoint.format.encoding import decode, encode
from raysharded.checkpoint.format.index import MIN_BOXES, BadIndex, decode_index, encode_index
from raysharded.checkpoint.format.manifest import FileRecord, Manifest, TensorInfo
from raysharded.checkpoint.format.parquet import inflated_bytes
from raysharded.errors import CheckpointError, IncompleteCheckpoint
from tests.cases import examples
from tests.checkpoint.samples import bytes_of, raw, read_all, save, with_index

NAMES = ["a", "b.weight", "名字", "@", ""]
NUMBER = st.integers(0, 2**62)


@st.composite
def _rows(draw: st.DrawFn) -> list[list[FileBox]]:
    """The boxes of some files; each name has its own number of dimensions."""
    box = st.sampled_from(list(enumerate(NAMES))).flatmap(
        lambda named: st.builds(
            FileBox,
            name=st.just(named[1]),
            offsets=st.tuples(*[NUMBER] * named[0]),
            sizes=st.tuples(*[NUMBER] * named[0]),
            start=NUMBER,
        )
    )
    return draw(st.lists(st.lists(box, max_size=5), min_size=1, max_size=4))


SHAPES = [(name, dims) for dims, name in enumerate(NAMES)]


@settings(max_examples=examples(40, of=60))
@given(_rows())
def test_boxes_come_back_from_columns_and_from_parquet_in_their_order(files: list[list[FileBox]]) -> None:
    tables = [BoxTable.of(boxes) for boxes in files]
    assert [list(table) for table in tables] == files
    assert [[table[row] for row in range(len(table))] for table in tables] == files
    file, boxes = joined(tables, tuple(NAMES), 4)
    assert file.tolist() == [number for number, rows in enumerate(files) for _ in rows]
    assert list(boxes) == [box for rows in files for box in rows]
    assert [list(t) for t in decode_index(encode_index(file, boxes), SHAPES, len(files))] == files


def test_rows_are_padded_to_one_width() -> None:
    assert padded([(1, 2), (), (3,)], 3, 9).tolist() == [[1, 2, 9], [9, 9, 9], [3, 9, 9]]
    assert padded([], 2, 0).shape == (0, 2)
    assert padded([(), ()], 0, 0).shape == (2, 0)
    with pytest.raises(OverflowError):
        padded([(2**63,)], 1, 0)


def test_a_box_of_an_unknown_tensor_is_reported() -> None:
    table = BoxTable.of([FileBox(name="a", offsets=(), sizes=(), start=0)])
    with pytest.raises(KeyError):
        joined([table], ("b",), 0)


def _columns() -> dict[str, Any]:
    return {
        "file": pa.array([0, 1], pa.int32()),
        "tensor": pa.array(["v", "w"]),
        "start": pa.array([8, 8], pa.int64()),
        "offset_0": pa.array([0, 0], pa.int64()),
        "offset_1": pa.array([0, 0], pa.int64()),
        "size_0": pa.array([3, 3], pa.int64()),
        "size_1": pa.array([1, 4], pa.int64()),
    }


def _parquet(columns: dict[str, Any] | list[tuple[str, Any]], **options: Any) -> bytes:
    pairs = list(columns.items()) if isinstance(columns, dict) else columns
    sink = BytesIO()
    table = pa.table([values for _, values in pairs], names=[name for name, _ in pairs])
    pq.write_table(table, sink, **options)
    return sink.getvalue()


def _read(data: bytes) -> list[BoxTable]:
    return decode_index(data, [("v", 1), ("w", 2)], 2)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"store_schema": False},
        {"compression": "none"},
        {"compression": "gzip"},
        {"use_dictionary": False},
        {"row_group_size": 1},
        {"data_page_version": "2.0"},
        {"version": "1.0"},
        {"write_statistics": False},
    ],
    ids=str,
)
def test_an_index_of_the_same_columns_is_read_however_parquet_packs_them(options: dict[str, Any]) -> None:
    shuffled = dict(reversed(_columns().items()))
    for columns in (_columns(), shuffled):
        one, other = _read(_parquet(columns, **options))
        assert list(one) == [FileBox(name="v", offsets=(0,), sizes=(3,), start=8)]
        assert list(other) == [FileBox(name="w", offsets=(0, 0), sizes=(3, 4), start=8)]


def _with(**columns: Any) -> dict[str, Any]:
    return {**_columns(), **columns}


def _without(name: str) -> dict[str, Any]:
    return {other: values for other, values in _columns().items() if other != name}


WRONG: dict[str, tuple[Any, str]] = {
    "no column": ({}, "columns|Parquet"),
    "no start": (_without("start"), "columns"),
    "no size": (_without("size_1"), "columns"),
    "one column more": (_with(other=pa.array([0, 0])), "columns"),
    "two columns of one name": ([*_columns().items(), ("start", pa.array([0, 0]))], "columns"),
    "a third offset": (_with(offset_2=pa.array([0, 0])), "columns"),
    "another offset": (_with(offset_7=_columns()["offset_0"], size_7=_columns()["size_0"]), "columns"),
    "a list": (_with(start=pa.array([[8], [8]])), "Parquet|start"),
    "a struct": (_with(start=pa.array([{"a": 1}, {"a": 2}])), "Parquet|start"),
    "fractions": (_with(start=pa.array([8.0, 8.5])), "start is of type double"),
    "small numbers": (_with(start=pa.array([8, 8], pa.int32())), "start is of type int32"),
    "unsigned numbers": (_with(start=pa.array([8, 2**63], pa.uint64())), "start is of type uint64"),
    "times": (_with(start=pa.array([8, 8], pa.timestamp("us"))), "start is of type timestamp"),
    "text for numbers": (_with(file=pa.array(["0", "1"])), "file is of type string"),
    "numbers for text": (_with(tensor=pa.array([0, 1])), "tensor is of type int64"),
    "bytes for text": (_with(tensor=pa.array([b"v", b"w"])), "tensor is of type dictionary<values=binary|is of binary"),
    "text that is none": (
        _with(tensor=pa.array([b"v", b"\xff"]).cast(pa.string(), safe=False)),
        "Parquet",
    ),
    "an empty number": (_with(start=pa.array([8, None], pa.int64())), "empty cells"),
    "an empty name": (_with(tensor=pa.array(["v", None])), "empty cells"),
    "an unknown name": (_with(tensor=pa.array(["v", "x"])), "unknown tensor"),
    "more names than tensors": (
        {name: pa.concat_arrays([v, v]) for name, v in _columns().items()} | {"tensor": pa.array(["v", "w", "x", "y"])},
        "4 names of 2 tensors",
    ),
    "a file beyond": (_with(file=pa.array([0, 2], pa.int32())), "file 0 or 2 of 2"),
    "a file before": (_with(file=pa.array([-1, 1], pa.int32())), "file -1 or 1 of 2"),
    "a dimension too much": (_with(size_1=pa.array([2, 4])), "more dimensions than its tensor"),
    "an offset too much": (_with(offset_1=pa.array([1, 0])), "more dimensions than its tensor"),
    "a dimension too little": (
        {name: values for name, values in _columns().items() if not name.endswith("_1")},
        "1 dimensions, and a box has 2",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_columns_that_are_no_index_are_refused(name: str) -> None:
    columns, said = WRONG[name]
    with pytest.raises(BadIndex, match=said):
        _read(_parquet(columns))


@pytest.mark.parametrize("data", [b"", b"PAR1", b"PAR1PAR1", b"PAR1" + bytes(100) + b"PAR1", b"\xff" * 100])
def test_bytes_that_are_no_parquet_are_refused(data: bytes) -> None:
    with pytest.raises(BadIndex, match="not Parquet"):
        _read(data)


@pytest.mark.parametrize("cut", [1, 4, 8, 20, 100, 1000])
def test_a_parquet_file_that_is_cut_off_is_refused(cut: int) -> None:
    whole = _parquet(_columns())
    for data in (whole[:-cut], whole[cut:], whole[: len(whole) // 2] + whole[len(whole) // 2 + cut :]):
        with pytest.raises(BadIndex):
            _read(data)


BIG = 100 << 20
"""More than an index of two rows may inflate to, and little where it is compressed."""


@pytest.mark.parametrize(
    ("column", "cells", "options"),
    [
        ("tensor", "vw", {"dictionary_pagesize_limit": 2 * BIG}),
        ("tensor", "vw", {"use_dictionary": False}),
        ("start", "88", {"use_dictionary": False}),
    ],
    ids=["a dictionary", "a page", "a page of another column"],
)
def test_pages_that_inflate_to_more_than_boxes_need_are_refused_before_that(
    column: str, cells: str, options: dict[str, Any]
) -> None:
    columns = _with(**{column: pa.array([cells[0], cells[1] * BIG])})
    data = _parquet(columns, compression="zstd", write_statistics=False, **options)
    assert len(data) < 100_000
    with pytest.raises(BadIndex, match=r"its pages inflate to 10\d{7} bytes, more than 6"):
        _read(data)


@settings(max_examples=examples(60, of=200))
@given(st.data())
def test_headers_that_were_changed_are_read_or_refused_and_nothing_else(data: st.DataObject) -> None:
    whole = bytearray(_parquet(_columns(), compression=data.draw(st.sampled_from(["none", "zstd"]))))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ValueError):
        assert inflated_bytes(bytes(whole), 1000) >= 0


def _varint(number: int) -> bytes:
    return bytes([number & 127 | 128]) + _varint(number >> 7) if number > 127 else bytes([number])


def _number(number: int) -> bytes:
    return _varint(number * 2 if number >= 0 else -2 * number - 1)


def _thrift(fields: list[tuple[int, int, Any]]) -> bytes:
    """A struct, from (number, type, value) of its fields; a list's value is (its items' type, items)."""

    def value(kind: int, of: Any) -> bytes:
        match kind:
            case 8:
                return _varint(len(of)) + bytes(of)
            case 9:
                items = b"".join(value(of[0], item) for item in of[1])
                return bytes([0xF0 | of[0]]) + _varint(len(of[1])) + items
            case 12:
                return _thrift(of)
        return _number(of)

    return b"".join(bytes([kind]) + _number(number) + value(kind, of) for number, kind, of in fields) + bytes(1)


def _crafted(
    page: list[tuple[int, int, Any]] | None = None,
    column: list[tuple[int, int, Any]] | None = None,
    footer: list[tuple[int, int, Any]] | None = None,
    columns: tuple[int, int] = (12, 1),
    pages: int = 1,
) -> bytes:
    """A Parquet file of one column of pages of 5 bytes each, with further fields in its structs. `columns`: the type of
    the items in the list of columns, and their number, all of the same pages."""
    body = (
        _thrift([(1, 5, 2), (2, 5, 5), (3, 5, 5), *(page or []), (7, 12, [(1, 5, 1), (2, 5, 0)])]) + bytes(5)
    ) * pages
    told = [(1, 5, 6), (4, 5, 0), (5, 6, 1), (6, 6, 5), (7, 6, len(body)), (9, 6, 4), *(column or [])]
    chunk = [(2, 6, 0), (3, 12, told)]
    group = [(1, 9, (12, [chunk] * columns[1])), (2, 6, 5), (3, 6, 1)]
    end = _thrift([(1, 5, 2), (3, 6, 1), (4, 9, (12, [group])), *(footer or [])])
    if columns[0] != 12:
        end = end.replace(
            bytes([9]) + _number(1) + bytes([0xFC]), bytes([9]) + _number(1) + bytes([0xF0 | columns[0]]), 1
        )
    return b"PAR1" + body + end + len(end).to_bytes(4, "little") + b"PAR1"


def test_an_unambiguous_file_is_counted() -> None:
    assert inflated_bytes(_crafted(), 1) == 5
    assert inflated_bytes(_crafted(footer=[(6, 8, b"parquet-cpp-arrow version 26.0.1")]), 1) == 5
    assert inflated_bytes(_crafted(pages=9), 9) == 45


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (_crafted(page=[(2, 6, 5)]), "comes after field"),
        (_crafted(page=[(2 + (1 << 16), 5, 1 << 30)]), "comes after field"),
        (_crafted(page=[(-1, 5, 1)]), "comes after field"),
        (_crafted(column=[(7, 5, 5)]), "comes after field"),
        (_crafted(column=[(13, 9, (8, [b"a"]))]), "items of another type"),
        (_crafted(column=[(10, 9, (5, [1]))]), "a list where none is known"),
        (_crafted(column=[(12, 12, [(1, 9, (5, [1]))])]), "a list where none is known"),
        (_crafted(columns=(8, 1)), "items of another type"),
        (_crafted(columns=(12, 2)), "columns share pages"),
        (_crafted(footer=[(6, 8, b"Parquet-MR version 1.2.0")]), "readers interpret differently"),
        (_crafted(pages=9), "too many pages"),
    ],
    ids=range(11),
)
def test_what_two_readers_could_take_for_different_pages_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        inflated_bytes(data, 8)


@pytest.mark.parametrize("compression", ["none", "zstd", "gzip"])
@pytest.mark.parametrize("options", [{}, {"use_dictionary": False}, {"row_group_size": 700}, {"data_page_size": 64}])
def test_pages_inflate_to_the_size_in_the_footer_of_an_honest_writer(compression: str, options: dict[str, Any]) -> None:
    numbers = pa.array(np.arange(2000))
    data = _parquet({"a": numbers, "b": numbers.cast(pa.string())}, compression=compression, **options)
    footer = pq.ParquetFile(BytesIO(data)).metadata
    groups = [footer.row_group(at) for at in range(footer.num_row_groups)]
    told = sum(group.column(at).total_uncompressed_size for group in groups for at in range(group.num_columns))
    headers = told - inflated_bytes(data, 10_000)  # which the footer counts as well
    assert 0 < headers < 60 * 2 * len(groups) * (2000 * 8 // options.get("data_page_size", 1 << 20) + 3)


def _manifest(num_boxes: int) -> Manifest:
    boxes = BoxTable.of(FileBox(name="w", offsets=(i,), sizes=(1,), start=i) for i in range(num_boxes))
    file = FileRecord(path="f", size_bytes=num_boxes, chunk_size_bytes=1 << 20, digests=bytes(32), boxes=boxes)
    return Manifest(
        run="r",
        step=0,
        generation=0,
        save_id="a",
        writer="w",
        created_at=0.0,
        tensors={"w": TensorInfo(dtype="uint8", shape=(num_boxes,))},
        files=(file,),
    )


def test_many_boxes_go_into_an_index_and_few_stay_in_the_manifest() -> None:
    few, many = _manifest(MIN_BOXES - 1), _manifest(MIN_BOXES)
    assert encode(few).index_path == ""
    encoded = encode(many)
    assert encoded.index_path.startswith("boxes-")
    assert len(encoded.manifest) < 1000
    asked: list[tuple[str, int]] = []

    def read_index(path: str, size: int) -> bytes:
        asked.append((path, size))
        return encoded.index

    assert decode(encoded.manifest, read_index=read_index) == many
    assert asked == [(encoded.index_path, len(encoded.index))]
    with pytest.raises(CheckpointError, match="box index"):
        decode(encoded.manifest)


def test_indexes_of_other_boxes_have_other_names() -> None:
    """Two commits of one save with its files in another order do not replace each other's."""
    one = _manifest(MIN_BOXES)
    other = replace(one, files=(*one.files, replace(one.files[0], path="empty", boxes=BoxTable.of([]))))
    moved = replace(other, files=other.files[::-1])
    assert encode(other).index_path != encode(moved).index_path
    assert encode(replace(one, created_at=5.0)).index_path == encode(one).index_path


def test_a_commit_that_comes_second_leaves_the_index_of_the_first_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One save, its files collected in another order: for example after a lost reply."""
    with_index(monkeypatch)
    storage = open_storage(f"memory://{uuid.uuid4().hex}/run")
    state = {"w": raw("uint8", 30, 4)}
    prefix = save(storage, state)
    first = open_checkpoint(storage, prefix)
    again = replace(first.manifest, files=first.manifest.files[::-1], writer="w0001")
    assert commit(storage, prefix, again) is None
    assert commit(storage, prefix, replace(again, writer="driver")) == first.digest
    assert read_all(open_checkpoint(storage, prefix)) == bytes_of(state)


def test_a_save_without_its_digest_table_cannot_be_committed() -> None:
    storage = open_storage(f"memory://{uuid.uuid4().hex}/run")
    prefix = save(storage, {"w": raw("uint8", 30, 4)}, chunk=2)
    manifest = open_checkpoint(storage, prefix).manifest
    storage.delete([f"{prefix}/manifest.json", f"{prefix}/w0001.safetensors.b3"])
    with pytest.raises(IncompleteCheckpoint, match=r"1 of 6 files are not under .*; first: w0001\.safetensors\.b3"):
        commit(storage, prefix, manifest)


def test_a_manifest_that_readers_would_refuse_for_its_size_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "MAX_VALUES", 1 << 12)
    assert encode(replace(_manifest(2), metadata={"a": [0] * (1 << 11)})).manifest
    huge = replace(_manifest(2), metadata={"a": [0] * (1 << 12)})
    with pytest.raises(CheckpointError, match="larger than readers take"):
        encode(huge)
    with pytest.raises(CheckpointError, match="arrays and objects in one another"):
        encode(replace(_manifest(2), tree=_nested(300)))


def _nested(depth: int) -> Any:
    value: Any = np.int64(1).item()
    for _ in range(depth):
        value = {"a": value}
    return value
