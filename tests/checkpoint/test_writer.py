"""A shard is a plain safetensors file, written without a second copy; one commit makes the save real."""

from __future__ import annotations

import pickle
import re
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from raysharded.checkpoint import (
    FileRecord,
    Manifest,
    ShardTensor,
    Storage,
    TensorInfo,
    commit,
    open_checkpoint,
    open_storage,
    save_prefix,
    write_shard,
)
from raysharded.checkpoint.format.encoding import digest
from raysharded.checkpoint.format.paths import MANIFEST_NAME, key_of
from raysharded.checkpoint.storage import Keys
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, StorageError
from raysharded.testing.storages import FailingStorage
from tests.checkpoint.samples import SpreadStorage, raw, save
from tests.paths import DOCS

PREFIX = save_prefix(5, "abc")


def _whole(name: str, tensor: torch.Tensor) -> ShardTensor:
    shape = tuple(tensor.shape)
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return ShardTensor(name=name, dtype=dtype, shape=shape, offsets=(0,) * len(shape), sizes=shape, data=raw)


def _manifest(files: list[FileRecord], tensors: dict[str, TensorInfo], **changes: object) -> Manifest:
    manifest = Manifest(
        run="run", step=5, generation=1, save_id="abc", writer="w0", created_at=0.0, tensors=tensors, files=tuple(files)
    )
    return replace(manifest, **changes)  # type: ignore[arg-type]  # a test may change any field


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path))


def test_every_dtype_is_read_back_by_the_safetensors_library_and_by_ours(storage: Storage, tmp_path: Path) -> None:
    raw = torch.arange(96, dtype=torch.uint8)
    dtypes = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16]
    dtypes += [torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64]
    dtypes += [torch.uint16, torch.uint32, torch.uint64]
    tensors = {f"t.{dtype}": raw.view(dtype).reshape(2, -1) for dtype in dtypes}
    tensors |= {"flag": torch.tensor([True, False, True]), "count": torch.tensor(7)}
    files = write_shard(storage, PREFIX, writer="w0", tensors=[_whole(name, t) for name, t in tensors.items()])
    with safe_open(str(tmp_path / PREFIX / "w0.safetensors"), framework="pt") as shard:
        assert set(shard.keys()) == set(tensors)
        for name, tensor in tensors.items():
            found = shard.get_tensor(name)
            assert found.dtype == tensor.dtype
            assert found.shape == tensor.shape
            assert _whole(name, found).data.tobytes() == _whole(name, tensor).data.tobytes()
    infos = {n: TensorInfo(dtype=str(t.dtype)[6:], shape=tuple(t.shape)) for n, t in tensors.items()}
    assert commit(storage, PREFIX, _manifest(files, infos))
    checkpoint = open_checkpoint(storage, PREFIX)
    for name, tensor in tensors.items():
        found_bytes = checkpoint.read(name, [0] * tensor.ndim, tensor.shape)
        assert found_bytes.tobytes() == _whole(name, tensor).data.tobytes()
    checkpoint.verify()


def test_bfloat16_rows_from_a_flat_buffer_keep_their_bits(storage: Storage, tmp_path: Path) -> None:
    values = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    flat = bytearray(100) + bytearray(values[2:5].reshape(-1).view(torch.uint8).numpy().tobytes()) + bytearray(9)
    piece = ShardTensor(
        name="w", dtype="bfloat16", shape=(6, 4), offsets=(2, 0), sizes=(3, 4), data=memoryview(flat)[100:124]
    )
    write_shard(storage, PREFIX, writer="w1", tensors=[piece])
    with safe_open(str(tmp_path / PREFIX / "w1.safetensors"), framework="pt") as shard:
        assert list(shard.keys()) == ["w@2,0"]
        assert torch.equal(shard.get_tensor("w@2,0"), values[2:5])


