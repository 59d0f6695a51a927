"""Sources of samples: any object with a length and an index, token stores, and packed token files."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from raysharded.data.store.find import check_shards, find_stores
from raysharded.data.store.store_source import READ_AHEAD_BLOCKS, Caches, FoundStore, StoreSource
from raysharded.data.text.files import File, PathLike, as_paths, find_files, readable_system, require_files
from raysharded.data.text.token_file import TokenFile, TokenHeader
from raysharded.data.text.token_reader import TokenReader
from raysharded.display.plain_text import masked
from raysharded.display.quantities import count
from raysharded.errors import ConfigError, DataError
from raysharded.locations import local_path

_OPEN_THREADS = 16
_BLOCK_TOKENS = 1 << 16
_PART = re.compile(r"part-([0-9]{5,})\.parquet")
"""Pattern of `pack`'s file names."""


@runtime_checkable
class Dataset(Protocol):
    """A map-style dataset. It must be picklable, and give the same sample for the same index every time.

    raysharded reads it from one thread at a time, in a process beside each worker, or in the training thread.

    If consecutive samples are cheaper to read together, it has an attribute `samples_per_block`, their number, a power
    of two. A run then has the order of samples that reads such blocks (docs/determinism.md).
    """

    def __len__(self) -> int:
        """The number of samples; constant."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """The sample: arrays, tensors, numbers, or tuples, lists and dicts of them, as the task's loss takes it."""
        ...


@dataclass(frozen=True, slots=True)
class _Index:
    """Contents of the stores' indexes, or of all files' footers: enough to find any token."""

    stores: tuple[FoundStore, ...]
    files: tuple[File, ...]
    """Token files, if there are no stores."""
    starts: npt.NDArray[np.int64]
    """File f has the tokens from `starts[f]` to `starts[f + 1]` of the whole stream; [F + 1]."""
    vocab_size: int
    tokenizer: str
    end_of_document: int | None
    """None: nothing names it."""


