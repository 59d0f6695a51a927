"""Documents from text, JSON Lines and Parquet files, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
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


def documents(file: File, input_format: InputFormat | None, text_field: str) -> Iterator[Document]:
    """The file's documents in order: the whole of a text file, each line of JSON Lines, each row of Parquet.

    A document's chunks must be used before the next document is requested. Empty lines and empty texts are left out.
    Raises ConfigError for an unknown format. Raises DataError with file and line (or row) for input that is missing,
    malformed or without `text_field`.
    """
    chosen = input_format or _FORMAT_OF_SUFFIX.get(file.suffix)
    match chosen:
        case "text":
            return _text(file)
        case "jsonl":
            return _json_lines(file, text_field)
        case "parquet":
            return _parquet(file, text_field)
    raise ConfigError(
        f"{file.name}: the suffix {file.suffix!r} does not determine the format. Give one of "
        f"{', '.join(get_args(InputFormat))} (`--format`, or `input_format=`)."
    )


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


def _json_lines(file: File, text_field: str) -> Iterator[Document]:
    for number, line in enumerate(_lines(file), start=1):
        where = f"{file.name}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # invalid JSON or UTF-8; nested too deeply
            raise DataError(f"{where}: not JSON: {error}. Correct or remove the line.") from error
        if not isinstance(record, dict) or text_field not in record:
            has = f"an object with {', '.join(map(repr, record))}" if isinstance(record, dict) else repr(record)[:80]
            raise DataError(
                f"{where}: no field {text_field!r} in {has}. Give its name (`--text-field`, or `text_field=`), or"
                " correct the line."
            )
        yield from _document(where, text_field, record[text_field])


def _lines(file: File) -> Iterator[bytes]:
    with open_file(file) as handle, reading(file.name, "read"):
        rest = b""
        while chunk := handle.read(_CHUNK_BYTES):
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
        if rest:
            yield rest


def _parquet(file: File, text_field: str) -> Iterator[Document]:
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
        row = 0
        for batch in _batches(file, parquet, text_field):
            for value in batch:
                yield from _document(f"{file.name}, row {row}", text_field, value)
                row += 1


def _batches(file: File, parquet: Any, text_field: str) -> Iterator[list[Any]]:
    with reading(file.name, "read"):
        for batch in parquet.iter_batches(batch_size=_ROWS_AT_A_TIME, columns=[text_field], use_threads=False):
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
