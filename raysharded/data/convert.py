"""Conversion of token files to a token store."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raysharded.data.dataset import TokenDataset
from raysharded.data.store.find import find_stores
from raysharded.data.store.layout import Kind
from raysharded.data.store.writer import StoreWriter
from raysharded.data.text.files import PathLike, as_paths, find_files
from raysharded.data.text.token_file import TokenFile, Tokens
from raysharded.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """Result of `convert`."""

    files: int
    """Number of shards."""
    tokens: int
    bytes: int
    """Size of the store."""


def convert(
    inputs: PathLike | Sequence[PathLike], output: PathLike, *, tokens_per_file: int = 1 << 26
) -> ConvertReport:
    """Write the token stream of token files as a token store into the folder `output`, or its URL.

    A `TokenDataset` of the store has the same samples as one of the files. A run keeps its order of samples with it: of
    its data only the layout changes. Memory: one row group.

    Raises ConfigError for arguments that cannot work, DataError for files that a `TokenDataset` would refuse or that
    are damaged, StorageError if the output cannot be written.
    """
    if not isinstance(tokens_per_file, int) or isinstance(tokens_per_file, bool) or tokens_per_file < 1:
        raise ConfigError(f"convert: tokens_per_file={tokens_per_file!r}: give a whole number of 1 or more.")
    [folder] = as_paths(output, "output")
    paths = as_paths(inputs, "inputs")
    if find_stores(paths):
        raise ConfigError(f"convert: {paths[0]} is a token store already.")
    dataset = TokenDataset(paths, seq_len=1)
    dataset.validate()
    kind = Kind(tokenizer=dataset.tokenizer, vocab_size=dataset.vocab_size)
    with StoreWriter(folder, kind, tokens_per_file) as store:
        for tokens in stream_of_files(paths):
            store.write(tokens)
    return ConvertReport(files=store.num_parts, tokens=store.num_tokens, bytes=store.num_bytes)


def stream_of_files(paths: Sequence[str]) -> Iterator[Tokens]:
    """The tokens of all files in the order of a `TokenDataset`, a row group at a time."""
    found = {file.name: file for path in paths for file in find_files(path, suffix=".parquet")}
    for _, file in sorted(found.items()):
        opened = TokenFile(file)
        try:
            for group in range(len(opened.row_group_starts) - 1):
                yield opened.read_row_group(group)
        finally:
            opened.close()
