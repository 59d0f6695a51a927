"""Any reader gets its bytes at any size, reads few others, and never gets a wrong one."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from raysharded.checkpoint import (
    Checkpoint,
    Manifest,
    ShardTensor,
    Storage,
    TensorInfo,
    byte_ranges as pieces_module,
    commit,
    open_checkpoint,
    open_storage,
    save_prefix,
    write_shard,
)
from raysharded.checkpoint.claims import Claims
from raysharded.checkpoint.reader import Request
from raysharded.checkpoint.retention.catalog import list_checkpoints, newest_complete
from raysharded.checkpoint.retention.gc import prune
from raysharded.checkpoint.retention.policy import Best, Keep
from raysharded.checkpoint.storage import storage_error
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, StorageError
from raysharded.testing.storages import CountingStorage, StorageAround, rows_of, save_rows
from tests.cases import examples

Arrays = dict[str, NDArray[Any]]


def _state(rows: int = 13, seed: int = 0) -> Arrays:
    random = np.random.default_rng(seed)
    return {
        "layer.weight": random.standard_normal((rows, 5)).astype(np.float32),
        "layer.bias": random.standard_normal(rows).astype(np.float64),
        "ids": random.integers(0, 100, (3, 2, 4), dtype=np.int16),
        "none": np.zeros((0, 4), np.float32),
        "step": np.array(rows, np.int64),
    }


def _memory() -> Storage:
    return open_storage(f"memory://{uuid.uuid4().hex}/run")


def _load_rows(checkpoint: Checkpoint, arrays: Arrays, num_readers: int) -> Arrays:
    """The data of `num_readers` workers, each in one flat buffer, put together again."""
    loaded: dict[str, list[bytes]] = {name: [] for name in arrays}
    for reader in range(num_readers):
        flat, at = np.zeros(sum(array.nbytes for array in arrays.values()), np.uint8), 0
        requests: list[Request] = []
        taken: list[tuple[str, int, int]] = []
        for name, array in arrays.items():
            offsets, sizes = [0] * array.ndim, list(array.shape)
            if array.ndim:
                first, last = rows_of(array.shape[0], reader, num_readers)
                offsets[0], sizes[0] = first, last - first
            size = int(np.prod(sizes, dtype=int)) * array.itemsize
            requests.append((name, offsets, sizes, flat[at : at + size]))
            taken.append((name, at, at + size))
            at += size
        checkpoint.read_many(requests)
        for name, start, stop in taken:
            if arrays[name].ndim or reader == 0:
                loaded[name].append(flat[start:stop].tobytes())
    return {
        name: np.frombuffer(b"".join(loaded[name]), array.dtype).reshape(array.shape) for name, array in arrays.items()
    }


def _assert_same(found: Arrays, expected: Arrays) -> None:
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("kind", ["local", "memory"])
@pytest.mark.parametrize("num_writers", [1, 2, 3, 5, 7])
def test_what_any_number_wrote_any_number_reads(tmp_path: Path, kind: str, num_writers: int) -> None:
    storage = open_storage(str(tmp_path)) if kind == "local" else _memory()
    arrays = _state()
    prefix = save_rows(
        storage, arrays, step=3, save_id="a", num_writers=num_writers, metadata={"seed": 1}, chunk_size_bytes=64
    )
    checkpoint = open_checkpoint(storage, prefix)
    assert checkpoint.step == 3
    assert checkpoint.manifest.metadata == {"seed": 1}
    assert checkpoint.tensors["layer.weight"] == TensorInfo(dtype="float32", shape=(13, 5))
    for num_readers in (1, 2, 3, 5, 7):
        _assert_same(_load_rows(checkpoint, arrays, num_readers), arrays)
    checkpoint.verify()


@settings(max_examples=examples(20, of=60), deadline=None)
@given(
    rows=st.integers(0, 40),
    num_writers=st.sampled_from([1, 2, 3, 5, 7, 16]),
    num_readers=st.sampled_from([1, 2, 3, 5, 7, 16]),
    chunk=st.integers(1, 700),
    seed=st.integers(0, 99),
)
def test_resharding_through_storage_keeps_every_bit(
    rows: int, num_writers: int, num_readers: int, chunk: int, seed: int
) -> None:
    storage, arrays = _memory(), _state(rows, seed)
    prefix = save_rows(storage, arrays, step=0, save_id="a", num_writers=num_writers, chunk_size_bytes=chunk)
    _assert_same(_load_rows(open_checkpoint(storage, prefix), arrays, num_readers), arrays)


@settings(max_examples=examples(30, of=100), deadline=None)
@given(data=st.data())
def test_any_box_is_read_from_any_grid_of_boxes(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    array = np.arange(int(np.prod(shape)), dtype=np.int32).reshape(shape)
    cuts = [sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    storage, prefix = _memory(), save_prefix(1, "a")
    files = []
    for number, corner in enumerate(itertools.product(*(list(itertools.pairwise(cut)) for cut in cuts))):
        box = array[tuple(slice(a, b) for a, b in corner)]
        piece = ShardTensor(
            name="t",
            dtype="int32",
            shape=shape,
            offsets=tuple(a for a, _ in corner),
            sizes=box.shape,
            data=np.frombuffer(box.tobytes(), np.uint8),
        )
        files += write_shard(storage, prefix, writer=f"w{number}", tensors=[piece], chunk_size_bytes=32)
    manifest = Manifest(
        run="r",
        step=1,
        generation=0,
        save_id="a",
        writer="w",
        created_at=0.0,
        tensors={"t": TensorInfo(dtype="int32", shape=shape)},
        files=tuple(files),
    )
    assert commit(storage, prefix, manifest)
    checkpoint = open_checkpoint(storage, prefix)
    stage_bytes = data.draw(st.sampled_from([4, 16, 4 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "STAGE_BYTES", stage_bytes)  # small slabs on small tensors
        for _ in range(3):
            begin = [data.draw(st.integers(0, n)) for n in shape]
            sizes = [data.draw(st.integers(0, n - b)) for n, b in zip(shape, begin, strict=True)]
            wanted = array[tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))]
            assert checkpoint.read("t", begin, sizes).tobytes() == wanted.tobytes()


def test_each_worker_reads_little_more_than_its_share_of_large_tensors(tmp_path: Path) -> None:
    arrays: Arrays = {f"w{i}": np.random.default_rng(i).integers(0, 255, (1000, 1024), np.uint8) for i in range(8)}
    storage = CountingStorage(open_storage(str(tmp_path)))
    prefix = save_rows(storage, arrays, step=1, save_id="a", num_writers=3, chunk_size_bytes=16 << 10)
    checkpoint = open_checkpoint(storage, prefix)
    storage.reads.clear()
    _assert_same(_load_rows(checkpoint, arrays, 5), arrays)
    read, wanted = sum(size for _, _, size in storage.reads), sum(array.nbytes for array in arrays.values())
    assert 1.0 <= read / wanted < 1.15


def test_no_chunk_is_read_twice_for_neighbouring_tensors(tmp_path: Path) -> None:
    arrays: Arrays = {f"t{i}": np.full(10, i, np.float32) for i in range(500)}
    storage = CountingStorage(open_storage(str(tmp_path)))
    prefix = save_rows(storage, arrays, step=1, save_id="a", num_writers=2)
    checkpoint = open_checkpoint(storage, prefix)
    storage.reads.clear()
    _assert_same(_load_rows(checkpoint, arrays, 1), arrays)
    assert sorted((key, at) for key, at, _ in storage.reads) == [(f"{prefix}/w000{i}.safetensors", 0) for i in (0, 1)]


def test_columns_of_a_wide_tensor_are_read_without_the_rest(tmp_path: Path) -> None:
    array = np.random.default_rng(0).integers(0, 255, (8, 1 << 20), np.uint8)
    storage = CountingStorage(open_storage(str(tmp_path)))
    prefix = save_rows(storage, {"t": array}, step=1, save_id="a", num_writers=1, chunk_size_bytes=64 << 10)
    checkpoint = open_checkpoint(storage, prefix)
    storage.reads.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces_module, "STAGE_BYTES", 64 << 10)
        found = checkpoint.read("t", [0, 1000], [8, 1 << 17])
    assert found.tobytes() == array[:, 1000 : 1000 + (1 << 17)].tobytes()
    assert sum(size for _, _, size in storage.reads) < 2.1 * found.nbytes


def test_threads_may_share_a_checkpoint(tmp_path: Path) -> None:
    arrays = _state(200)
    storage = open_storage(str(tmp_path))
    checkpoint = open_checkpoint(
        storage, save_rows(storage, arrays, step=1, save_id="a", num_writers=3, chunk_size_bytes=50)
    )
    failures: list[BaseException] = []

    def read(num_readers: int) -> None:
        try:
            _assert_same(_load_rows(checkpoint, arrays, num_readers), arrays)
        except BaseException as error:  # noqa: BLE001  # handed to the test's own thread
            failures.append(error)

    threads = [threading.Thread(target=read, args=(n,)) for n in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def _damaged(storage: Storage, key: str, at: int) -> None:
    data = bytearray(storage.read(key))
    data[at] ^= 0x10
    storage.write(key, [bytes(data)])


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_flipped_byte_anywhere_in_a_data_file_is_found_and_named(tmp_path: Path, kind: str) -> None:
    storage = open_storage(str(tmp_path)) if kind == "local" else _memory()
    arrays = _state()
    prefix = save_rows(storage, arrays, step=1, save_id="a", num_writers=3, chunk_size_bytes=64)
    checkpoint = open_checkpoint(storage, prefix)
    for file in checkpoint.manifest.files:
        key = f"{prefix}/{file.path}"
        whole = storage.read(key)
        for at in {0, 7, 8, 63, 64, len(whole) // 2, len(whole) - 1, *range(0, len(whole), 97)}:
            _damaged(storage, key, at)
            with pytest.raises(CorruptCheckpoint, match=rf"{file.path}: chunk {at // 64} .*digest .*expected"):
                checkpoint.verify()
            first_data = min(box.start for box in file.boxes)
            if at >= first_data:
                with pytest.raises(CorruptCheckpoint, match=file.path):
                    _load_rows(checkpoint, arrays, 1)
            storage.write(key, [whole])
    checkpoint.verify()


def test_a_flipped_byte_in_the_manifest_is_found_and_named(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    prefix = save_rows(storage, _state(), step=1, save_id="a", num_writers=3)
    key = f"{prefix}/manifest.json"
    size = storage.size(key)
    for at in (0, 10, 11, 74, 75, 80, size // 2, size - 1):
        _damaged(storage, key, at)
        with pytest.raises(CorruptCheckpoint, match=r"manifest\.json"):
            open_checkpoint(storage, prefix)
        _damaged(storage, key, at)
    open_checkpoint(storage, prefix)


def test_truncated_lengthened_missing_and_swapped_files_are_found_and_named(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    arrays: Arrays = {"w": np.arange(4096, dtype=np.float32)}
    prefix = save_rows(storage, arrays, step=1, save_id="a", num_writers=2, chunk_size_bytes=1024)
    checkpoint = open_checkpoint(storage, prefix)
    first, second = f"{prefix}/w0000.safetensors", f"{prefix}/w0001.safetensors"
    data, other = storage.read(first), storage.read(second)

    storage.write(first, [data[:-5]])
    with pytest.raises(IncompleteCheckpoint, match=r"w0000\.safetensors"):
        checkpoint.verify()
    with pytest.raises(IncompleteCheckpoint, match=r"w0000\.safetensors is cut off"):
        checkpoint.read("w", [0], [4096])

    storage.write(first, [data, b"more"])
    with pytest.raises(IncompleteCheckpoint, match=r"w0000\.safetensors"):
        checkpoint.verify()

    storage.delete([first])
    with pytest.raises(IncompleteCheckpoint, match=r"w0000\.safetensors is missing"):
        checkpoint.verify()
    with pytest.raises(IncompleteCheckpoint, match=r"w0000\.safetensors is missing"):
        checkpoint.read("w", [5], [1])

    storage.write(first, [other])
    storage.write(second, [data])
    assert len(checkpoint.find_damage()) > 2
    with pytest.raises(CheckpointError, match=r"w0000\.safetensors"):
        checkpoint.read("w", [0], [4096])


def test_damage_elsewhere_does_not_keep_a_worker_from_its_own_bytes(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    array = np.arange(4096, dtype=np.float32)
    prefix = save_rows(storage, {"w": array}, step=1, save_id="a", num_writers=2, chunk_size_bytes=1024)
    storage.delete([f"{prefix}/w0001.safetensors"])
    assert open_checkpoint(storage, prefix).read("w", [10], [100]).tobytes() == array[10:110].tobytes()


@pytest.mark.parametrize(
    ("name", "offsets", "sizes", "out", "said"),
    [
        ("nope", [0], [1], np.zeros(4, np.uint8), "no tensor 'nope'"),
        ("layer.weight", [0], [1], np.zeros(4, np.uint8), "outside"),
        ("layer.weight", [13, 0], [1, 5], np.zeros(20, np.uint8), "outside"),
        ("layer.weight", [-1, 0], [1, 5], np.zeros(20, np.uint8), "outside"),
        ("layer.weight", [0, 0], [-1, 5], np.zeros(20, np.uint8), "outside"),
        ("layer.weight", [0, 0], [1, 5], np.zeros(19, np.uint8), "20 bytes"),
        ("layer.weight", [0, 0], [1, 5], memoryview(bytes(20)), "readonly=True"),
        ("layer.weight", [0, 0], [1, 5], np.zeros((20, 2), np.uint8)[:, 0], "contiguous=False"),
    ],
)
def test_a_request_that_cannot_be_met_is_refused_before_anything_is_read(
    tmp_path: Path, name: str, offsets: list[int], sizes: list[int], out: Any, said: str
) -> None:
    storage = CountingStorage(open_storage(str(tmp_path)))
    checkpoint = open_checkpoint(storage, save_rows(storage, _state(), step=1, save_id="a", num_writers=3))
    storage.reads.clear()
    good = np.zeros(8, np.uint8)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.read_many([("step", [], [], good), (name, offsets, sizes, out)])
    assert storage.reads == []


def test_a_buffer_of_any_element_type_can_be_filled(tmp_path: Path) -> None:
    storage, arrays = open_storage(str(tmp_path)), _state()
    checkpoint = open_checkpoint(storage, save_rows(storage, arrays, step=1, save_id="a", num_writers=3))
    out = np.zeros((13, 5), np.float32)
    checkpoint.read_into("layer.weight", [0, 0], [13, 5], out.data)
    assert np.array_equal(out, arrays["layer.weight"])


@dataclass(slots=True)
class BrokenDisk(StorageAround):
    """Its disk gives no bytes of some files."""

    is_broken: Callable[[str], bool]
    code: int = errno.EIO

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        self._strike(key)
        return self.inner.read(key, offset, size)

    def read_into(self, key: str, offset: int, outs: Sequence[memoryview]) -> int:
        self._strike(key)
        return self.inner.read_into(key, offset, outs)

    def _strike(self, key: str) -> None:
        if self.is_broken(key):
            error = OSError(self.code, os.strerror(self.code))
            raise storage_error(self.url, "read", key, error) from error


@pytest.mark.parametrize("code", [errno.EIO, errno.EBADMSG, errno.EUCLEAN])
@pytest.mark.parametrize("file", ["manifest.json", ".safetensors"])
def test_bytes_that_a_disk_has_lost_damage_the_checkpoint_and_no_other(tmp_path: Path, file: str, code: int) -> None:
    storage = open_storage(str(tmp_path))
    claims = Claims(storage, "driver")
    claims.own(1)
    for step in (1, 2):
        save_rows(storage, _state(), step=step, save_id="a", num_writers=2, claims=claims)
    broken = BrokenDisk(storage, lambda key: "step-0000000002" in key and key.endswith(file), code)
    with pytest.raises(CorruptCheckpoint, match=r"step-0000000002.* cannot be read from its disk: .*dmesg"):
        open_checkpoint(broken, save_prefix(2, "a")).read("ids", (0, 0, 0), (3, 2, 4))
    assert open_checkpoint(broken, save_prefix(1, "a")).read("ids", (0, 0, 0), (3, 2, 4)).nbytes == 48
    found = newest_complete(broken, skip_damaged=True)
    if file == "manifest.json":
        assert found.checkpoint is not None
        assert found.checkpoint.step == 1
    else:
        damage = open_checkpoint(broken, save_prefix(2, "a")).find_damage()
        assert ["cannot be read from its disk" in str(one) for one in damage] == [True, True]


def test_other_failures_of_a_storage_are_no_damage(tmp_path: Path) -> None:
    for storage, code in ((open_storage(str(tmp_path)), errno.ESTALE), (_memory(), errno.EIO)):
        save_rows(storage, _state(), step=1, save_id="a", num_writers=1)
        with pytest.raises(StorageError, match=r"read .*manifest\.json failed"):
            open_checkpoint(BrokenDisk(storage, lambda _: True, code), save_prefix(1, "a"))


def test_a_good_checkpoint_that_a_disk_does_not_give_for_a_while_is_not_deleted(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    claims = Claims(storage, "driver")
    claims.own(1)
    for step in (1, 2, 3, 4):
        numbers = {"metrics": {"loss": step}}
        save_rows(storage, _state(), step=step, save_id="a", num_writers=1, claims=claims, metadata=numbers)
    keep = Keep(last=1, best=Best(metric="loss", mode="min"))
    broken = BrokenDisk(storage, lambda key: "step-0000000001" in key)
    assert prune(broken, keep).retired == (save_prefix(3, "a"),)  # the second is the best of the others
    assert [ref.step for ref in list_checkpoints(storage) if ref.complete] == [1, 2, 4]
