"""A manifest describes exactly the place of all data, and no error in it stays unnoticed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from raysharded.checkpoint.format.boxes import BoxTable, FileBox
from raysharded.checkpoint.format.encoding import decode, digest, encode
from raysharded.checkpoint.format.manifest import FileRecord, Manifest, TensorInfo, check
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint

DIGEST = "0" * 64


def _file(path: str, *boxes: tuple[str, tuple[int, ...], tuple[int, ...], int]) -> FileRecord:
    found = tuple(FileBox(name=n, offsets=o, sizes=s, start=at) for n, o, s, at in boxes)
    return FileRecord(path=path, size_bytes=200, chunk_size_bytes=128, digests=bytes(64), boxes=BoxTable.of(found))


def _manifest() -> Manifest:
    return Manifest(
        run="run",
        step=7,
        generation=3,
        save_id="abc",
        writer="w0000",
        created_at=12.5,
        tensors={
            "weight": TensorInfo(dtype="float32", shape=(4, 3)),
            "step": TensorInfo(dtype="int64", shape=()),
            "none": TensorInfo(dtype="bfloat16", shape=(0, 5)),
        },
        files=(
            _file("w0.safetensors", ("weight", (0, 0), (3, 3), 64), ("step", (), (), 100)),
            _file("w1.safetensors", ("weight", (3, 0), (1, 3), 64)),
        ),
        metadata={"seed": 1, "position": [1, 2], "fingerprint": "ü", "loss": 0.1},
    )


def test_a_manifest_comes_back_as_it_was() -> None:
    manifest = _manifest()
    assert decode(encode(manifest).manifest) == manifest
    assert encode(decode(encode(manifest).manifest)) == encode(manifest)


def test_a_manifest_is_plain_json_with_the_documented_digest() -> None:
    data = encode(_manifest()).manifest
    assert json.loads(data)["digest"] == data[11:75].decode() == digest(data[75:])
    assert json.loads(data)["tensors"]["weight"] == ["float32", [4, 3]]


def test_every_flipped_byte_and_every_truncation_of_a_manifest_is_found() -> None:
    data = encode(_manifest()).manifest
    for at in range(len(data)):
        for mask in (0x01, 0x80):
            changed = bytearray(data)
            changed[at] ^= mask
            with pytest.raises(CorruptCheckpoint, match="here"):
                decode(bytes(changed), where="here")
        with pytest.raises(CorruptCheckpoint, match="here"):
            decode(data[:at], where="here")
    with pytest.raises(CorruptCheckpoint):
        decode(data + b" ")


def _sealed(body: dict[str, Any]) -> bytes:
    """A manifest of a writer that is wrong but seals what it writes."""
    rest = b'",' + json.dumps({k: v for k, v in body.items() if k != "digest"}).encode()[1:]
    return b'{"digest":"' + digest(rest).encode() + rest


def _edit(change: Callable[[dict[str, Any]], object]) -> bytes:
    body = json.loads(encode(_manifest()).manifest)
    change(body)
    return _sealed(body)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda b: b.update(version=3), CheckpointError, "version 3"),
        (lambda b: b.update(format="other"), CorruptCheckpoint, "not a raysharded-checkpoint"),
        (lambda b: b.pop("step"), CorruptCheckpoint, "'step' is missing"),
        (lambda b: b.update(step=-1), CorruptCheckpoint, "step=-1"),
        (lambda b: b.update(step=True), CorruptCheckpoint, "step=True"),
        (lambda b: b.update(run=5), CorruptCheckpoint, "run=5"),
        (lambda b: b.update(created_at="now"), CorruptCheckpoint, "created_at"),
        (lambda b: b.update(metadata=[]), CorruptCheckpoint, "metadata"),
        (lambda b: b.update(files={}), CorruptCheckpoint, "files"),
        (lambda b: b["tensors"].update(weight=["float32"]), CorruptCheckpoint, "weight"),
        (lambda b: b["tensors"].update(weight=["float31", [4, 3]]), CorruptCheckpoint, "float31"),
        (lambda b: b["tensors"].update(weight=["float32", [4, -3]]), CorruptCheckpoint, "weight"),
        (lambda b: b["tensors"].update(weight=["float32", [5, 3]]), IncompleteCheckpoint, r"'weight'.*\[4, 0\]"),
        (lambda b: b["tensors"].update(other=["int8", [2]]), IncompleteCheckpoint, "'other'"),
        (lambda b: b["tensors"].pop("step"), CorruptCheckpoint, "unknown tensor 'step'"),
        (lambda b: b["files"][0].update(path="../w0.safetensors"), CorruptCheckpoint, "not inside"),
        (lambda b: b["files"][0].update(path="/etc/passwd"), CorruptCheckpoint, "not inside"),
        (lambda b: b["files"][0].update(path="a\\..\\b"), CorruptCheckpoint, "not inside"),
        (lambda b: b["files"][0].update(path="s3://bucket/x"), CorruptCheckpoint, "not inside"),
        (lambda b: b["files"][1].update(path="w0.safetensors"), CorruptCheckpoint, "twice"),
        (lambda b: b["files"][0].update(size_bytes=-200), CorruptCheckpoint, "size_bytes"),
        (lambda b: b["files"][0].update(chunk_size_bytes=0), CorruptCheckpoint, "chunks of 0"),
        (lambda b: b["files"][0].update(digests=[DIGEST]), IncompleteCheckpoint, "2 chunks but 1"),
        (lambda b: b["files"][0].update(digests=[1, 2]), CorruptCheckpoint, "digest 1"),
        (lambda b: b["files"][0]["boxes"][0].__setitem__(3, -8), CorruptCheckpoint, "starts outside"),
        (lambda b: b["files"][0]["boxes"][0].__setitem__(3, 80), CorruptCheckpoint, "another box"),
        (lambda b: b["files"][0]["boxes"][1].__setitem__(3, 193), CorruptCheckpoint, "outside the file"),
        (lambda b: b["files"][0]["boxes"][0].__setitem__(2, [3, -3]), CorruptCheckpoint, "weight"),
        (lambda b: b["files"][0]["boxes"][0].__setitem__(2, [5, 3]), CorruptCheckpoint, "outside its tensor"),
        (lambda b: b["files"][0]["boxes"][0].__setitem__(2, [3]), CorruptCheckpoint, "as many sizes"),
        (lambda b: b["files"][0]["boxes"][0].__setitem__(2, [2, 3]), IncompleteCheckpoint, r"'weight'.*\[2, 0\]"),
        (lambda b: b["files"][1]["boxes"][0].__setitem__(1, [2, 0]), CorruptCheckpoint, r"twice at \[2, 0\]"),
        (lambda b: b["files"].pop(), IncompleteCheckpoint, r"'weight'.*\[3, 0\]"),
        (lambda b: b["files"][0]["boxes"].append("x"), CorruptCheckpoint, "box 'x'"),
    ],
)
def test_what_a_wrong_writer_seals_is_refused_and_named(
    change: Callable[[dict[str, Any]], object], error: type[CheckpointError], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        decode(_edit(change), where="bucket/step-7")
    assert type(caught.value) is error
    assert "bucket/step-7" in str(caught.value)


@pytest.mark.parametrize("metadata", [{"a": (1, 2)}, {"a": float("nan")}, {"a": {1: 2}}, {"a": b"x"}])
def test_metadata_that_json_would_change_is_refused(metadata: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="metadata"):
        encode(replace(_manifest(), metadata=metadata))


def test_thousands_of_tensors_of_hundreds_of_writers_are_checked_in_seconds() -> None:
    names, writers, rows = [f"layer.{i}.weight" for i in range(1000)], 100, 16
    files = tuple(
        FileRecord(
            path=f"w{w}.safetensors",
            size_bytes=len(names) * rows * 4,
            chunk_size_bytes=1 << 20,
            digests=bytes(32),
            boxes=BoxTable.of(
                FileBox(name=name, offsets=(w * rows,), sizes=(rows,), start=i * rows * 4)
                for i, name in enumerate(names)
            ),
        )
        for w in range(writers)
    )
    tensors = {name: TensorInfo(dtype="float32", shape=(writers * rows,)) for name in names}
    manifest = replace(_manifest(), tensors=tensors, files=files)
    began = time.process_time()
    check(manifest, where="here")
    assert time.process_time() - began < 5.0  # about 0.2 s on an idle core