class TokenDataset:
    """Samples of `seq_len + 1` consecutive tokens from token stores, or from packed token files.

    Sample i is `stream[i * seq_len : i * seq_len + seq_len + 1]`, an int64 array. `stream` is the tokens of all stores
    in their order, or of all files in the order of their names. Inputs are `sample[:-1]` and targets `sample[1:]`;
    every token is a target once. Any thread may read it.

    Data are opened on first use: a copy that is pickled into a worker opens them itself. If the original had read the
    indexes or footers, the copy knows them, and either finds the same data or raises an error.
    """

    def __init__(
        self,
        paths: PathLike | Sequence[PathLike],
        *,
        seq_len: int,
        cache_bytes: int = 256 << 20,
        disk_cache: PathLike | None = None,
        disk_cache_bytes: int = 8 << 30,
    ) -> None:
        """`paths`: folders of token stores, local or at any URL that checkpoints can be written to; or token files,
        folders of them or globs, local or at any fsspec URL.

        `cache_bytes`: memory of each process for blocks that were read. `disk_cache`: a folder of this node for what
        was read from remote stores, by default below the folder of temporary files. The processes of a node share it,
        and it survives them. `disk_cache_bytes`: its limit; 0: none is kept.

        In a folder of token files that `pack` filled, no file between the first and the last may be missing. Raises
        ConfigError; reads no file.
        """
        require_whole("TokenDataset", "seq_len", seq_len, 1)
        self.paths = as_paths(paths, "TokenDataset.paths")
        self.seq_len = seq_len
        self._caches = caches_of("TokenDataset", cache_bytes, disk_cache, disk_cache_bytes)
        self._index: _Index | None = None
        self._reader: TokenReader | StoreSource | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"TokenDataset({[masked(path) for path in self.paths]!r}, seq_len={self.seq_len})"

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all stores or files together."""
        return int(self._opened().starts[-1])

    @property
    def vocab_size(self) -> int:
        """One more than the largest token that may occur."""
        return self._opened().vocab_size

    @property
    def tokenizer(self) -> str:
        """Id of the tokenizer: "bytes", or "sha256:" and the digest of its file."""
        return self._opened().tokenizer

    @property
    def end_of_document(self) -> int | None:
        """The token that ends documents, if a store names it."""
        return self._opened().end_of_document

    @property
    def stores_digest(self) -> str:
        """Digest of the contents of all stores; empty for token files, whose contents have no digests.

        A run keeps it: other stores are refused, also those with as many tokens.
        """
        digests = [store.index.digest for store in self._opened().stores]
        return blake3("\n".join(digests).encode()).hexdigest() if digests else ""

    @property
    def num_files(self) -> int:
        """Number of shards or token files."""
        return len(self._opened().starts) - 1

    @property
    def samples_per_block(self) -> int:
        """Samples that are cheap to read together: the largest power of two with at most 65,536 tokens, or 1."""
        return 1 << max(0, (_BLOCK_TOKENS // self.seq_len).bit_length() - 1)

    def validate(self) -> None:
        """Read and check the indexes of stores or the footers of files now, and use their contents from now on.

        Raises DataError with the first shard or file that is missing, truncated, of another format or schema, or does
        not fit the others. Too few tokens for one sample raise it too. Of shards it checks names and sizes; their
        contents are checked when they are read.
        """
        index = _read_index(self.paths, self.seq_len)
        check_shards(index.stores)
        with self._lock:
            self._index, self._reader = index, None

    def require_local_files(self) -> None:
        """Raise DataError if a path of this machine has neither a token store nor token files; URLs are ignored."""
        local = [path for path in self.paths if local_path(path) is not None]
        if not find_stores(local):
            require_files(local, suffix=".parquet")

    def __len__(self) -> int:
        return (self.num_tokens - 1) // self.seq_len

    def __getitem__(self, index: int, /) -> npt.NDArray[np.int64]:
        """Sample `index`, shape [seq_len + 1]. Raises IndexError outside [0, len), DataError for damaged files."""
        source = self._reader
        if isinstance(source, StoreSource) and 0 <= index < source.num_samples:
            return source.read(int(index))
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self!r}")
        opened = self._opened()
        reader = self._open_reader(opened)
        if isinstance(reader, StoreSource):
            return reader.read(int(index))
        starts = opened.starts
        begin = int(index) * self.seq_len
        end = begin + self.seq_len + 1
        sample = np.empty(self.seq_len + 1, dtype=np.int64)
        position = begin
        while position < end:
            number = int(np.searchsorted(starts, position, side="right")) - 1
            stop = min(end, int(starts[number + 1]))
            part = sample[position - begin : stop - begin]
            reader.read(number, position - int(starts[number]), part)
            position = stop
        return sample

    def read_rows(self, indexes: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """These samples as the rows of one array; None if each is to be read by itself."""
        source = self._reader
        if not isinstance(source, StoreSource) or type(self) is not TokenDataset:
            return None
        if not all(0 <= index < source.num_samples for index in indexes):
            return None
        return source.read_rows(indexes)

    @property
    def num_read_ahead(self) -> int:
        """Number of samples that `read_ahead` is worth; 0: it does nothing."""
        return READ_AHEAD_BLOCKS * self.samples_per_block if self._opened().stores else 0

    def read_ahead(self, ids: npt.NDArray[np.int64], *, anew: bool = False) -> None:
        """Begin to read these samples, which will be used next, in this order; within the cache's bounds.

        `anew`: what was announced before will not be used.
        """
        reader = self._open_reader(self._opened())
        if isinstance(reader, StoreSource):
            reader.expect(ids, anew=anew)

    def close(self) -> None:
        """End the threads and drop the blocks in memory. A later read opens the data again. Does not wait."""
        with self._lock:
            reader, self._reader = self._reader, None
        if isinstance(reader, StoreSource):
            reader.close()

    def _opened(self) -> _Index:
        with self._lock:
            if self._index is None:
                self._index = _read_index(self.paths, self.seq_len)
            return self._index

    def _open_reader(self, index: _Index) -> TokenReader | StoreSource:
        with self._lock:
            if self._reader is None:
                self._reader = self._new_reader(index)
            return self._reader

    def _new_reader(self, index: _Index) -> TokenReader | StoreSource:
        caches = self._caches
        if not index.stores:
            return TokenReader(index.files, np.diff(index.starts), caches.memory_bytes)
        return StoreSource(
            index.stores,
            seq_len=self.seq_len,
            samples_per_block=self.samples_per_block,
            cache_bytes=caches.memory_bytes,
            disk=caches.disk_for(index.stores),
        )

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_reader", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reader=None, _lock=threading.Lock())


def caches_of(owner: str, memory_bytes: int, disk: PathLike | None, disk_bytes: int) -> Caches:
    """The caches from a dataset's arguments. Raises ConfigError."""
    require_whole(owner, "cache_bytes", memory_bytes, 1)
    require_whole(owner, "disk_cache_bytes", disk_bytes, 0)
    folder = None if disk is None else as_paths(disk, f"{owner}.disk_cache")[0]
    return Caches(memory_bytes=memory_bytes, disk_folder=folder, disk_bytes=disk_bytes)


