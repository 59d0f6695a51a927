"""Writing of token stores: a shard at a time, the index last."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from raysharded.checkpoint.storage import Storage, open_storage
from raysharded.data.store.layout import INDEX, Index, Kind, Shard, header_of, paged, to_bytes
from raysharded.data.store.progress import NAME
from raysharded.data.store.shard_reader import read_index
from raysharded.display.plain_text import masked
from raysharded.display.quantities import count
from raysharded.errors import ConfigError, DataError, StorageError, UnreadableData

_PIECE_PAGES = 512


def _is_wrong_input(kind: type[BaseException]) -> bool:
    return issubclass(kind, ConfigError | DataError) and not issubclass(kind, UnreadableData)


class StoreWriter:
    """Writer of a token stream as a store in a folder without one.

    A shard is spooled into a temporary file of this machine and then written. It is named after its contents, so that
    writers of the same folder never replace each other's shards with others; the index decides who wrote the store. A
    writer that fails removes its shards.

    Raises ConfigError if the folder has a store, or gets one meanwhile, StorageError if it cannot be written, DataError
    for a token outside of the vocabulary.
    """

    def __init__(
        self,
        folder: str,
        kind: Kind,
        tokens_per_shard: int,
        *,
        done: Sequence[Shard] = (),
        on_shard: Callable[[Sequence[Shard]], None] | None = None,
    ) -> None:
        """`done`: shards with which the stream begins, written before. `on_shard`: called with all shards so far when
        one more is written; then shards stay after an error of storage and an interrupt."""
        self._folder, self._kind = folder, kind
        self._storage: Storage = open_storage(folder)
        self._tokens_per_shard = tokens_per_shard
        self._shards: list[Shard] = list(done)
        self._on_shard = on_shard
        self._spool: Any = None  # a temporary file
        self._hasher = kind.hasher()
        self._spooled = 0
        self._missing_folders: Sequence[str] = ()
        """Folders that the first shard makes, innermost first."""
        self.num_tokens = sum(shard.num_tokens for shard in done)
        self.num_bytes = sum(shard.size_bytes(kind) for shard in done)

    @property
    def num_parts(self) -> int:
        """Number of shards so far."""
        return len(self._shards)

    def write(self, tokens: npt.NDArray[Any]) -> None:
        """Append to the stream."""
        if len(tokens) and int(tokens.max()) >= self._kind.vocab_size:
            raise DataError(
                f"{self._folder}: token {int(tokens.max())} is outside of the vocabulary of {self._kind.vocab_size}."
            )
        while len(tokens):
            some, tokens = np.split(tokens, [min(len(tokens), self._tokens_per_shard - self._spooled)])
            if self._spool is None:
                self._spool = tempfile.TemporaryFile(prefix="raysharded-shard-")  # noqa: SIM115 - closed in _end_shard
            data = to_bytes(some, self._kind.token_bytes)
            with self._spooling():
                self._spool.write(data.data)
            self._hasher.update(data.data)
            self._spooled += len(some)
            self.num_tokens += len(some)
            if self._spooled == self._tokens_per_shard:
                self._end_shard()

    def __enter__(self) -> Self:
        self._missing_folders = getattr(self._storage, "missing_folders", list)()
        if not self._missing_folders:
            there = self._storage.list("")
            old = [key for key in there if key == INDEX or ("/" not in key and key.endswith(".parquet"))]
            what = "a token store" if INDEX in old else count(len(old), "Parquet file")
            if old:
                raise ConfigError(f"pack: {masked(self._folder)} already has {what}. Empty it, or choose another.")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                if self._spooled:
                    self._end_shard()
                self._commit()
        except BaseException as raised:
            self._give_up(type(raised))
            raise
        finally:
            if self._spool is not None:
                self._spool.close()
        if kind is not None:
            self._give_up(kind)

    def _end_shard(self) -> None:
        shard_id = self._hasher.hexdigest()
        shard = Shard(
            name=f"shard-{len(self._shards):05d}-{shard_id[:12]}.tokens", num_tokens=self._spooled, id=shard_id
        )
        self._shards.append(shard)
        self._storage.write(shard.name, _Contents(self._spool, shard, self._kind))
        self.num_bytes += shard.size_bytes(self._kind)
        self._spool.close()
        self._spool, self._spooled, self._hasher = None, 0, self._kind.hasher()
        if self._on_shard is not None:
            self._on_shard(self._shards)

    def _commit(self) -> None:
        there = set(self._storage.list(""))
        gone = [shard.name for shard in self._shards if shard.name not in there]
        if gone:  # another writer of the same tokens was interrupted: its shards had the same names
            raise ConfigError(
                f"pack: {masked(self._folder)}: someone else who wrote the same tokens there has removed {gone[0]}. "
                "Write them again."
            )
        data = Index(kind=self._kind, shards=tuple(self._shards)).to_json()
        if not self._storage.put_if_absent(INDEX, data) and self._storage.read(INDEX) != data:
            raise ConfigError(
                f"pack: {masked(self._folder)} got a token store from someone else meanwhile. Choose another folder."
            )
        self.num_bytes += len(data)

    def _give_up(self, kind: type[BaseException]) -> None:
        """Discard the shards, unless a later call may continue them: after wrong input none can."""
        if self._on_shard is None or not self._shards or _is_wrong_input(kind):
            self._discard()

    def _discard(self) -> None:
        """Remove this writer's shards, but not those of a store that is there. The error that led here counts."""
        with contextlib.suppress(Exception):
            found = read_index(self._storage)
            others = set() if found is None else {shard.name for shard in found.shards}
            left = [shard.name for shard in self._shards if shard.name not in others]
            self._storage.delete(left if self._on_shard is None else [*left, NAME])
        with contextlib.suppress(OSError):  # others may use them by now
            for folder in self._missing_folders:
                os.rmdir(folder)

    @contextlib.contextmanager
    def _spooling(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(
                f"{tempfile.gettempdir()}: a shard cannot be prepared there: {error}. It needs up to "
                f"{self._tokens_per_shard * self._kind.token_bytes} bytes: free some space, or set TMPDIR."
            ) from error


class _Contents:
    """The bytes of a shard, from its spooled tokens; each iteration begins at the start."""

    def __init__(self, spool: Any, shard: Shard, kind: Kind) -> None:
        self._spool, self._shard, self._kind = spool, shard, kind

    def __iter__(self) -> Iterator[bytes | memoryview]:
        yield header_of(self._kind, self._shard.num_tokens, self._shard.id)
        self._spool.flush()
        self._spool.seek(0)
        size = _PIECE_PAGES * self._kind.page_tokens * self._kind.token_bytes
        first_page = 0
        while data := self._spool.read(size):
            tokens = np.frombuffer(data, dtype=np.uint8)
            yield b"".join(paged(tokens, first_page, self._kind, self._shard.key))
            first_page += _PIECE_PAGES
