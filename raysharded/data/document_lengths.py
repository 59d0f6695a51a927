"""The documents of token stores and token files: their number, their lengths, and the beginning of the first."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raysharded.data.convert import stream_of_files
from raysharded.data.dataset import TokenDataset
from raysharded.data.packed.arrange import end_of_documents
from raysharded.data.store.find import find_stores
from raysharded.data.store.layout import Kind, from_bytes
from raysharded.data.store.store_source import TokenStream
from raysharded.data.text.files import PathLike, as_paths
from raysharded.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, find_tokenizer
from raysharded.errors import ConfigError, DataError

_CHUNK_TOKENS = 1 << 20
_SAMPLE_TOKENS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentLengths:
    """Lengths of documents in tokens, without the token that ends each."""

    documents: int
    """Number of them; one without an end at the end of the data counts."""
    shortest: int
    median: float
    mean: float
    longest: int
    sample: str
    """Text of the first 64 tokens of the first document; empty without a tokenizer."""


def document_lengths(
    paths: PathLike | Sequence[PathLike],
    *,
    tokenizer: PathLike | None = None,
    end_of_document: int | None = None,
) -> DocumentLengths:
    """The documents of data as of `TokenDataset`. Reads all tokens once. Memory: 4 bytes for each document.

    `tokenizer`: as of `pack`, for the sample; bytes need none. `end_of_document`: the token that ends documents, for
    data that do not name it. Raises ConfigError for another tokenizer than that of the data, DataError as
    `TokenDataset`, and for data without documents.
    """
    found = as_paths(paths, "paths")
    dataset = TokenDataset(found, seq_len=1)
    dataset.validate()
    kind = Kind(tokenizer=dataset.tokenizer, vocab_size=dataset.vocab_size, end_of_document=dataset.end_of_document)
    encoder = _encoder(kind, tokenizer)
    end = end_of_documents(kind, end_of_document, f"{found[0]}:")
    lengths, first, open_tokens = array("I"), list[int](), 0
    for tokens in _tokens(found):
        ends = np.flatnonzero(tokens == end)
        if not lengths and len(first) < _SAMPLE_TOKENS:
            first += tokens[: int(ends[0]) if len(ends) else None][: _SAMPLE_TOKENS - len(first)].tolist()
        if len(ends):
            lengths.append(open_tokens + int(ends[0]))
            lengths.extend((np.diff(ends) - 1).tolist())
        open_tokens = len(tokens) - 1 - int(ends[-1]) if len(ends) else open_tokens + len(tokens)
    if open_tokens:
        lengths.append(open_tokens)
    if not lengths:
        raise DataError(f"{found[0]}: no documents in it.")
    numbers = np.asarray(lengths)
    return DocumentLengths(
        documents=len(numbers),
        shortest=int(numbers.min()),
        median=float(np.median(numbers)),
        mean=float(numbers.mean()),
        longest=int(numbers.max()),
        sample="" if encoder is None else encoder.decode(first),
    )


def _encoder(kind: Kind, given: PathLike | None) -> Tokenizer | None:
    if kind.tokenizer == ByteTokenizer.id and given is None:
        return ByteTokenizer()
    if given is None:
        return None
    encoder = FileTokenizer(find_tokenizer(given), needs_end=False)
    if encoder.id != kind.tokenizer:
        raise ConfigError(f"tokenizer={str(given)!r} is {encoder.id}, but the data have {kind.tokenizer}.")
    return encoder


def _tokens(paths: Sequence[str]) -> Iterator[npt.NDArray[np.int64]]:
    stores = find_stores(paths)
    if not stores:
        for group in stream_of_files(paths):
            yield group.astype(np.int64)
        return
    stream = TokenStream(stores)
    for start in range(0, stream.num_tokens, _CHUNK_TOKENS):
        stop = min(start + _CHUNK_TOKENS, stream.num_tokens)
        yield from_bytes(stream.read(start, stop), stream.kind.token_bytes)
