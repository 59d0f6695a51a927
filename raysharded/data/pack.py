"""Packing of text into token stores, or into token files.

The formats are in `raysharded.data.store.layout` and `raysharded.data.text.token_file`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import TracebackType
from typing import Any, Literal, Self, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from raysharded.data.store.layout import INDEX, Kind
from raysharded.data.store.progress import PackProgress, Progress
from raysharded.data.store.writer import StoreWriter
from raysharded.data.text.documents import InputFormat, documents, parts_of
from raysharded.data.text.files import File, PathLike, as_paths, file_system, find_files, is_local, readable_system
from raysharded.data.text.part_tokens import Encoders, Processes, Reading, Work
from raysharded.data.text.token_file import COLUMN, TokenHeader, token_dtype
from raysharded.data.text.tokenizer import Tokenizer, find_tokenizer
from raysharded.display.quantities import count
from raysharded.errors import ConfigError, DataError, StorageError
from raysharded.locations import scheme_of

Compression = Literal["zstd", "none"]
Layout = Literal["store", "parquet"]
_TOOLS_FOLDERS = frozenset(("_temporary", "_spark_metadata", "_delta_log", "__pycache__"))


@dataclass(frozen=True, kw_only=True, slots=True)
class PackReport:
    """Result of `pack`."""

    files: int
    """Number of shards or token files."""
    documents: int
    tokens: int
    """Number of tokens, with the end-of-document tokens."""
    bytes: int
    """Size of the store, or of the token files."""
    skipped: tuple[str, ...] = ()
    """Files of the input folders that were left out, by their paths below the folder."""


def pack(
    inputs: PathLike | Sequence[PathLike],
    output: PathLike,
    *,
    input_format: InputFormat | None = None,
    text_field: str = "text",
    tokenizer: PathLike | None = None,
    end_of_document: str | None = None,
    tokens_per_file: int = 1 << 26,
    tokens_per_row_group: int = 1 << 16,
    compression: Compression = "zstd",
    layout: Layout = "store",
    workers: int = 1,
    encoders: Callable[[Reading], Encoders] | None = None,
    on_progress: Callable[[PackProgress], None] | None = None,
) -> PackReport:
    """Tokenize documents into the folder `output`, for `TokenDataset`: as a token store, or as Parquet files.

    A store costs about the bytes that are used wherever it is read; `output` is a folder or any URL that checkpoints
    can be written to. `layout="parquet"` writes `part-00000.parquet` and on, which other tools read, too; to a folder
    or any fsspec URL. `tokens_per_row_group` and `compression` are for these files alone.

    `inputs`: files, folders (with all their files, except hidden ones) or globs; local or any fsspec URL. They are used
    in the given order, each sorted by name; a repeated file is used once. `input_format` None: by suffix. `text_field`:
    for JSON Lines and Parquet. `tokenizer` None: bytes (vocabulary 257); else the file of a `tokenizers` tokenizer.
    `end_of_document`: the text of the token that ends documents, if that tokenizer has an unusual one.

    `workers`: processes that read and tokenize; 1: this one. They are started anew, so a script that calls this needs
    `if __name__ == "__main__"`. `encoders`: others in their place, as `RayTasks` of
    `raysharded.ray_backend.packing.ray_tasks`. The bytes are the same each way. A store whose packing was interrupted
    is continued after its last whole shard, by a call with the same inputs and settings. `on_progress`: called for each
    shard of a store, and every ten seconds.

    Memory: one row group and one document (for a text file with the byte tokenizer, one chunk of it); with several
    workers some parts of the input for each, which have about 4 MiB of JSON Lines, a row group of Parquet, or a text
    file. A shard of a store is spooled into a temporary file first. The same input gives the same token stream. Of
    several calls into one folder one succeeds. A store is one once its index is there, which is written last. On a
    local disk Parquet files appear when all are complete. Elsewhere they are written in place, and removed if packing
    fails. No call replaces or removes another call's files, if the storage can create a file only where there is none.

    Raises ConfigError for arguments that cannot work (also if `output` has packed data, or gets them meanwhile),
    DataError that names the invalid input, StorageError if the output cannot be written.
    """
    counts = (("tokens_per_file", tokens_per_file), ("tokens_per_row_group", tokens_per_row_group))
    for name, value in (*counts, ("workers", workers)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"pack: {name}={value!r}: give a whole number of 1 or more.")
    for name, choice, choices in (
        ("input_format", input_format, (None, *get_args(InputFormat))),
        ("compression", compression, get_args(Compression)),
        ("layout", layout, get_args(Layout)),
    ):
        if choice not in choices:
            raise ConfigError(f"pack: {name}={choice!r}: choose one of {', '.join(map(repr, choices))}.")
    [folder] = as_paths(output, "output")
    skipped: list[str] = []
    files = _find_inputs(as_paths(inputs, "inputs"), folder, skipped)
    found = None if tokenizer is None else find_tokenizer(tokenizer)
    reading = Reading(input_format, text_field, found, end_of_document)
    encoder = reading.encoder()
    writer: StoreWriter | _Parts
    progress = None
    if layout == "store":
        kind = Kind(
            tokenizer=encoder.id,
            vocab_size=encoder.vocab_size,
            end_of_document=None if tokenizer is None else encoder.end_of_document,
        )
        about = {"reading": [reading.input_format, reading.text_field], "tokens_per_file": tokens_per_file}
        progress = Progress.of(folder, kind, files, about)
        progress.say = on_progress
        writer = StoreWriter(folder, kind, tokens_per_file, done=progress.shards, on_shard=progress.save)
    else:
        writer = _Parts(folder, encoder, tokens_per_file, tokens_per_row_group, compression)
    chosen = encoders or (partial(Processes, number=workers) if workers > 1 else None)
    with writer as parts, chosen(reading) if chosen else contextlib.nullcontext() as others:
        if progress is not None:
            progress.check()
        work = _work(files, input_format, progress)
        if others is None:
            num_documents = _write_here(parts, reading, encoder, work, progress)
        else:
            num_documents = _write_encoded(parts, others, work, progress, encoder.id)
        if num_documents == 0:
            beside = f", nor in {count(len(files) - 1, 'other input')}" if len(files) > 1 else ""
            raise DataError(f"{files[0].name}: no text in it{beside}. Nothing to pack.")
    if progress is not None:
        progress.end()
    return PackReport(
        files=parts.num_parts,
        documents=num_documents,
        tokens=parts.num_tokens,
        bytes=parts.num_bytes,
        skipped=tuple(sorted(skipped)),
    )


def _work(files: Sequence[File], input_format: InputFormat | None, progress: Progress | None) -> Iterator[Work]:
    """The parts of all files that are left, in order."""
    number, before = 0, 0
    for file, size in zip(files, progress.sizes if progress is not None else [0] * len(files), strict=True):
        parts = list(parts_of(file, input_format))
        for place, part in enumerate(parts, start=1):
            is_written = progress is not None and number < progress.parts
            if progress is not None:
                progress.begins(before + size * place / len(parts), is_written=is_written)
            if not is_written:
                yield file, part
            number += 1
        before += size


def _write_here(
    writer: StoreWriter | _Parts, reading: Reading, encoder: Tokenizer, work: Iterable[Work], progress: Progress | None
) -> int:
    """Write the tokens of the parts; returns the number of documents. Memory: one document, or a chunk of it."""
    number, skipped = (0, 0) if progress is None else (progress.documents, progress.tokens_of_part)
    for file, part in work:
        for document in documents(file, reading.input_format, reading.text_field, part):
            for tokens in chain(encoder.encode(document), [np.asarray([encoder.end_of_document])]):
                writer.write(tokens[skipped:])
                skipped = max(0, skipped - len(tokens))
            number += 1
        if progress is not None:
            progress.passed(writer.num_tokens, number)
    return number


def _write_encoded(
    writer: StoreWriter | _Parts, encoders: Encoders, work: Iterable[Work], progress: Progress | None, tokenizer: str
) -> int:
    """Write as `_write_here` the tokens that others compute. Raises DataError if their tokenizer is another one."""
    number, skipped = (0, 0) if progress is None else (progress.documents, progress.tokens_of_part)
    for found in encoders.encode(work):
        if found.tokenizer != tokenizer:
            raise DataError(
                f"pack: a process has the tokenizer {found.tokenizer} in place of {tokenizer}: give one path that all "
                "machines see."
            )
        writer.write(found.tokens[skipped:])
        number, skipped = number + found.num_documents, 0
        if progress is not None:
            progress.passed(writer.num_tokens, number)
    return number


def _find_inputs(paths: Sequence[str], folder: str, skipped: list[str]) -> list[File]:
    """The input files, each once; `skipped` receives the names of files that are left out."""

    def hides(below: str) -> bool:
        hidden = _is_side_file(below)
        if hidden:
            skipped.append(below)
        return hidden

    found = (file for path in paths for file in find_files(path, recursive=True, hides=hides))
    files = list({file.name: file for file in found}.values())
    inside = []
    if any(scheme_of(file.name) == scheme_of(folder) for file in files):  # else the output's package may be missing
        fs, within = readable_system(folder)
        inside = [f.name for f in files if type(f.fs) is type(fs) and f.path.startswith(f"{within.rstrip('/')}/")]
    if inside:
        raise ConfigError(f"pack: the output folder {folder} has inputs in it ({inside[0]}). Choose another output.")
    return files


def _is_side_file(below: str) -> bool:
    """True for hidden files, and for files that data tools keep beside the data, such as `_SUCCESS` and `_metadata`."""
    *folders, name = below.split("/")
    hidden = any(part.startswith(".") for part in (*folders, name))
    return hidden or not _TOOLS_FOLDERS.isdisjoint(folders) or (name.startswith("_") and "." not in name)


class _Parts:
    """Writer of a token stream as files of `tokens_per_file`, in row groups. It holds one row group in memory."""

    def __init__(self, folder: str, tokenizer: Tokenizer, per_file: int, per_row_group: int, compression: str) -> None:
        self._folder, self._tokenizer, self._compression = folder, tokenizer, compression
        self._fs, self._path = file_system(folder)
        self._dtype = token_dtype(tokenizer.vocab_size)
        self._schema = pa.schema([pa.field(COLUMN, pa.from_numpy_dtype(self._dtype), nullable=False)])
        self._per_file, self._per_row_group = per_file, per_row_group
        self._buffer = np.empty(min(per_file, per_row_group), dtype=self._dtype)
        self._buffered = self._in_part = 0
        self._handle: Any = None  # the types of fsspec and Arrow are unavailable
        self._writer: Any = None
        self._written: list[tuple[str, str]] = []  # (path where a part was written, final path)
        self._own: set[str] = set()  # files that this call made
        self._made = False  # whether it made the folder
        self.num_parts = self.num_tokens = self.num_bytes = 0

    def write(self, tokens: npt.NDArray[Any]) -> None:
        """Append to the stream."""
        while len(tokens):
            room = min(len(self._buffer), self._per_file - self._in_part) - self._buffered
            some, tokens = tokens[:room], tokens[room:]
            self._buffer[self._buffered : self._buffered + len(some)] = some
            self._buffered += len(some)
            if len(some) == room:
                self._end_row_group()
            if self._in_part == self._per_file:
                self._end_part()

    def __enter__(self) -> Self:
        with self._writing():
            self._made = not self._fs.exists(self._path)
            self._fs.makedirs(self._path, exist_ok=True)
            there = self._fs.find(self._path, maxdepth=1)
            old = [p for p in there if p.endswith(".parquet")]
        if any(p.rsplit("/", 1)[-1] == INDEX for p in there):
            raise ConfigError(f"pack: {self._folder} already has a token store. Empty it, or choose another.")
        if old:
            raise ConfigError(
                f"pack: {self._folder} already has {count(len(old), 'Parquet file')}. Empty it, or choose another."
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None:
            self._discard()
            return
        try:
            self._end_row_group()
            self._end_part()
            moved = [(written, belongs) for written, belongs in self._written if written != belongs]
            for _, belongs in moved:
                self._reserve(belongs)
            with self._writing():
                for written, belongs in moved:
                    self._fs.mv(written, belongs)
        except BaseException:
            self._discard()
            raise

    def _begin_part(self) -> None:
        name = f"part-{self.num_parts:05d}.parquet"
        belongs = f"{self._path.rstrip('/')}/{name}"
        temporary = f"{self._path.rstrip('/')}/.{name}.{secrets.token_hex(6)}.incomplete"
        written = temporary if is_local(self._fs) else belongs
        self._reserve(written)
        self._written.append((written, belongs))
        with self._writing():
            self._open_writer(written)
        self.num_parts += 1

    def _reserve(self, path: str) -> None:
        """Reserve the name with an empty file for this call. Raises ConfigError if the file exists."""
        with self._writing():
            try:
                self._create(path)
                self._own.add(path)
                return
            except FileExistsError:
                pass
            except (TypeError, ValueError, NotImplementedError):  # a storage that cannot: check, and then write
                if not self._fs.exists(path):
                    self._own.add(path)
                    return
        raise ConfigError(
            f"pack: {self._folder} got {path.rsplit('/', 1)[-1]} from someone else meanwhile. Choose another folder."
        )

    def _create(self, path: str) -> None:
        if is_local(self._fs):  # fsspec would check, and then write
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        else:
            self._fs.pipe_file(path, b"", mode="create")

    def _open_writer(self, path: str) -> None:
        self._handle = self._fs.open(path, "wb")
        self._writer = pq.ParquetWriter(
            self._handle,
            self._schema,
            compression=self._compression,
            use_dictionary=False,
            column_encoding={COLUMN: "BYTE_STREAM_SPLIT"},
            write_statistics=False,
            write_page_checksum=True,
        )

    def _end_row_group(self) -> None:
        if not self._buffered:
            return
        if self._writer is None:
            self._begin_part()
        with self._writing():
            table = pa.table([pa.array(self._buffer[: self._buffered])], schema=self._schema)
            self._writer.write_table(table, row_group_size=self._buffered)
        self._in_part += self._buffered
        self.num_tokens += self._buffered
        self._buffered = 0

    def _end_part(self) -> None:
        if self._writer is None:
            return
        header = TokenHeader(
            tokenizer=self._tokenizer.id, vocab_size=self._tokenizer.vocab_size, num_tokens=self._in_part
        )
        with self._writing():
            self._writer.add_key_value_metadata(header.to_metadata())
            self._writer.close()
            self.num_bytes += self._handle.tell()
            self._handle.close()
        self._writer = self._handle = None
        self._in_part = 0

    def _discard(self) -> None:
        """Delete this call's files and leave others' alone. The error that led here is the one to report."""
        for opened in (self._writer, self._handle):
            with contextlib.suppress(Exception):
                if opened is not None:
                    opened.close()
        for path in self._own:
            with contextlib.suppress(Exception):
                self._fs.rm_file(path)
        if self._made:
            with contextlib.suppress(Exception):
                self._fs.rmdir(self._path)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the boundary to storage: every protocol has its own errors
            raise StorageError(
                f"{self._folder}: cannot write token files: {type(error).__name__}: {error}. "
                "Check the permissions and the free space, then pack again."
            ) from error
