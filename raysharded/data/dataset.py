"""Sources of samples: any object with a length and an index, or packed token files."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from raysharded.data.text.files import File, PathLike, as_paths, file_system, find_files
from raysharded.data.text.token_file import TokenFile, TokenHeader
from raysharded.data.text.token_reader import TokenReader
from raysharded.display.quantities import count
from raysharded.errors import ConfigError, DataError

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
    """Contents of all files' footers: enough to find any token."""

    files: tuple[File, ...]
    starts: npt.NDArray[np.int64]
    """File f has the tokens from `starts[f]` to `starts[f + 1]` of the whole stream; [F + 1]."""
    vocab_size: int


class TokenDataset:
    """Samples of `seq_len + 1` consecutive tokens from packed token files (see `token_file` for the format).

    Sample i is `stream[i * seq_len : i * seq_len + seq_len + 1]`, an int64 array. `stream` is the tokens of all files
    in the order of their names. Inputs are `sample[:-1]` and targets `sample[1:]`; every token is a target once. Any
    thread may read it.

    Files are opened on first use: a copy that is pickled into a worker opens its files itself. If the original had read
    the footers, the copy knows them, and either finds the same data or raises an error.
    """

    def __init__(self, paths: PathLike | Sequence[PathLike], *, seq_len: int, cache_bytes: int = 64 << 20) -> None:
        """`paths`: files, folders or globs; local, or any fsspec URL. `cache_bytes`: memory for decoded row groups.

        In a folder that `pack` filled, no file between the first and the last may be missing. Raises ConfigError; reads
        no file.
        """
        for name, value in (("seq_len", seq_len), ("cache_bytes", cache_bytes)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"TokenDataset.{name}={value!r}: give a whole number of 1 or more.")
        self.paths = as_paths(paths, "TokenDataset.paths")
        self.seq_len = seq_len
        self._cache_bytes = cache_bytes
        self._index: _Index | None = None
        self._reader: TokenReader | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"TokenDataset({list(self.paths)!r}, seq_len={self.seq_len})"

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all files together."""
        return int(self._opened().starts[-1])

    @property
    def vocab_size(self) -> int:
        """One more than the largest token that may occur."""
        return self._opened().vocab_size

    @property
    def samples_per_block(self) -> int:
        """Samples that are cheap to read together: the least power of two with at least 65,536 tokens."""
        return 1 << max(0, (_BLOCK_TOKENS - 1) // self.seq_len).bit_length()

    def validate(self) -> None:
        """Read and check the footers of all files now, and use their contents from now on.

        Raises DataError with the first file that is missing, truncated, of another format or schema, or does not fit
        the others. Too few tokens for one sample raise it too.
        """
        index = _read_index(self.paths, self.seq_len)
        with self._lock:
            self._index, self._reader = index, None

    def __len__(self) -> int:
        return (self.num_tokens - 1) // self.seq_len

    def __getitem__(self, index: int, /) -> npt.NDArray[np.int64]:
        """Sample `index`, shape [seq_len + 1]. Raises IndexError outside [0, len), DataError for damaged files."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)} in {self!r}")
        files, starts = self._opened().files, self._opened().starts
        begin = int(index) * self.seq_len
        end = begin + self.seq_len + 1
        sample = np.empty(self.seq_len + 1, dtype=np.int64)
        position = begin
        while position < end:
            number = int(np.searchsorted(starts, position, side="right")) - 1
            stop = min(end, int(starts[number + 1]))
            part = sample[position - begin : stop - begin]
            self._open_reader(files, starts).read(number, position - int(starts[number]), part)
            position = stop
        return sample

    def _opened(self) -> _Index:
        with self._lock:
            if self._index is None:
                self._index = _read_index(self.paths, self.seq_len)
            return self._index

    def _open_reader(self, files: tuple[File, ...], starts: npt.NDArray[np.int64]) -> TokenReader:
        with self._lock:
            if self._reader is None:
                self._reader = TokenReader(files, np.diff(starts), self._cache_bytes)
            return self._reader

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_reader", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _reader=None, _lock=threading.Lock())


def _read_index(paths: tuple[str, ...], seq_len: int) -> _Index:
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
    if starts[-1] < seq_len + 1:
        raise DataError(
            f"{', '.join(file.name for file in files[:3])}: {count(int(starts[-1]), 'token')} in "
            f"{count(len(files), 'file')} are too few for one sample of seq_len + 1 = {seq_len + 1} tokens. Add data, "
            "or take a smaller seq_len."
        )
    return _Index(tuple(files), starts, headers[0].vocab_size)


def _require_no_gap(path: str, files: Sequence[File]) -> None:
    """Raise DataError if a folder lacks a file that `pack` wrote there. A list or a glob may name only some."""
    folder = f"{file_system(path)[1].rstrip('/')}/"
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
