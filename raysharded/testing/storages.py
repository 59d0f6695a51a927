"""Test storages around real ones: one counts, one fails or stops at a chosen operation; and a reference save.

`save_rows` writes NumPy arrays as `num_writers` workers would, each its rows: the smallest complete user of the writing
side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from raysharded.checkpoint.claims import Claims, commit_claimed
from raysharded.checkpoint.format.manifest import FileRecord, Manifest, TensorInfo
from raysharded.checkpoint.format.paths import save_prefix
from raysharded.checkpoint.storage import BytesLike, Keys, Storage, Traits, Unfinished
from raysharded.checkpoint.storage.optional_operations import CanSwap, list_folders, list_links, remove_folders, swap
from raysharded.checkpoint.writer import ShardTensor, commit, write_shard
from raysharded.errors import StorageError
from raysharded.locations import join_url

T = TypeVar("T")

_numbering = threading.Lock()


@dataclass(slots=True)
class StorageAround:
    """A storage that passes each operation on, by `_do`. Deletions are operations of one key each."""

    inner: Storage

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    @property
    def retries(self) -> int:
        return self.inner.retries

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        self._do("write", lambda: self.inner.write(key, parts))

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        return self._do("read", lambda: self.inner.read(key, offset, size))

    def read_into(self, key: str, offset: int, outs: Sequence[memoryview]) -> int:
        return self._do("read", lambda: self.inner.read_into(key, offset, outs))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self._do("put_if_absent", lambda: self.inner.put_if_absent(key, data))

    def swaps(self) -> bool:
        return isinstance(self.inner, CanSwap) and self.inner.swaps()

    def swap(self, key: str, expected: bytes, data: bytes) -> bool:
        return self._do("swap", lambda: swap(self.inner, key, expected, data))

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._do("delete", lambda key=key: self.inner.delete([key]))  # type: ignore[misc]  # bound now

    def size(self, key: str) -> int:
        return self._do("size", lambda: self.inner.size(key))

    def list(self, prefix: str = "") -> Keys:
        return self._do("list", lambda: self.inner.list(prefix))

    def folders(self) -> Keys:
        return self._do("list", lambda: list_folders(self.inner))

    def links(self, prefix: str = "") -> Keys:
        return self._do("list", lambda: list_links(self.inner, prefix))

    def remove_folders(self, prefix: str) -> Keys:
        return self._do("delete", lambda: remove_folders(self.inner, prefix))

    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        return self._do("unfinished", lambda: self.inner.unfinished(prefix))

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        self._do("discard", lambda: self.inner.discard(unfinished))

    def _do(self, operation: str, act: Callable[[], T]) -> T:
        """Carry out an operation, of that name."""
        return act()


@dataclass(slots=True)
class CountingStorage(StorageAround):
    """Counts reads. `reads` has (key, offset, bytes returned)."""

    reads: list[tuple[str, int, int]] = field(default_factory=list)

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        data = self.inner.read(key, offset, size)
        self.reads.append((key, offset, len(data)))
        return data

    def read_into(self, key: str, offset: int, outs: Sequence[memoryview]) -> int:
        count = self.inner.read_into(key, offset, outs)
        self.reads.append((key, offset, count))
        return count

    def delete(self, keys: Iterable[str]) -> None:
        self.inner.delete(keys)


@dataclass(slots=True)
class FailingStorage(StorageAround):
    """Fails at operation number `fail_at` (from 0 on) and at all later ones, like a storage that becomes unavailable.

    With `took_effect` the failing operation is done first and only its reply is lost. Otherwise a failing `write`
    leaves half of its bytes under the key, as storages without a rename may; with `untouched` it leaves none. `fired`
    is set when the failure occurs.
    """

    fail_at: int
    took_effect: bool = False
    untouched: bool = False
    operations: int = 0
    fired: bool = False

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        data = b"".join(parts)
        self._do("write", lambda: self.inner.write(key, parts), lambda: self.inner.write(key, [data[: len(data) // 2]]))

    def _do(self, operation: str, act: Callable[[], T], half: Callable[[], object] = lambda: None) -> T:
        with _numbering:  # some operations run concurrently
            number, self.operations = self.operations, self.operations + 1
        if number < self.fail_at:
            return act()
        if number == self.fail_at:
            _ = act() if self.took_effect else None if self.untouched else half()
        self.fired = True
        raise StorageError(f"{operation} under {self.url} failed: this storage was set to fail.")


def rows_of(num_rows: int, writer: int, num_writers: int) -> tuple[int, int]:
    """The rows [first, last) of one of `num_writers`: chunks of ceil(n / W), with empty tails."""
    chunk = -(-num_rows // num_writers)
    return min(writer * chunk, num_rows), min((writer + 1) * chunk, num_rows)


def save_rows(
    storage: Storage,
    arrays: Mapping[str, NDArray[Any]],
    *,
    step: int,
    save_id: str,
    num_writers: int,
    metadata: Mapping[str, Any] | None = None,
    chunk_size_bytes: int | None = None,
    generation: int = 1,
    claims: Claims | None = None,
    writer: str = "driver",
) -> str:
    """Write and commit a save, with rows distributed over the writers and 0-dim arrays written by the first; returns
    its prefix.

    A run's save is committed only if it is also claimed: pass the run's `claims`, and their writer as `writer`.
    """
    prefix = save_prefix(step, save_id)
    files: list[FileRecord] = []
    for number in range(num_writers):
        pieces = [piece for name, array in arrays.items() for piece in _piece(name, array, number, num_writers)]
        files += write_shard(
            storage, prefix, writer=f"w{number:04d}", tensors=pieces, chunk_size_bytes=chunk_size_bytes
        )
    manifest = Manifest(
        run="run",
        step=step,
        generation=generation,
        save_id=save_id,
        writer=writer,
        created_at=0.0,
        tensors={name: TensorInfo(dtype=str(array.dtype), shape=array.shape) for name, array in arrays.items()},
        files=tuple(files),
        metadata=metadata or {},
    )
    if claims is not None:
        commit_claimed(storage, claims, prefix, manifest)
    elif commit(storage, prefix, manifest) is None:
        raise StorageError(f"{join_url(storage.url, prefix)} was committed by another writer.")
    return prefix


def _piece(name: str, array: NDArray[Any], number: int, num_writers: int) -> list[ShardTensor]:
    first, last = rows_of(array.shape[0], number, num_writers) if array.ndim else (0, 1 if number == 0 else 0)
    if first == last:
        return []
    rows = array[first:last] if array.ndim else array
    return [
        ShardTensor(
            name=name,
            dtype=str(array.dtype),
            shape=array.shape,
            offsets=(first, *[0] * (array.ndim - 1)) if array.ndim else (),
            sizes=rows.shape,
            data=np.frombuffer(np.ascontiguousarray(rows).tobytes(), np.uint8),
        )
    ]
