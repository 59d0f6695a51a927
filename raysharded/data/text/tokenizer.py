"""Conversion of text to token ids: the bytes themselves, or any tokenizer file of the `tokenizers` package."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from raysharded.data.text.files import as_paths, join_path, readable_system, reading, refuse_no_file
from raysharded.errors import ConfigError, DataError

if TYPE_CHECKING:
    import tokenizers

_END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")

_TOKENIZER_FILE = "tokenizer.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class Document:
    """One document's text in UTF-8 (or, for bytes, any bytes), in chunks that may be cut anywhere."""

    where: str
    """Location for display: the file, and the line or row in it."""
    chunks: Iterable[bytes]


class Tokenizer(Protocol):
    """Converter of documents into token ids below `vocab_size`. A document always gives the same ids."""

    @property
    def id(self) -> str:
        """Name of the tokenizer. Only equal tokenizers have equal names."""
        ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def end_of_document(self) -> int:
        """The token that `pack` writes after every document."""
        ...

    def encode(self, document: Document) -> Iterator[npt.NDArray[Any]]:
        """The document's tokens, in order, in arrays of any length, without `end_of_document`."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no text is replaced."""
        ...


class ByteTokenizer:
    """A tokenizer in which every byte is a token, and 256 ends a document. Long documents need no memory."""

    id = "bytes"
    vocab_size = 257
    end_of_document = 256

    def encode(self, document: Document) -> Iterator[npt.NDArray[Any]]:
        for chunk in document.chunks:
            yield np.frombuffer(chunk, dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < self.end_of_document).decode("utf-8", "replace")


class FileTokenizer:
    """A tokenizer file (JSON) of the `tokenizers` package. It holds one document at a time in memory."""

    def __init__(self, path: str, end_of_document: str | None = None, *, needs_end: bool = True) -> None:
        """`end_of_document`: the text of that token in the vocabulary; None: the first known name that it has.
        `needs_end`: whether it must have one.

        Raises ConfigError without the package or such a token, DataError if the file cannot be used.
        """
        fs, within = readable_system(path)
        refuse_no_file(fs, within, path)
        with reading(path, "read"):
            content = fs.cat_file(within)
        self._tokenizer = _load(path, content)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        names = _END_OF_DOCUMENT_NAMES if end_of_document is None else (end_of_document,)
        known = [name for name in names if name in vocabulary]
        if not known and needs_end:
            raise ConfigError(
                f"{path}: its vocabulary has no {' or '.join(names)} to end documents with. "
                "Give end_of_document=, the text of a token that it has."
            )
        self.id = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.end_of_document = vocabulary[known[0]] if known else -1

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))

    def encode(self, document: Document) -> Iterator[npt.NDArray[Any]]:
        try:
            text = b"".join(document.chunks).decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{document.where}: not UTF-8 at byte {error.start}: {error.reason}. "
                "Convert the file, or pack it with the byte tokenizer."
            ) from error
        yield np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.uint32)


def find_tokenizer(given: str | os.PathLike[str]) -> str:
    """The file of a tokenizer: a path or URL, the `tokenizer.json` in a folder, or that of a name of the Hub.

    Names are looked up as transformers looks them up: in the cache of this machine, and then on the Hub. Raises
    ConfigError if there is none.
    """
    (path,) = as_paths(given, "tokenizer")
    fs, within = readable_system(path)
    with reading(path, "read"):
        if fs.isfile(within):
            return path
        if fs.isdir(within):
            inside = join_path(path, _TOKENIZER_FILE)
            if fs.isfile(f"{within.rstrip('/')}/{_TOKENIZER_FILE}"):
                return inside
            raise DataError(f"{path}: no {_TOKENIZER_FILE} in the folder. Save it with transformers' fast tokenizer.")
    name = os.fspath(given)
    if _HUB_NAME.fullmatch(name) is None:
        return path  # opening it reports that it is missing
    try:
        import huggingface_hub  # comes with tokenizers

        return str(huggingface_hub.hf_hub_download(name, _TOKENIZER_FILE))
    except Exception as error:  # the boundary to the package and the network
        raise ConfigError(
            f"tokenizer={name!r}: neither a file nor a folder here, and no {_TOKENIZER_FILE} of that name was found on "
            f"the Hub or in its cache: {type(error).__name__}: {str(error).splitlines()[0]}"
        ) from error


def _load(path: str, content: bytes) -> tokenizers.Tokenizer:
    try:
        import tokenizers  # optional: packing with the byte tokenizer works without
    except ImportError as error:
        raise ConfigError(
            f"tokenizer={path!r} needs the package `tokenizers`. Run `pip install tokenizers`."
        ) from error
    try:
        return tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises plain Exception
        raise DataError(f"{path}: not a tokenizer file: {error}. Give the `tokenizer.json` of a model.") from error
