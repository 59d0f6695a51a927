"""Checkpoints made to cost their reader time and memory, and a process that opens them with little of either.

    python -m tests.checkpoint.huge FOLDER CASE

makes the case in the folder, then opens it in a process with 2 GiB more address space than it starts with, reads it,
and prints {"error": ..., "message": ..., "seconds": ..., "peak_mib": ...} as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from blake3 import blake3

from raysharded.checkpoint import Storage, open_checkpoint, open_storage
from raysharded.errors import CheckpointError
from tests.checkpoint.samples import State, raw, read_all, save, seal

MILLION = 1_000_000
ROOM_BYTES = 2 << 30
STATE: State = {"w": raw("uint8", 6, 4)}
DIGEST = "0" * 64

Case = Callable[[Storage, str], None]


def _body(storage: Storage, prefix: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(storage.read(f"{prefix}/manifest.json"))
    return body


def _put(storage: Storage, prefix: str, body: dict[str, Any], **texts: str) -> None:
    """Write the manifest, with some fields given as JSON text: made faster than from a million objects."""
    marks = {name: f"<{name}>" for name in texts if name in body}
    text = json.dumps({k: v for k, v in body.items() if k != "digest"} | marks, separators=(",", ":"))
    for name, value in texts.items():
        text = text.replace(f'"<{name}>"', value)
    storage.write(f"{prefix}/manifest.json", [seal(text)])


def _with_boxes(boxes: str, shape: Sequence[int], tensors: str = "") -> Case:
    def case(storage: Storage, prefix: str) -> None:
        body = _body(storage, prefix)
        size = int(np.prod(shape))
        body["files"] = [{**body["files"][0], "size_bytes": size, "chunk_size_bytes": 1 << 26, "boxes": "<boxes>"}]
        body["files"][0]["digests"] = [DIGEST] * -(-size >> 26)
        body["tensors"] = {"w": ["uint8", list(shape)]}
        _put(storage, prefix, body, boxes=f"[{boxes}]", **({"tensors": tensors} if tensors else {}))

    return case


def _with(**texts: str) -> Case:
    return lambda storage, prefix: _put(storage, prefix, _body(storage, prefix), **texts)


def _with_index(columns: dict[str, Any], shape: Sequence[int] = (MILLION,), size: int = MILLION) -> Case:
    """The box index of these columns; without a separate dictionary, a constant for a number."""

    def case(storage: Storage, prefix: str) -> None:
        rows = max((len(values) for values in columns.values() if not isinstance(values, (int, str))), default=1)
        kinds = {"file": pa.int32(), "tensor": pa.string()}
        table = {
            name: pa.array([values] * rows if isinstance(values, (int, str)) else values, kinds.get(name, pa.int64()))
            for name, values in columns.items()
        }
        sink = BytesIO()
        pq.write_table(pa.table(table), sink, compression="zstd", store_schema=False)
        _put_index(storage, prefix, sink.getvalue(), shape, size)

    return case


def _put_index(storage: Storage, prefix: str, data: bytes, shape: Sequence[int], size: int) -> None:
    body = _body(storage, prefix)
    storage.write(f"{prefix}/boxes.parquet", [data])
    body["index"] = {"path": "boxes.parquet", "size_bytes": len(data), "digest": blake3(data).hexdigest()}
    body["tensors"] = {"w": ["uint8", list(shape)]}
    body["files"] = [{**body["files"][0], "size_bytes": size, "chunk_size_bytes": 1 << 26}]
    body["files"][0]["digests"] = [DIGEST] * -(-size >> 26)
    _put(storage, prefix, body)


def _bomb(storage: Storage, prefix: str) -> None:
    """2^25 rows in some KiB: every column is one number, again and again."""
    columns = {name: pa.array(np.zeros(1 << 22, np.int64)) for name in ("start", "offset_0", "size_0")}
    columns |= {"file": pa.array(np.zeros(1 << 22, np.int32)), "tensor": pa.array(["w"] * (1 << 22))}
    table = pa.table(columns)
    sink = BytesIO()
    with pq.ParquetWriter(sink, table.schema, compression="zstd", store_schema=False) as writer:
        for _ in range(8):
            writer.write_table(table, row_group_size=1 << 22)
    _put_index(storage, prefix, sink.getvalue(), (MILLION,), MILLION)


def _long_names(storage: Storage, prefix: str) -> None:
    """2^22 rows of one name of 1 MiB."""
    rows = 1 << 22
    names = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), pa.array(["n" * (1 << 20)]))
    zeros = pa.array(np.zeros(rows, np.int64))
    table = pa.table(
        {
            "file": pa.array(np.zeros(rows, np.int32)),
            "tensor": names,
            "start": zeros,
            "offset_0": zeros,
            "size_0": zeros,
        }
    )
    sink = BytesIO()
    pq.write_table(table, sink, compression="zstd", store_schema=False, dictionary_pagesize_limit=1 << 24)
    _put_index(storage, prefix, sink.getvalue(), (MILLION,), MILLION)


def _bricks(count: int) -> dict[str, Any]:
    """A wall of `count` boxes, every other row shifted by half a brick: on no grid."""
    rows = np.repeat(np.arange(count // 2), 2)
    even = rows % 2 == 0
    first = np.arange(count) % 2 == 0
    offsets = np.where(first, 0, np.where(even, 4, 2))
    sizes = np.where(even, 4, np.where(first, 2, 6))
    start = np.cumsum(sizes) - sizes
    return {
        "file": 0,
        "tensor": "w",
        "start": start,
        "offset_0": rows,
        "size_0": 1,
        "offset_1": offsets,
        "size_1": sizes,
    }


def _boxes(count: int, box: Callable[[int], str] = lambda _: '["w",[0],[1],8]') -> str:
    return ",".join(box(number) for number in range(count))


def _tensors(count: int, about: str, last: str = '"w":["uint8",[1]]') -> str:
    return "{" + "".join(f'"t{number}":{about},' for number in range(count)) + last + "}"


_HALF = MILLION // 2
"""As many as there may be, or a little fewer: so many are not refused for their number alone."""
_RANGE = np.arange(MILLION)
_INDEX: dict[str, Any] = {"file": 0, "tensor": "w", "start": _RANGE, "offset_0": _RANGE, "size_0": 1}


def _of_dims(dims: int, rows: int) -> dict[str, Any]:
    ones = {f"offset_{dim}": 0 for dim in range(1, dims)} | {f"size_{dim}": 1 for dim in range(1, dims)}
    return {**_INDEX, "start": _RANGE[:rows], "offset_0": _RANGE[:rows], **ones}


_GAP = np.delete(_RANGE, 777_777)
_SQUARE = {"offset_0": np.append(_RANGE[:-1] // 1000, 5), "offset_1": np.append(_RANGE[:-1] % 1000, 5), "size_1": 1}
_FILE = '{"path":"f%d","size_bytes":0,"chunk_size_bytes":1,"digests":[],"boxes":[]}'
_BIG_FILE = f'{{"path":"a","size_bytes":{MILLION},"chunk_size_bytes":1,"boxes":[],"digests":'

CASES: dict[str, Callable[[], Case]] = {
    "boxes": lambda: _with_boxes(_boxes(MILLION), (MILLION,)),
    "boxes over each other": lambda: _with_boxes(_boxes(_HALF), (MILLION,)),
    "boxes with a gap": lambda: _with_boxes(_boxes(_HALF, lambda i: f'["w",[{i}],[1],{i}]'), (MILLION,)),
    "boxes beside one of 32 dimensions": lambda: _with_boxes(
        _boxes(_HALF) + f',["w",{[0] * 32},{[1] * 32},8]', (MILLION,)
    ),
    "tensors": lambda: _with(tensors=_tensors(MILLION, '["bool",[]]')),
    "tensors without boxes": lambda: _with(tensors=_tensors(_HALF, '["bool",[1]]')),
    "tensors of one name": lambda: _with(tensors="{" + ",".join(['"w":["uint8",[6,4]]'] * _HALF) + "}"),
    "files of little": lambda: _with(files="[" + ",".join(['{"path":"a","size_bytes":0}'] * MILLION) + "]"),
    "files that are empty": lambda: _with(files="[" + ",".join(_FILE % i for i in range(1 << 16)) + "]"),
    "digests": lambda: _with(files=f"[{_BIG_FILE}[{','.join([chr(34) + DIGEST + chr(34)] * MILLION)}]}}]"),
    "numbers in the metadata": lambda: _with(metadata='{"a":[' + ",".join(["0"] * 20 * MILLION) + "]}"),
    "a tree of many": lambda: _with(tree="[" * 198 + ",".join(["[[]]"] * MILLION) + "]" * 198, files="[]"),
    "a tree as large as may be": lambda: _with(tree="[" * 198 + ",".join(["[[]]"] * MILLION) + "]" * 198),
    "an index of boxes over each other": lambda: _with_index({**_INDEX, "offset_0": 0}),
    "an index with a gap": lambda: _with_index({**_INDEX, "start": _GAP, "offset_0": _GAP}),
    "an index of a grid with a box twice": lambda: _with_index({**_INDEX, **_SQUARE}, (1000, 1000)),
    "an index of 100,000 boxes on no grid": lambda: _with_index(_bricks(100_000), (50_000, 8), 400_000),
    "an index of 32 dimensions": lambda: _with_index(_of_dims(32, _HALF), (MILLION, *[1] * 31)),
    "an index of too many of 32 dimensions": lambda: _with_index(_of_dims(32, _HALF + 50_000), (MILLION, *[1] * 31)),
    "an index of 33 dimensions": lambda: _with_index(_of_dims(33, 1000)),
    "an index of two million boxes": lambda: _with_index(
        {**_INDEX, "start": np.arange(1 << 21), "offset_0": np.arange(1 << 21)}, ((1 << 21) + 1,), 1 << 21
    ),
    "an index that expands without end": lambda: _bomb,
    "an index of one long name": lambda: _long_names,
}


def _measure(folder: str, prefix: str) -> dict[str, Any]:
    baseline = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (baseline + ROOM_BYTES, baseline + ROOM_BYTES))
    began = time.process_time()
    error = message = ""
    try:
        checkpoint = open_checkpoint(open_storage(folder), prefix)
        read_all(checkpoint)
    except CheckpointError as caught:
        error, message = type(caught).__name__, str(caught)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"error": error, "message": message, "seconds": time.process_time() - began, "peak_mib": peak}


def main(folder: str, case: str) -> None:
    prefix = save(open_storage(folder), STATE, num_writers=1)
    making = os.fork()  # memory for making it is given back
    if making == 0:
        CASES[case]()(open_storage(folder), prefix)
        os._exit(0)
    if os.waitpid(making, 0)[1] == 0:
        sys.stdout.write(json.dumps(_measure(folder, prefix)))


if __name__ == "__main__":
    main(*sys.argv[1:])
