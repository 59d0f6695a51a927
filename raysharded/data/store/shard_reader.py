"""Reads of pages of a store's shards: from this node's disk, or by one ranged request to storage, and checked."""

from __future__ import annotations

import threading

import numpy as np

from raysharded.checkpoint.storage import NoSuchKey, Storage
from raysharded.data.store.disk_cache import DiskCache
from raysharded.data.store.layout import HEADER_BYTES, INDEX, Bytes, Index, Shard, parse_header, parse_index, unpaged
from raysharded.display.plain_text import masked
from raysharded.errors import DataError, StorageError
from raysharded.locations import join_url

_in_progress: dict[int, str] = {}
"""Thread -> the read of a shard that it waits for."""


def oldest_read() -> str:
    """Shard and place of the read that this process has waited for the longest; empty if it waits for none."""
    return next(iter(_in_progress.copy().values()), "")


class ShardReader:
    """Reader of the shards of one store. Any number of threads may call it.

    Raises DataError, with the shard and the place in it, for shards that are missing, damaged or replaced, and for
    storage that cannot be read.
    """

    def __init__(self, storage: Storage, index: Index, disk: DiskCache | None = None) -> None:
        """`disk`: keeps what was read from storage."""
        self._storage, self._index, self._disk = storage, index, disk
        self._lock = threading.Lock()
        self.num_requests = self.num_bytes = self.num_disk_hits = 0
        """Requests to storage, the bytes that they gave, and reads that this node's disk answered."""

    def read(self, number: int, pages: range) -> Bytes:
        """The bytes of the tokens of these pages of shard `number`."""
        shard, kind = self._index.shards[number], self._index.kind
        offset, size = shard.byte_range(kind, pages)
        if self._disk is not None and (kept := self._disk.get(shard.id, offset, size)) is not None:
            found = unpaged(kept, pages.start, kind, shard.key)
            if found is not None:
                self._count(disk_hits=1)
                return found
        for _ in range(2):  # a transfer may have been damaged: it is repeated once
            data = self._fetch(shard, offset, size)
            found = unpaged(data, pages.start, kind, shard.key) if len(data) == size else None
            if found is not None:
                if self._disk is not None:
                    self._disk.put(shard.id, offset, data)
                return found
        raise self._explained(shard, offset, size, len(data))

    def _fetch(self, shard: Shard, offset: int, size: int) -> Bytes:
        data, thread = np.empty(size, dtype=np.uint8), threading.get_ident()
        _in_progress[thread] = f"{self._where(shard)}, {size} bytes from byte {offset} on"
        try:
            count = self._storage.read_into(shard.name, offset, [data.data])
        except NoSuchKey as error:
            raise DataError(f"{self._where(shard)}: the shard is missing. Restore it, or correct the path.") from error
        except StorageError as error:
            raise StorageError(
                f"{self._where(shard)}: {size} bytes from byte {offset} on cannot be read: {masked(str(error))}"
            ) from error
        finally:
            _in_progress.pop(thread, None)
        self._count(requests=1, size=count)
        return data[:count]

    def _explained(self, shard: Shard, offset: int, size: int, count: int) -> DataError:
        where = self._where(shard)
        header = self._fetch(shard, 0, HEADER_BYTES).tobytes()
        _, _, shard_id = parse_header(header, where)
        if shard_id != shard.id:
            return DataError(
                f"{where}: the shard was replaced: it has the id {shard_id[:12]}, but {shard.id[:12]} in the index "
                f"{INDEX}. Restore the shard; files must not change while a run uses them."
            )
        if count < size:
            return DataError(
                f"{where}: the shard is truncated: {count} bytes from byte {offset} on, instead of {size}. Copy it "
                "again from its source."
            )
        return DataError(
            f"{where}: {size} bytes from byte {offset} on do not fit their digests: the shard is damaged. Copy it "
            "again from its source."
        )

    def _where(self, shard: Shard) -> str:
        return masked(join_url(self._storage.url, shard.name))

    def _count(self, *, requests: int = 0, size: int = 0, disk_hits: int = 0) -> None:
        with self._lock:
            self.num_requests += requests
            self.num_bytes += size
            self.num_disk_hits += disk_hits


def read_index(storage: Storage) -> Index | None:
    """The index of the store in this folder; None if there is none. Raises DataError."""
    where = masked(join_url(storage.url, INDEX))
    try:
        data = storage.read(INDEX)
    except NoSuchKey:
        return None
    except StorageError as error:
        raise StorageError(f"{where}: cannot be read: {masked(str(error))}") from error
    return parse_index(data, where)
