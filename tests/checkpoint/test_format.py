"""The description in `docs/format.md` suffices to read a checkpoint: a reader with no other knowledge gets every
bit."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from raysharded.checkpoint import SigningKey, open_checkpoint
from raysharded.checkpoint.format.paths import data_path
from raysharded.checkpoint.storage.local import LocalStorage
from tests.checkpoint.plain_reader import read_checkpoint
from tests.checkpoint.samples import SpreadStorage, bytes_of, every_dtype, flipped, raw, read_all, save, with_index
from tests.paths import DOCS

SECRET = b"0123456789abcdef"
KEY = SigningKey(SECRET)
STATE = every_dtype()


@pytest.mark.parametrize("chunk", [None, 16], ids=["few chunks", "digest tables"])
@pytest.mark.parametrize("indexed", [False, True], ids=["boxes inline", "box index"])
@pytest.mark.parametrize("spread", [False, True], ids=["one folder", "spread"])
@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "signed"])
def test_a_reader_of_the_description_alone_reads_every_kind_of_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int | None, indexed: bool, spread: bool, signed: bool
) -> None:
    if indexed:
        with_index(monkeypatch)
    run = tmp_path / "run"  # the name of the run, which a signed checkpoint states
    storage = SpreadStorage(str(run)) if spread else LocalStorage(str(run))
    tree = {"layers": [{"w": "of.float32"}, None], "lr": 0.5}
    prefix = save(storage, STATE, chunk=chunk, key=KEY if signed else None, tree=tree, data={"position": 3})
    manifest, tensors = read_checkpoint(run / prefix, SECRET if signed else None)
    assert tensors == bytes_of(STATE)
    assert (manifest["tree"], manifest["data"], manifest["metadata"]) == (tree, {"position": 3}, {})
    assert ("index" in manifest) == indexed
    assert all(("digest_table" in file) == (chunk is not None) for file in manifest["files"])
    assert all(file["path"].startswith("../") == spread for file in manifest["files"])
    checkpoint = open_checkpoint(storage, prefix, key=KEY if signed else None, digest=manifest["digest"])
    assert read_all(checkpoint) == tensors
    assert (checkpoint.manifest.tree, checkpoint.manifest.data) == (tree, {"position": 3})


def test_that_reader_finds_a_flipped_byte_in_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_index(monkeypatch)
    storage = LocalStorage(str(tmp_path))
    prefix = save(storage, STATE, chunk=16)
    for key in storage.list():
        whole = storage.read(key)
        storage.write(key, [flipped(whole, len(whole) // 2, 4)])
        with pytest.raises(ValueError, match="match"):
            read_checkpoint(tmp_path / prefix)
        storage.write(key, [whole])


@pytest.mark.parametrize("num_writers", [1, 4])
def test_every_data_file_opens_with_the_safetensors_library(tmp_path: Path, num_writers: int) -> None:
    prefix = save(LocalStorage(str(tmp_path)), STATE, num_writers=num_writers)
    files = sorted((tmp_path / prefix).glob("*.safetensors"))
    assert len(files) == num_writers
    for path in files:
        with safe_open(str(path), framework="np") as shard:
            assert shard.metadata()["format"] == "pt"
            assert len(shard.keys()) > 0


def test_the_description_spreads_files_as_the_writer_does() -> None:
    text = (DOCS / "format.md").read_text()
    path = data_path("checkpoints/step-0000000500-a", "w0000", partitioned=True)
    assert f"`checkpoints/{path.removeprefix('../')}`" in text


def test_a_header_that_lies_changes_nothing_because_no_reader_believes_it(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    prefix = save(storage, {"w": raw("uint8", 40)}, num_writers=1)
    checkpoint = open_checkpoint(storage, prefix)
    [file] = checkpoint.manifest.files
    assert next(iter(file.boxes)).start >= 8
    key = f"{prefix}/{file.path}"
    storage.write(key, [b"\xff" * 8 + storage.read(key)[8:]])  # a header of 2^64 - 1 bytes
    assert len(checkpoint.find_damage()) == 1
