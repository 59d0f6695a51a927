"""The box index as Parquet: one row per box, for manifests that would be large with it. Pure.

Columns: `file` (int32: index into the manifest's files), `tensor` (text), `start` (int64: first byte in the file).
Each dimension i of the tensor with the most of them has `offset_i` and `size_i` (int64): 0 and 1 where the box's tensor
has fewer. The inflated size of the pages is known before any is inflated, and limited by the possible rows and names.
All columns are flat and are read one by one in batches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from raysharded.checkpoint.format.boxes import BoxTable, Int32, Int64
from raysharded.checkpoint.format.limits import MAX_CELLS, MAX_DIMS, MAX_INDEX_FOOTER_BYTES, MAX_INDEX_SLACK_BYTES
from raysharded.checkpoint.format.manifest import shown
from raysharded.checkpoint.format.parquet import inflated_bytes

MIN_BOXES = 4096
"""Number of boxes from which the index is a separate file."""

_PATH = re.compile(r"boxes-[0-9a-f]{16}\.parquet")
_BATCH_ROWS = 1 << 20
_LEAST_GROUP_ROWS = 1 << 16
"""Rows of a row group. Files with more and smaller groups are read too, if they are small."""
_LEAST_PAGE_ROWS = 16


class BadIndex(Exception):
    """The bytes are not a box index; the text gives the reason."""


def index_path(digest: str) -> str:
    """Path beside the manifest, named after the digest: two commits of one save never replace each other's index."""
    return f"boxes-{digest[:16]}.parquet"


def is_index(name: str) -> bool:
    """Whether a file in a checkpoint's folder is named like a box index."""
    return _PATH.fullmatch(name) is not None


