"""Samples of token stores, read in blocks of consecutive samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from raysharded.checkpoint.storage import open_storage
from raysharded.data.store.block_cache import BlockCache
from raysharded.data.store.disk_cache import DiskCache, default_folder
from raysharded.data.store.layout import Bytes, Index, from_bytes
from raysharded.data.store.shard_reader import ShardReader
from raysharded.locations import local_path

READ_AHEAD_BLOCKS = 64
"""Blocks that are read before their use; at 50 ms and 8 readers, 400 ms of reading."""
_BLOCKS_AT_ONCE = 64
"""Blocks that are held for samples besides those of the cache, at most."""
_LEAST_READERS = 8  # of remote storage: latency is hidden by numbers
_MOST_UNUSED = 1 / 16  # of the memory of tokens that are given without a copy


@dataclass(frozen=True, slots=True)
class FoundStore:
    """A store and its index."""

    url: str
    index: Index


@dataclass(frozen=True, kw_only=True, slots=True)
class Caches:
    """Bounds and places of the caches for what was read from stores."""

    memory_bytes: int
    disk_folder: str | None
    """None: below the folder of temporary files."""
    disk_bytes: int
    """0: nothing is kept on disk."""

    def disk_for(self, stores: Sequence[FoundStore]) -> DiskCache | None:
        """The cache on disk, if there is something to keep in it: pages of remote stores."""
        if not self.disk_bytes or all(local_path(store.url) is not None for store in stores):
            return None
        return DiskCache(self.disk_folder or default_folder(), self.disk_bytes)


class TokenStream:
    """The stores' tokens one after the other. Any thread may read.

    Raises DataError as `ShardReader` does.
    """

    def __init__(self, stores: Sequence[FoundStore], disk: DiskCache | None = None) -> None:
        """`disk`: for pages of remote stores."""
        self.kind = stores[0].index.kind
        self._shards: list[tuple[ShardReader, int]] = []
        lengths, self.num_readers = [0], 2
        for store in stores:
            storage = open_storage(store.url)
            is_remote = local_path(store.url) is None
            if is_remote:
                self.num_readers = max(self.num_readers, _LEAST_READERS, storage.traits.num_readers)
            reader = ShardReader(storage, store.index, disk if is_remote else None)
            self._shards += [(reader, number) for number in range(len(store.index.shards))]
            lengths += [shard.num_tokens for shard in store.index.shards]
        self._starts = np.cumsum(lengths, dtype=np.int64)

    @property
    def num_tokens(self) -> int:
        return int(self._starts[-1])

    @property
    def readers(self) -> list[ShardReader]:
        """The readers of the stores."""
        return list(dict.fromkeys(reader for reader, _ in self._shards))

    def read(self, start: int, stop: int) -> Bytes:
        """The bytes of these tokens; a request for each shard that has some. Their memory may be a fifteenth larger."""
        size, page_tokens = self.kind.token_bytes, self.kind.page_tokens
        parts, whole = list[Bytes](), 0
        while start < stop:
            shard = int(np.searchsorted(self._starts, start, side="right")) - 1
            within = start - int(self._starts[shard])
            until = min(stop, int(self._starts[shard + 1])) - int(self._starts[shard])
            pages = range(within // page_tokens, -(-until // page_tokens))
            reader, own_number = self._shards[shard]
            data = reader.read(own_number, pages)
            whole += len(data)
            skipped = within - pages.start * page_tokens
            parts.append(data[skipped * size : (skipped + until - within) * size])
            start += until - within
        if len(parts) > 1:
            return np.concatenate(parts)
        return parts[0] if len(parts[0]) >= (1 - _MOST_UNUSED) * whole else parts[0].copy()


class StoreSource:
    """Samples of the stores' stream, read in blocks: by itself samples of `seq_len + 1` tokens, one after the other.

    Any thread may read. Raises DataError as `ShardReader` does.
    """

    def __init__(
        self,
        stores: Sequence[FoundStore],
        *,
        seq_len: int,
        samples_per_block: int,
        cache_bytes: int,
        disk: DiskCache | None,
        range_of: Callable[[int], tuple[int, int]] | None = None,
    ) -> None:
        """`disk`: for pages of remote stores. `range_of`: (first token, end) of a block; None: as of samples."""
        self.stream = TokenStream(stores, disk)
        self._token_bytes = self.stream.kind.token_bytes
        self._seq_len, self._per_block = seq_len, samples_per_block
        self.num_samples = (self.stream.num_tokens - 1) // seq_len
        self._range_of = range_of or self._uniform
        block_bytes = (samples_per_block * seq_len + 1) * self._token_bytes
        self.blocks = BlockCache(
            self._read_block,
            limit_bytes=cache_bytes,
            ahead_bytes=min(cache_bytes // 4, READ_AHEAD_BLOCKS * block_bytes),
            num_readers=self.stream.num_readers,
        )

    @property
    def readers(self) -> list[ShardReader]:
        """The readers of the stores."""
        return self.stream.readers

    def read(self, index: int) -> npt.NDArray[np.int64]:
        """Sample `index`, shape [seq_len + 1]."""
        number, place = divmod(index, self._per_block)
        begin = place * self._seq_len * self._token_bytes
        size = (self._seq_len + 1) * self._token_bytes
        return from_bytes(self.blocks.get(number)[begin : begin + size], self._token_bytes)

    def read_rows(self, indexes: Sequence[int]) -> npt.NDArray[np.int64]:
        """These samples, shape [len(indexes), seq_len + 1]."""
        step, size = self._seq_len * self._token_bytes, (self._seq_len + 1) * self._token_bytes
        rows = np.empty((len(indexes), self._seq_len + 1), dtype=np.int64)
        for first in range(0, len(indexes), _BLOCKS_AT_ONCE):
            places = [divmod(index, self._per_block) for index in indexes[first : first + _BLOCKS_AT_ONCE]]
            blocks = self.blocks.get_all([number for number, _ in places])
            for row, (number, place) in enumerate(places, first):
                data = blocks[number][place * step : place * step + size]
                rows[row] = data.view("<u2") if self._token_bytes == 2 else from_bytes(data, self._token_bytes)
        return rows

    def expect(self, ids: npt.NDArray[np.int64], *, anew: bool) -> None:
        """These samples will be read next, in this order. `anew`: those of before will not."""
        if anew:
            self.blocks.forget()
        numbers, firsts = np.unique(ids // self._per_block, return_index=True)
        self.blocks.expect(numbers[np.argsort(firsts)].tolist())

    def close(self) -> None:
        """End the threads and drop the blocks. Samples are still read, each for itself."""
        self.blocks.close()

    def block(self, number: int) -> Bytes:
        """The bytes of the tokens of a block."""
        return self.blocks.get(number)

    def _read_block(self, number: int) -> Bytes:
        return self.stream.read(*self._range_of(number))

    def _uniform(self, number: int) -> tuple[int, int]:
        """The tokens of all samples of a block, with the last target of the last one."""
        first = number * self._per_block
        return first * self._seq_len, min(first + self._per_block, self.num_samples) * self._seq_len + 1
