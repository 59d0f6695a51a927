"""Every damage to a file of a checkpoint is found when it is loaded, and the file is named."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from raysharded.checkpoint import Checkpoint, Storage, open_checkpoint
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint
from raysharded.testing.storages import CountingStorage
from tests.checkpoint.samples import State, bytes_of, flipped, raw, read_all, save, with_index

CHUNK = 512
"""More than a header, so that every chunk has bytes of a tensor."""
STATE: State = {
    "w": raw("float32", 240, 120),
    "b": raw("bfloat16", 3000),
    "n": raw("int64"),
    "m": raw("bool", 9, 7),
}
KINDS = ["manifest.json", "boxes-*.parquet", "w000?.safetensors", "w000?.safetensors.b3"]


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Storage, str]:
    """A checkpoint with every kind of file, and one of another step in the same run."""
    with_index(monkeypatch)
    storage = LocalStorage(str(tmp_path))
    save(storage, {**STATE, "w": raw("float32", 242, 120)}, step=8, chunk=CHUNK)
    return storage, save(storage, STATE, step=7, chunk=CHUNK)


def _files(storage: Storage, prefix: str, kind: str) -> list[str]:
    pattern = re.compile(kind.replace(".", r"\.").replace("*", ".*").replace("?", "."))
    keys = [key for key in storage.list(prefix) if pattern.fullmatch(key.rpartition("/")[2])]
    assert keys
    return keys


def _load(storage: Storage, prefix: str) -> Checkpoint:
    checkpoint = open_checkpoint(storage, prefix)
    assert read_all(checkpoint) == bytes_of(STATE)
    return checkpoint


def _assert_found(storage: Storage, prefix: str, key: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(key.rpartition("/")[2])):
        _load(storage, prefix)


@pytest.mark.parametrize("kind", KINDS)
def test_100_flipped_bits_in_every_kind_of_file_are_found_and_the_file_is_named(
    saved: tuple[Storage, str], kind: str
) -> None:
    storage, prefix = saved
    chance = random.Random(kind)
    wholes = {key: storage.read(key) for key in _files(storage, prefix, kind)}
    for _ in range(100):
        key, whole = chance.choice(list(wholes.items()))
        storage.write(key, [flipped(whole, chance.randrange(len(whole)), 1 << chance.randrange(8))])
        _assert_found(storage, prefix, key)
        storage.write(key, [whole])
    _load(storage, prefix).verify()


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_found_and_the_file_is_named(saved: tuple[Storage, str], kind: str) -> None:
    storage, prefix = saved
    chance = random.Random(kind)
    for key in _files(storage, prefix, kind):
        whole = storage.read(key)
        lengths = {
            0,
            1,
            len(whole) - 1,
            len(whole) // CHUNK * CHUNK,
            *(chance.randrange(len(whole)) for _ in range(20)),
        }
        for length in lengths - {len(whole)}:
            storage.write(key, [whole[:length]])
            _assert_found(storage, prefix, key)
        storage.write(key, [whole])
    _load(storage, prefix).verify()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_is_missing_is_named(saved: tuple[Storage, str], kind: str) -> None:
    storage, prefix = saved
    for key in _files(storage, prefix, kind):
        whole = storage.read(key)
        storage.delete([key])
        with pytest.raises(IncompleteCheckpoint, match=re.escape(key.rpartition("/")[2])):
            _load(storage, prefix)
        storage.write(key, [whole])


@pytest.mark.parametrize("kind", KINDS[2:])
def test_two_files_in_each_others_place_are_named(saved: tuple[Storage, str], kind: str) -> None:
    storage, prefix = saved
    one, other, _ = _files(storage, prefix, kind)
    first, second = storage.read(one), storage.read(other)
    storage.write(one, [second])
    storage.write(other, [first])
    damage = [str(error) for error in open_checkpoint(storage, prefix).find_damage()]
    for key in (one, other):
        assert any(key in text for text in damage)
    with pytest.raises(CheckpointError, match=kind[:4]):
        _load(storage, prefix)


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_another_step_is_found_and_named(saved: tuple[Storage, str], kind: str) -> None:
    storage, prefix = saved
    others = _files(storage, "checkpoints/step-0000000008-a", kind)
    for key, other in zip(_files(storage, prefix, kind), others, strict=True):
        whole = storage.read(key)
        foreign = storage.read(other)
        assert foreign != whole
        storage.write(key, [foreign])
        _assert_found(storage, prefix, key)
        storage.write(key, [whole])


def test_a_data_file_with_bytes_added_is_found_when_everything_is_verified(saved: tuple[Storage, str]) -> None:
    """A load reads only needed bytes, and those are right; `verify` checks sizes too."""
    storage, prefix = saved
    key = _files(storage, prefix, KINDS[2])[0]
    storage.write(key, [storage.read(key), b"more"])
    with pytest.raises(IncompleteCheckpoint, match=re.escape(key)):
        _load(storage, prefix).verify()


@pytest.mark.long
@pytest.mark.parametrize("every", [5, 1])
def test_every_flipped_byte_of_a_small_checkpoint_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """With chunks so small that a load needs no byte of some: `verify` reads those too.

    All bytes of the data are tried. Of the manifest and of the index, which have one digest each, it is one of `every`.
    """
    with_index(monkeypatch)
    storage = LocalStorage(str(tmp_path))
    prefix = save(storage, {"w": raw("uint8", 12, 2)}, num_writers=2, chunk=8)
    for key in storage.list(prefix):
        whole = storage.read(key)
        path = tmp_path / key
        for at in range(0, len(whole), 1 if key.endswith(".safetensors") else every):
            path.write_bytes(flipped(whole, at, 1 << at % 8))
            with pytest.raises(CheckpointError, match=re.escape(key.rpartition("/")[2])):
                open_checkpoint(storage, prefix).verify()
        path.write_bytes(whole)


def test_damage_in_chunks_that_nobody_requested_keeps_no_one_from_the_others(saved: tuple[Storage, str]) -> None:
    """A worker checks the bytes that it reads; damage elsewhere is found by others, or by `verify`."""
    storage, prefix = saved
    key = _files(storage, prefix, KINDS[2])[0]
    whole = storage.read(key)
    storage.write(key, [flipped(whole, len(whole) - 1, 1)])
    counting = CountingStorage(storage)
    checkpoint = open_checkpoint(counting, prefix)
    [last] = [box for box in checkpoint.manifest.files[0].boxes if box.name == "m"]
    assert last.start + 3 * 7 == len(whole)
    assert checkpoint.read("w", (0, 0), (10, 120)).tobytes() == STATE["w"].data[: 10 * 120 * 4]
    assert len(whole) > sum(size for read, _, size in counting.reads if read == key) > 0
    with pytest.raises(CorruptCheckpoint, match=re.escape(key)):
        checkpoint.read("m", (0, 0), (1, 7))


def test_a_manifest_that_names_another_save_is_refused_though_all_its_files_are_there(
    saved: tuple[Storage, str],
) -> None:
    storage, prefix = saved
    other = "checkpoints/step-0000000008-a"
    for key in storage.list(other):
        storage.write(f"{prefix}/{key.rpartition('/')[2]}", [storage.read(key)])
    with pytest.raises(CorruptCheckpoint, match=r"manifest\.json is the manifest of step 8"):
        open_checkpoint(storage, prefix)
    assert json.loads(storage.read(f"{other}/manifest.json"))["step"] == 8