def test_the_snippet_in_the_format_description_reads_a_shard(
    storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = _whole("b", torch.zeros(2, 3))
    part = replace(whole, name="a", shape=(5, 3), offsets=(1, 0))
    write_shard(storage, PREFIX, writer="w0000", tensors=[part, whole])
    text = (DOCS / "format.md").read_text()
    monkeypatch.chdir(tmp_path / PREFIX)
    exec(text.split("```python\n")[1].split("```")[0], {})  # noqa: S102  # our own documentation
    assert sorted(capsys.readouterr().out.splitlines()) == ["a 1,0 torch.Size([2, 3])", "b 0 torch.Size([2, 3])"]


def test_records_survive_the_way_from_worker_to_driver(storage: Storage) -> None:
    files = write_shard(storage, PREFIX, writer="w0", tensors=[_whole("a", torch.zeros(2))])
    assert pickle.loads(pickle.dumps(files)) == files


def test_names_that_look_like_parts_stay_apart_from_parts(storage: Storage, tmp_path: Path) -> None:
    def piece(name: str, rows: int, first: int, count: int, fill: int) -> ShardTensor:
        data = np.full(count, fill, np.uint8)
        return ShardTensor(name=name, dtype="uint8", shape=(rows,), offsets=(first,), sizes=(count,), data=data)

    tensors = [piece("a@0", 2, 0, 2, 1), piece("a", 4, 0, 2, 2), piece("__metadata__", 1, 0, 1, 3)]
    write_shard(storage, PREFIX, writer="w0", tensors=tensors)
    with safe_open(str(tmp_path / PREFIX / "w0.safetensors"), framework="np") as shard:
        first = {key.rsplit("@", 1)[0]: shard.get_tensor(key)[0] for key in shard.keys()}  # noqa: SIM118  # no dict
        assert first == {"a@0": 1, "a": 2, "__metadata__": 3}


def test_digests_are_of_the_file_as_it_lies_in_storage(storage: Storage) -> None:
    tensors = [_whole("a", torch.arange(1000)), _whole("b", torch.arange(7, dtype=torch.int8))]
    [record] = write_shard(storage, PREFIX, writer="w0", tensors=tensors, chunk_size_bytes=100)
    data = storage.read(f"{PREFIX}/{record.path}")
    assert record.size_bytes == len(data)
    assert storage.read(f"{PREFIX}/{record.table_path}") == b"".join(
        bytes.fromhex(digest(data[at : at + 100])) for at in range(0, len(data), 100)
    )
    for box, tensor in zip(record.boxes, tensors, strict=True):
        assert data[box.start : box.start + tensor.data.nbytes] == tensor.data.tobytes()


def test_data_is_not_copied_while_it_is_written(storage: Storage) -> None:
    data = np.zeros(32 << 20, np.uint8)
    piece = ShardTensor(name="w", dtype="uint8", shape=data.shape, offsets=(0,), sizes=data.shape, data=data)
    tracemalloc.start()
    try:
        write_shard(storage, PREFIX, writer="w0", tensors=[piece])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2 << 20


def test_empty_pieces_are_left_out_and_a_writer_of_nothing_writes_no_file(storage: Storage) -> None:
    def empty(name: str) -> ShardTensor:
        data = memoryview(b"")
        return ShardTensor(name=name, dtype="float32", shape=(3, 4), offsets=(3, 0), sizes=(0, 4), data=data)

    assert write_shard(storage, PREFIX, writer="w2", tensors=[empty("a"), empty("b")]) == []
    assert storage.list() == []
    [record] = write_shard(storage, PREFIX, writer="w2", tensors=[empty("a"), _whole("c", torch.tensor(1))])
    assert [box.name for box in record.boxes] == ["c"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "float31"}, "float31"),
        ({"sizes": (3,)}, "outside"),
        ({"sizes": (1, 3)}, "12 bytes"),
        ({"offsets": (2, 0)}, "outside"),
        ({"offsets": (-1, 0)}, "outside"),
        ({"data": np.zeros((24, 2), np.uint8)[:, 0]}, "not contiguous"),
    ],
)
def test_a_piece_that_contradicts_itself_is_refused_by_name(
    storage: Storage, change: dict[str, object], said: str
) -> None:
    piece = replace(_whole("weight", torch.zeros(2, 3)), **change)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(CheckpointError, match=f"'weight'.*{said}"):
        write_shard(storage, PREFIX, writer="w0", tensors=[piece])
    assert storage.list() == []


def test_a_piece_given_twice_and_a_writer_that_is_no_file_name_are_refused(storage: Storage) -> None:
    piece = _whole("weight", torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"'weight'.*twice"):
        write_shard(storage, PREFIX, writer="w0", tensors=[piece, piece])
    with pytest.raises(CheckpointError, match=r"\.\./w0"):
        write_shard(storage, PREFIX, writer="../w0", tensors=[piece])


