"""Token files: the format, and random reads of one file.

**Format `raysharded.tokens`, version 1.** A token file is a Parquet file.
1. It MUST have a column `tokens` of type uint8, uint16 or uint32, without nulls: one token per row. It MAY
   have other columns; readers ignore them.
2. Its key-value metadata MUST have `raysharded.format` = "raysharded.tokens", `raysharded.format_version` =
   "1", `raysharded.tokenizer` (an id: "bytes", or "sha256:" and the digest of the tokenizer's file),
   `raysharded.vocab_size` and `raysharded.num_tokens` (decimal numbers). It MAY have others.
3. Every token MUST be less than the vocabulary's size. `num_tokens` MUST be the number of rows.
4. Row groups SHOULD have 2^14 to 2^18 rows: to read any token, a reader fetches and decodes its row group.
   Pages SHOULD have checksums. Any encoding and compression MAY be used; `pack` writes BYTE_STREAM_SPLIT with
   zstd, the smallest and fastest to decode of those that were measured (it needs a reader of Parquet 2.11).

A data set is several files with the same tokenizer and vocabulary size. Its token stream is the files' streams one
after the other, in the order of their names. A document ends with an end-of-document token; it MAY continue in the next
file.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from raysharded.data.text.files import File, open_file, reading
from raysharded.errors import DataError

Tokens: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

COLUMN = "tokens"
FORMAT = "raysharded.tokens"
VERSION = 1
_DTYPES = (np.uint8, np.uint16, np.uint32)
_REPACK = "Write it again with `raysharded data pack`."


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The smallest of uint8, uint16 and uint32 that holds every token below `vocab_size`."""
    return next(np.dtype(t) for t in _DTYPES if vocab_size - 1 <= np.iinfo(t).max)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenHeader:
    """Contents of a token file's footer."""

    tokenizer: str
    vocab_size: int
    num_tokens: int

    def to_metadata(self) -> dict[str, str]:
        """The footer's key-value metadata."""
        return {
            "raysharded.format": FORMAT,
            "raysharded.format_version": str(VERSION),
            "raysharded.tokenizer": self.tokenizer,
            "raysharded.vocab_size": str(self.vocab_size),
            "raysharded.num_tokens": str(self.num_tokens),
        }


class TokenFile:
    """An open token file. Opening reads and checks only its footer. For one thread at a time.

    Raises DataError, with the file, the cause and the remedy, if it is missing, truncated, not Parquet, not of this
    format, or of another schema. `read_row_group` raises it for damage that shows only there.
    """

    def __init__(self, file: File) -> None:
        self._file = file
        self._parquet = _open_parquet(file)
        self.header = _parse_header(file, self._parquet)
        rows = [self._parquet.metadata.row_group(i).num_rows for i in range(self._parquet.num_row_groups)]
        self.row_group_starts: npt.NDArray[np.int64] = np.cumsum([0, *rows], dtype=np.int64)
        """Row group g has the tokens from `row_group_starts[g]` to `row_group_starts[g + 1]`."""

    def read_row_group(self, group: int) -> Tokens:
        """The tokens of one row group, in the file's integer type; read-only."""
        try:
            column = self._parquet.read_row_group(group, columns=[COLUMN], use_threads=False).column(0)
            tokens: Tokens = column.combine_chunks().to_numpy(zero_copy_only=column.null_count == 0)
        except Exception as error:  # the boundary to Arrow and storage
            raise DataError(
                f"{self._file.name}: row group {group} cannot be read: {type(error).__name__}: {error}. "
                "The file was damaged or cut short after its footer was read. Restore it from its source."
            ) from error
        length = int(self.row_group_starts[group + 1] - self.row_group_starts[group])
        if column.null_count or len(tokens) != length or (length and int(tokens.max()) >= self.header.vocab_size):
            raise DataError(
                f"{self._file.name}: row group {group} should have {length} tokens below {self.header.vocab_size}; it "
                f"has {len(column)} rows, {column.null_count} nulls, maximum {tokens.max(initial=0)}. {_REPACK}"
            )
        return tokens

    def close(self) -> None:
        """Close the file."""
        self._parquet.close(force=True)


def _open_parquet(file: File) -> Any:
    handle = open_file(file)
    try:
        return pq.ParquetFile(handle, pre_buffer=True, page_checksum_verification=True)
    except Exception as error:  # Arrow raises the same ArrowInvalid for all of the causes below
        cause = _why_not_parquet(file, handle)
        handle.close()
        raise DataError(f"{file.name}: {cause} ({str(error).splitlines()[0]})") from error


def _why_not_parquet(file: File, handle: Any) -> str:
    with reading(file.name, "read"):
        size = handle.seek(0, 2)
        handle.seek(0)
        head = handle.read(4)
    if size == 0:
        return f"the file is empty. Copy it again, or {_REPACK[0].lower()}{_REPACK[1:]}"
    if head == b"PAR1":
        return f"the Parquet file is truncated or its footer is damaged ({size} bytes). Copy it again from its source."
    return f"not a Parquet file: it begins with {head!r}. Turn text into token files with `raysharded data pack`."


def _parse_header(file: File, parquet: Any) -> TokenHeader:
    metadata = {k.decode(): v.decode("utf-8", "replace") for k, v in (parquet.metadata.metadata or {}).items()}
    schema = parquet.schema_arrow
    columns = ", ".join(f"{field.name}: {field.type}" for field in schema)
    if metadata.get("raysharded.format") != FORMAT:
        raise DataError(
            f"{file.name}: a Parquet file, but without the metadata of the token format ({columns}). "
            "Pack its text with `raysharded data pack`."
        )
    if metadata.get("raysharded.format_version") != str(VERSION):
        raise DataError(
            f"{file.name}: token format version {metadata.get('raysharded.format_version')!r}, this raysharded reads "
            f"version {VERSION}. Upgrade raysharded, or pack the data again."
        )
    types = schema.field(COLUMN).type if COLUMN in schema.names else None
    if types not in [pa.from_numpy_dtype(t) for t in _DTYPES]:
        raise DataError(
            f"{file.name}: needs a column {COLUMN!r} of type uint8, uint16 or uint32; it has {columns}. {_REPACK}"
        )
    try:
        header = TokenHeader(
            tokenizer=metadata["raysharded.tokenizer"],
            vocab_size=int(metadata["raysharded.vocab_size"]),
            num_tokens=int(metadata["raysharded.num_tokens"]),
        )
    except (KeyError, ValueError) as error:
        raise DataError(f"{file.name}: its metadata is incomplete or not a number: {error}. {_REPACK}") from error
    if header.vocab_size < 1 or header.num_tokens != parquet.metadata.num_rows:
        raise DataError(
            f"{file.name}: its metadata promise {header.num_tokens} tokens of a vocabulary of {header.vocab_size}; it "
            f"has {parquet.metadata.num_rows} rows. {_REPACK}"
        )
    return header
