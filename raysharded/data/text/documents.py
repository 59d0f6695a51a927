"""Documents from text, JSON Lines and Parquet files, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from raysharded.data.text.files import File, open_file, reading
from raysharded.data.text.tokenizer import Document
from raysharded.errors import ConfigError, DataError

InputFormat = Literal["text", "jsonl", "parquet"]

_FORMAT_OF_SUFFIX: dict[str, InputFormat] = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
}
_CHUNK_BYTES = 1 << 20
_ROWS_AT_A_TIME = 256
_PART_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive documents of a file."""

    start: int = 0
    stop: int | None = None
    """Bytes of JSON Lines in which lines begin, or row groups of Parquet, from `start` up to this; None: to the end."""


def parts_of(file: File, input_format: InputFormat | None) -> Iterator[Part]:
    """Parts that have all documents of a file, in order: some megabytes of JSON Lines, row groups of Parquet.

    Raises as `documents`.
    """
    chosen = _format_of(file, input_format)
    if chosen == "text":
        yield Part()
        return
    with open_file(file) as handle:
        if chosen == "jsonl":
            with reading(file.name, "read"):
                size = handle.seek(0, 2)
            step = _PART_BYTES
        else:
            with reading(file.name, "read as Parquet"):
                size = pq.ParquetFile(handle).num_row_groups
            step = 1
    for start in range(0, size, step):
        yield Part(start, min(start + step, size))


def documents(
    file: File,
    input_format: InputFormat | None,
    text_field: str,
    part: Part = Part(),
) -> Iterator[Document]:
    """The file's documents in order: the whole of a text file, each line of JSON Lines, each row of Parquet.

    A document's chunks must be used before the next document is requested. Empty lines and empty texts are left out.
    Raises ConfigError for an unknown format. Raises DataError with file and line (or row) for input that is missing,
    malformed or without `text_field`.
    """
    match _format_of(file, input_format):
        case "text":
            return _text(file)
        case "jsonl":
            return _json_lines(file, text_field, part)
        case "parquet":
            return _parquet(file, text_field, part)


def _format_of(file: File, input_format: InputFormat | None) -> InputFormat:
    chosen = input_format or _FORMAT_OF_SUFFIX.get(file.suffix)
    if chosen is None:
        raise ConfigError(
            f"{file.name}: the suffix {file.suffix!r} does not determine the format. Give one of "
            f"{', '.join(get_args(InputFormat))} (`--format`, or `input_format=`)."
        )
    return chosen


def _text(file: File) -> Iterator[Document]:
    with open_file(file) as handle:
        with reading(file.name, "read"):
            first = handle.read(_CHUNK_BYTES)
        if first:
            yield Document(file.name, _chunks(file, handle, first))


def _chunks(file: File, handle: Any, chunk: bytes) -> Iterator[bytes]:
    while chunk:
        yield chunk
        with reading(file.name, "read"):
            chunk = handle.read(_CHUNK_BYTES)


def _json_lines(file: File, text_field: str, part: Part) -> Iterator[Document]:
    for number, line in enumerate(_lines(file, part), start=1):
        if not line.strip():
            continue
        try:
            yield from _record(file.name, line, text_field)
        except DataError as error:
            before = _lines_before(file, part.start)
            raise DataError(str(error).replace(file.name, f"{file.name}, line {before + number}", 1)) from error


def _record(name: str, line: bytes, text_field: str) -> Iterator[Document]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8; nested too deeply
        raise DataError(f"{name}: not JSON: {error}. Correct or remove the line.") from error
    if not isinstance(record, dict) or text_field not in record:
        has = f"an object with {', '.join(map(repr, record))}" if isinstance(record, dict) else repr(record)[:80]
        raise DataError(
            f"{name}: no field {text_field!r} in {has}. Give its name (`--text-field`, or `text_field=`), or"
            " correct the line."
        )
    yield from _document(name, text_field, record[text_field])


def _lines(file: File, part: Part) -> Iterator[bytes]:
    """The lines that begin in a part of a file."""
    begin = max(0, part.start - 1)  # a line begins at `start` if a line end is before it
    with open_file(file) as handle, reading(file.name, "read"):
        handle.seek(begin)
        rest, at, is_first = b"", begin, part.start > 0
        while chunk := handle.read(_CHUNK_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                if not is_first:
                    yield line
                is_first, at = False, at + len(line) + 1
                if part.stop is not None and at >= part.stop:
                    return
        if rest and not is_first:
            yield rest


def _lines_before(file: File, stop: int) -> int:
    """Number of lines that begin before a byte, up to the last that ends there or later."""
    found = 0
    if stop:
        with open_file(file) as handle, reading(file.name, "read"):
            left = stop - 1
            while left and (chunk := handle.read(min(left, _CHUNK_BYTES))):
                found, left = found + chunk.count(b"\n"), left - len(chunk)
        found += 1
    return found


def _parquet(file: File, text_field: str, part: Part) -> Iterator[Document]:
    with open_file(file) as handle:
        with reading(file.name, "read as Parquet"):
            parquet = pq.ParquetFile(handle)
            schema = parquet.schema_arrow
        columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
        if text_field not in schema.names:
            raise DataError(f"{file.name}: no column {text_field!r}; it has {columns}. Give its name (`--text-field`).")
        kind = schema.field(text_field).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)):
            raise DataError(f"{file.name}: column {text_field!r} is no text: {columns}. Give another (`--text-field`).")
        row = sum(parquet.metadata.row_group(group).num_rows for group in range(part.start))
        for batch in _batches(file, parquet, text_field, part):
            for value in batch:
                yield from _document(f"{file.name}, row {row}", text_field, value)
                row += 1


def _batches(file: File, parquet: Any, text_field: str, part: Part) -> Iterator[list[Any]]:
    stop = parquet.num_row_groups if part.stop is None else part.stop
    with reading(file.name, "read"):
        for batch in parquet.iter_batches(
            batch_size=_ROWS_AT_A_TIME, row_groups=range(part.start, stop), columns=[text_field], use_threads=False
        ):
            yield batch.column(0).to_pylist()


def _document(where: str, text_field: str, value: object) -> Iterator[Document]:
    if not isinstance(value, str):
        raise DataError(f"{where}: {text_field!r} is {repr(value)[:80]}, not text. Correct or remove it.")
    try:
        content = value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: {text_field!r} has half a surrogate pair ({error}). Correct or remove it."
        ) from error
    if content:
        yield Document(where, (content,))