def _saved(storage: Storage) -> Manifest:
    files = write_shard(storage, PREFIX, writer="w0", tensors=[_whole("weight", torch.zeros(2))])
    return _manifest(files, {"weight": TensorInfo(dtype="float32", shape=(2,))})


def test_a_commit_of_another_writer_is_refused_and_ones_own_is_recognised(storage: Storage) -> None:
    manifest = _saved(storage)
    assert commit(storage, PREFIX, manifest) is not None
    assert commit(storage, PREFIX, manifest) is not None
    assert commit(storage, PREFIX, replace(manifest, created_at=99.0)) is not None  # a retry after a lost reply
    assert commit(storage, PREFIX, replace(manifest, writer="zombie")) is None
    assert commit(storage, PREFIX, replace(manifest, generation=0)) is None
    assert open_checkpoint(storage, PREFIX).manifest == manifest


def test_a_commit_whose_reply_was_lost_succeeds_when_it_is_retried(storage: Storage) -> None:
    manifest = _saved(storage)
    failing = FailingStorage(storage, fail_at=1, took_effect=True)
    with pytest.raises(StorageError):
        commit(failing, PREFIX, manifest)
    assert failing.fired
    assert commit(storage, PREFIX, manifest) is not None


def test_of_racing_commits_exactly_one_wins(storage: Storage) -> None:
    manifest = _saved(storage)
    gate, won = threading.Barrier(6), list[str]()

    def race(writer: str) -> None:
        gate.wait()
        if commit(storage, PREFIX, replace(manifest, writer=writer)):
            won.append(writer)

    threads = [threading.Thread(target=race, args=(f"w{i}",)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [open_checkpoint(storage, PREFIX).manifest.writer] == won


def test_a_save_with_a_missing_file_or_box_cannot_be_committed(storage: Storage) -> None:
    manifest = _saved(storage)
    with pytest.raises(IncompleteCheckpoint, match="'weight'"):
        commit(storage, PREFIX, replace(manifest, files=()))
    storage.delete(storage.list())
    with pytest.raises(IncompleteCheckpoint, match=r"w0\.safetensors"):
        commit(storage, PREFIX, manifest)
    assert storage.list() == []


def test_a_manifest_in_another_saves_folder_is_refused(storage: Storage) -> None:
    manifest = _saved(storage)
    with pytest.raises(CheckpointError, match="step 6"):
        commit(storage, save_prefix(6, "abc"), manifest)
    assert commit(storage, PREFIX, manifest)
    storage.write(f"{save_prefix(6, 'abc')}/{MANIFEST_NAME}", [storage.read(f"{PREFIX}/{MANIFEST_NAME}")])
    with pytest.raises(CorruptCheckpoint, match="step 5"):
        open_checkpoint(storage, save_prefix(6, "abc"))


def test_a_commit_lists_this_saves_folders_alone_where_writers_are_spread(tmp_path: Path) -> None:
    listed: list[str] = []

    class Listing(SpreadStorage):
        __slots__ = ()

        def list(self, prefix: str = "") -> Keys:
            listed.append(prefix)
            return super().list(prefix)

    storage = Listing(str(tmp_path))
    prefix = save(storage, {"w": raw("uint8", 40)}, num_writers=20)
    folder = prefix.rpartition("/")[2]
    spread = {key.rpartition("/")[0] for key in storage.list() if key.endswith(".safetensors")}
    assert len(spread) > 1
    assert sorted(listed[:-1]) == sorted(spread)
    assert all(found.endswith(f"/{folder}") for found in spread)


def test_a_file_missing_where_writers_are_spread_is_noticed(tmp_path: Path) -> None:
    storage = SpreadStorage(str(tmp_path))
    prefix = save(storage, {"w": raw("uint8", 40)}, num_writers=20)
    manifest = open_checkpoint(storage, prefix).manifest
    gone = manifest.files[7].path
    storage.delete([key_of(prefix, gone), f"{prefix}/{MANIFEST_NAME}"])
    with pytest.raises(IncompleteCheckpoint, match=re.escape(f"1 of 20 files are not under {tmp_path}/{prefix}")):
        commit(storage, prefix, manifest)
