"""The tokens of parts of files, in the order of the parts, computed here, by processes or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import wait
from types import TracebackType
from typing import Any, Protocol, Self, TypeAlias

import numpy as np
import numpy.typing as npt

from raysharded.data.text.documents import InputFormat, Part, documents
from raysharded.data.text.files import File
from raysharded.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer

Work: TypeAlias = tuple[File, Part]
_AHEAD = 3
"""Parts in progress or waiting to be written, for each process."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The way in which documents become tokens."""

    input_format: InputFormat | None
    text_field: str
    tokenizer: str | None
    """Path of the tokenizer; None: bytes."""
    end_of_document: str | None

    def encoder(self) -> Tokenizer:
        """The tokenizer. Raises as `FileTokenizer`."""
        return ByteTokenizer() if self.tokenizer is None else FileTokenizer(self.tokenizer, self.end_of_document)

    def packed(self, work: Work) -> PartTokens:
        """The tokens of a part in one array."""
        encoder = _encoder(self)
        dtype = np.uint16 if encoder.vocab_size <= 1 << 16 else np.uint32
        number, pieces = 0, [np.empty(0, dtype=dtype)]
        for document in documents(work[0], self.input_format, self.text_field, work[1]):
            pieces += [tokens.astype(dtype) for tokens in encoder.encode(document)]
            pieces.append(np.asarray([encoder.end_of_document], dtype=dtype))
            number += 1
        return PartTokens(number, np.concatenate(pieces), encoder.id)


@dataclass(frozen=True, slots=True)
class PartTokens:
    """The documents of a part."""

    num_documents: int
    tokens: npt.NDArray[Any]
    tokenizer: str
    """Its id."""


class Encoders(Protocol):
    """Processes or tasks that compute the tokens of parts. Use it in a `with`."""

    def encode(self, work: Iterable[Work]) -> Iterator[PartTokens]:
        """The tokens of the parts, in their order. Raises what reading and tokenizing raise."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


class Processes:
    """Processes of this machine."""

    def __init__(self, reading: Reading, number: int) -> None:
        self._reading, self._number = reading, number
        self._pool = ProcessPoolExecutor(number, multiprocessing.get_context("spawn"), initializer=_end_with_parent)

    def encode(self, work: Iterable[Work]) -> Iterator[PartTokens]:
        waiting: deque[Future[PartTokens]] = deque()
        for one in work:
            waiting.append(self._pool.submit(encode, self._reading, one))
            if len(waiting) >= _AHEAD * self._number:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def encode(reading: Reading, work: Work) -> PartTokens:
    """The tokens of a part, computed in this process."""
    return reading.packed(work)


def _end_with_parent() -> None:
    """End this process when its parent has ended: a parent that is killed does not end its pool."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, name="raysharded-parent", daemon=True).start()


@lru_cache(maxsize=1)
def _encoder(reading: Reading) -> Tokenizer:
    """The tokenizer of this process."""
    return reading.encoder()