def encode_index(file: Int32, boxes: BoxTable) -> bytes:
    """The Parquet file of all boxes."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "file": pa.array(file, pa.int32()),
        "tensor": pa.DictionaryArray.from_arrays(
            pa.array(boxes.tensor, pa.int32()), pa.array(boxes.names, pa.string())
        ),
        "start": pa.array(boxes.start, pa.int64()),
        **{f"offset_{dim}": pa.array(boxes.offsets[:, dim], pa.int64()) for dim in range(boxes.width)},
        **{f"size_{dim}": pa.array(boxes.sizes[:, dim], pa.int64()) for dim in range(boxes.width)},
    }
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink, compression="zstd", row_group_size=_BATCH_ROWS, store_schema=False)
    return bytes(sink.getvalue())


def decode_index(data: bytes, shapes: Sequence[tuple[str, int]], num_files: int) -> list[BoxTable]:
    """The boxes of each file. `shapes`: the name and the number of dimensions of every tensor.

    Raises BadIndex for anything that is not such an index.
    """
    import pyarrow as pa

    if len(data) < 12 or int.from_bytes(data[-8:-4], "little") > MAX_INDEX_FOOTER_BYTES:
        raise BadIndex(f"it is not Parquet, or has a footer of more than {MAX_INDEX_FOOTER_BYTES} bytes")
    try:
        file, boxes = _read(data, shapes)
    except (pa.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:  # any of them for bad bytes
        raise BadIndex(f"it is not Parquet: {shown(str(error))}") from error
    if len(file) and not (file.min() >= 0 and file.max() < num_files):
        raise BadIndex(f"there is a box in file {file.min()} or {file.max()} of {num_files}")
    order = np.argsort(file, kind="stable")
    edges = np.searchsorted(file[order], np.arange(num_files + 1))
    ordered = boxes.rows(order)
    return [ordered.rows(slice(lo, hi)) for lo, hi in pairwise(edges.tolist())]


def _read(data: bytes, shapes: Sequence[tuple[str, int]]) -> tuple[Int32, BoxTable]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    # Only the metadata's number of rows is used: pyarrow 26 ends the process on a request for a bad column's metadata.
    source = pq.ParquetFile(pa.BufferReader(data), read_dictionary=["tensor"])
    found = [field.name for field in source.schema_arrow]
    width, rows = (len(found) - 3) // 2, source.metadata.num_rows
    wanted = ["file", "tensor", "start", *(f"{what}_{dim}" for what in ("offset", "size") for dim in range(width))]
    if sorted(found) != sorted(wanted) or width > MAX_DIMS:
        raise BadIndex(f"its columns are {shown(found)}")
    if not 0 <= rows * max(width, 2) <= MAX_CELLS:
        raise BadIndex(f"it has {rows} boxes of up to {width} dimensions")
    _check_inflated(data, rows, width, [name for name, _ in shapes])
    tensor = _tensors(source, rows, {name: at for at, (name, _) in enumerate(shapes)})
    ndim = np.array([dims for _, dims in shapes], np.int32)[tensor]
    if ndim.max(initial=0) > width:
        raise BadIndex(f"it has {width} dimensions, and a box has {ndim.max(initial=0)}")
    boxes = BoxTable(
        names=tuple(name for name, _ in shapes),
        tensor=tensor,
        ndim=ndim,
        offsets=_grid(source, "offset", rows, width),
        sizes=_grid(source, "size", rows, width),
        start=_numbers(source, "start", rows, np.int64),
    )
    unused = np.arange(width)[None, :] >= ndim[:, None]
    if (boxes.offsets[unused] != 0).any() or (boxes.sizes[unused] != 1).any():
        raise BadIndex("a box has more dimensions than its tensor")
    return _numbers(source, "file", rows, np.int32), boxes


def _check_inflated(data: bytes, rows: int, width: int, names: Sequence[str]) -> None:
    """Raise BadIndex if the pages inflate to more than twice the size of the rows and names, plus slack.

    Each row has 16 bytes for each dimension, and 16 more; each row group may name every tensor once.
    """
    groups = 1 + rows // _LEAST_GROUP_ROWS
    names_bytes = sum(4 + len(name.encode()) for name in names)
    most = 2 * (rows * 16 * (width + 1) + groups * names_bytes) + MAX_INDEX_SLACK_BYTES
    inflated = inflated_bytes(data, max_pages=_LEAST_GROUP_ROWS + rows // _LEAST_PAGE_ROWS)
    if inflated > most:
        raise BadIndex(
            f"its pages inflate to {inflated} bytes, more than {most}, for {rows} boxes of {len(names)} tensors"
        )


def _batches(source: Any, name: str, rows: int) -> Iterator[tuple[int, Any]]:
    """(first row, part of the column) for each part. Raises BadIndex unless they make up `rows` rows without nulls."""
    at = 0
    for batch in source.iter_batches(_BATCH_ROWS, columns=[name], use_threads=False):
        batch.validate(full=True)
        column = batch.column(0)
        if column.null_count or at + len(column) > rows:
            raise BadIndex(f"column {name} has empty cells, or more than {rows} rows")
        yield at, column
        at += len(column)
    if at != rows:
        raise BadIndex(f"column {name} has {at} of {rows} rows")


def _numbers(source: Any, name: str, rows: int, dtype: type[np.generic]) -> Any:
    found = np.empty(rows, dtype)
    for at, column in _batches(source, name, rows):
        if str(column.type) != found.dtype.name:
            raise BadIndex(f"column {name} is of type {str(column.type)[:80]}")
        found[at : at + len(column)] = column.to_numpy(zero_copy_only=False)
    return found


def _grid(source: Any, what: str, rows: int, width: int) -> Int64:
    found = np.empty((rows, width), np.int64)
    for dim in range(width):
        found[:, dim] = _numbers(source, f"{what}_{dim}", rows, np.int64)
    return found


def _tensors(source: Any, rows: int, place: dict[str, int]) -> Int32:
    import pyarrow as pa

    found = np.empty(rows, np.int32)
    for at, column in _batches(source, "tensor", rows):
        if column.type != pa.dictionary(pa.int32(), pa.string()):
            raise BadIndex(f"column tensor is of type {str(column.type)[:80]}")
        if len(column.dictionary) > len(place):
            raise BadIndex(f"there are {len(column.dictionary)} names of {len(place)} tensors")
        known = np.array([place.get(name, -1) for name in column.dictionary.to_pylist()], np.int32)
        if (known < 0).any():
            raise BadIndex("there is a box of an unknown tensor")
        if len(column):
            found[at : at + len(column)] = known[column.indices.to_numpy(zero_copy_only=False)]
    return found