def require_whole(owner: str, name: str, value: object, least: int) -> None:
    """Raise ConfigError unless an argument is a whole number of at least this."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{owner}.{name}={value!r}: give a whole number of {least} or more.")


def _read_index(paths: tuple[str, ...], seq_len: int) -> _Index:
    stores = find_stores(paths)
    if not stores:
        return _read_footers(paths, seq_len)
    lengths = [shard.num_tokens for store in stores for shard in store.index.shards]
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    _require_one_sample([store.url for store in stores], int(starts[-1]), len(lengths), seq_len)
    kind = stores[0].index.kind
    return _Index(stores, (), starts, kind.vocab_size, kind.tokenizer, kind.end_of_document)


def _read_footers(paths: tuple[str, ...], seq_len: int) -> _Index:
    found = {path: find_files(path, suffix=".parquet") for path in paths}
    for path, inside in found.items():
        _require_no_gap(path, inside)
    files = sorted({file.name: file for inside in found.values() for file in inside}.values())
    with ThreadPoolExecutor(max_workers=min(_OPEN_THREADS, len(files))) as threads:
        headers = list(threads.map(_read_header, files))
    for file, header in zip(files, headers, strict=True):
        _require_same("tokenizer", files[0], headers[0].tokenizer, file, header.tokenizer)
        _require_same("vocab_size", files[0], headers[0].vocab_size, file, header.vocab_size)
    starts = np.cumsum([0, *(header.num_tokens for header in headers)], dtype=np.int64)
    _require_one_sample([file.name for file in files], int(starts[-1]), len(files), seq_len)
    return _Index((), tuple(files), starts, headers[0].vocab_size, headers[0].tokenizer, None)


def _require_one_sample(names: Sequence[str], num_tokens: int, num_files: int, seq_len: int) -> None:
    if num_tokens < seq_len + 1:
        raise DataError(
            f"{', '.join(names[:3])}: {count(num_tokens, 'token')} in {count(num_files, 'file')} are too few for one "
            f"sample of seq_len + 1 = {seq_len + 1} tokens. Add data, or take a smaller seq_len."
        )


def _require_no_gap(path: str, files: Sequence[File]) -> None:
    """Raise DataError if a folder lacks a file that `pack` wrote there. A list or a glob may name only some."""
    folder = f"{readable_system(path)[1].rstrip('/')}/"
    matches = [_PART.fullmatch(file.path.removeprefix(folder)) for file in files]
    numbers = sorted(int(match[1]) for match in matches if match)
    if len(numbers) < len(files) or numbers[-1] - numbers[0] + 1 == len(numbers):
        return
    missing = next(number for number in range(numbers[0], numbers[-1]) if number not in numbers)
    raise DataError(
        f"{path}: part-{missing:05d}.parquet is missing, but there are files before and after it. Restore it; or name "
        "the files that are to be used, in a list or with a glob."
    )


def _read_header(file: File) -> TokenHeader:
    opened = TokenFile(file)
    try:
        return opened.header
    finally:
        opened.close()


def _require_same(what: str, first: File, expected: object, file: File, value: object) -> None:
    if value != expected:
        raise DataError(
            f"{file.name}: its {what} is {value!r}, but that of {first.name} is {expected!r}. "
            "Pack all files with one tokenizer, or leave the odd ones out of the paths."
        )
