"""A manifest with a right digest by a hostile writer can make no reader leave the folder, crash or choke.

Everything here is sealed as if by a real writer; each ends in a CheckpointError. The large ones: test_hostile_size.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from raysharded.checkpoint import Storage, open_checkpoint, open_storage
from raysharded.checkpoint.format.encoding import decode, digest
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint
from tests.cases import examples, tried_each_time
from tests.checkpoint.samples import State, raw, read_all, reseal, save, seal
from tests.checkpoint.spoiled import places
from tests.paths import ROOT

STATE: State = {"w": raw("float32", 6, 4), "b": raw("int64"), "e": raw("bool", 0, 3)}
FOLDER = "step-0000000007-a"
FIRST = f"checkpoints/{FOLDER}/w0000.safetensors"
DIGEST = "0" * 64

Change = Callable[[dict[str, Any]], object]


def _saved(**options: Any) -> tuple[Storage, str]:
    storage = open_storage(f"memory://{uuid.uuid4().hex}/run")
    return storage, save(storage, STATE, **options)


def _use(storage: Storage, prefix: str) -> None:
    checkpoint = open_checkpoint(storage, prefix)
    read_all(checkpoint)
    checkpoint.verify()


def _body() -> dict[str, Any]:
    storage, prefix = _saved()
    body: dict[str, Any] = json.loads(storage.read(f"{prefix}/manifest.json"))
    return body


@pytest.mark.parametrize(
    "path",
    [
        "",
        ".",
        "..",
        "/",
        "./w0000.safetensors",
        "../w0000.safetensors",
        "../../../../etc/passwd",
        "/etc/passwd",
        "//etc/passwd",
        "a/../w0000.safetensors",
        "a/../../b",
        "a/./b",
        "a//b",
        "a/",
        "..\\b",
        "a\\..\\..\\b",
        "C:/b",
        "C:\\b",
        "file:///etc/passwd",
        "s3://bucket/b",
        "a\0b",
        "a\nb",
        "a\x7fb",
        "a\u202eb",
        "\ud800",
        "a" * 256,
        "/".join(["a" * 100] * 11),
        "../ab",
        f"../ab/{FOLDER}",
        f"../ab/{FOLDER}/",
        f"../ab/{FOLDER}/.",
        f"../ab/{FOLDER}/..",
        f"../ab/{FOLDER}/a/b",
        f"../ab/{FOLDER}/../a",
        f"../ab/{FOLDER}/a\\b",
        f"../ab/{FOLDER}/a\nb",
        f"../AB/{FOLDER}/a",
        f"../abc/{FOLDER}/a",
        f"../zz/{FOLDER}/a",
        f"../../ab/{FOLDER}/a",
        f"..//ab/{FOLDER}/a",
        f"x/../ab/{FOLDER}/a",
        "../ab/step-0000000008-a/a",
        "../ab/step-0000000007-b/a",
        "../ab/step-7-a/a",
        "../ab/pins/a",
    ],
)
def test_no_path_leads_out_of_the_folder(path: str) -> None:
    storage, prefix = _saved()
    reseal(storage, prefix, lambda body: body["files"][0].update(path=path))
    with pytest.raises(CorruptCheckpoint, match="not inside the checkpoint's folder"):
        open_checkpoint(storage, prefix)
    storage, prefix = _saved()
    reseal(storage, prefix, lambda body: body.update(index={"path": path, "size_bytes": 9, "digest": DIGEST}))
    with pytest.raises(CheckpointError):
        open_checkpoint(storage, prefix)


@pytest.mark.parametrize("path", ["%2e%2e/w0000", "~root/w0000", "$HOME", "w0000.safetensors ", f"../00/{FOLDER}/w0"])
def test_a_path_that_only_looks_odd_is_a_file_that_is_missing(path: str) -> None:
    storage, prefix = _saved()
    reseal(storage, prefix, lambda body: body["files"][0].update(path=path))
    with pytest.raises(IncompleteCheckpoint, match="missing"):
        _use(storage, prefix)


def _first_box(at: int, value: Any) -> Change:
    return lambda body: body["files"][0]["boxes"][0].__setitem__(at, value)


def _add_box(*box: Any) -> Change:
    return lambda body: body["files"][0]["boxes"].append(list(box))


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


CHANGES: dict[str, Change] = {
    "a shape of 2^62": lambda b: b["tensors"].update(w=["float32", [2**62]]),
    "a shape of 2^62 by 2^62": lambda b: b["tensors"].update(w=["float32", [2**62, 2**62]]),
    "a shape of 2^63": lambda b: b["tensors"].update(w=["float32", [2**63, 4]]),
    "a shape of 10^400": lambda b: b["tensors"].update(w=["float32", [10**400, 4]]),
    "an empty shape of 2^62 by 2^62": lambda b: b["tensors"].update(e=["bool", [0, 2**62, 2**62]]),
    "a shape of 10,000 dimensions": lambda b: b["tensors"].update(w=["float32", [1] * 10_000]),
    "a shape of 33 dimensions": lambda b: b["tensors"].update(w=["float32", [1] * 33]),
    "a negative shape": lambda b: b["tensors"].update(w=["float32", [-6, -4]]),
    "a shape of fractions": lambda b: b["tensors"].update(w=["float32", [6.0, 4.0]]),
    "a shape of truths": lambda b: b["tensors"].update(w=["float32", [True, 4]]),
    "a shape in text": lambda b: b["tensors"].update(w=["float32", "64"]),
    "another dtype": lambda b: b["tensors"].update(w=["float64", [6, 4]]),
    "a dtype of nobody": lambda b: b["tensors"].update(w=["float31", [6, 4]]),
    "a long dtype": lambda b: b["tensors"].update(w=["f" * 10**6, [6, 4]]),
    "a dtype of no text": lambda b: b["tensors"].update(w=[None, [6, 4]]),
    "a name of half a character": lambda b: b["tensors"].update({"\udc80": ["bool", [0]]}),
    "a long name": lambda b: b["tensors"].update({"n" * 5000: ["bool", [0]]}),
    "a step of 10^400": lambda b: b.update(step=10**400),
    "a save id that escapes": lambda b: b.update(save_id="../../x"),
    "a save id of half a character": lambda b: b.update(save_id="\ud800"),
    "a writer of half a character": lambda b: b.update(writer="\ud800"),
    "a long run": lambda b: b.update(run="r" * 10**6),
    "a time of 10^400": lambda b: b.update(created_at=10**400),
    "a version of text": lambda b: b.update(version="2"),
    "a version of truth": lambda b: b.update(version=True),
    "a long version": lambda b: b.update(version="2" * 10**6),
    "no files": lambda b: b.update(files=[]),
    "a file of nothing": lambda b: b["files"].append(None),
    "a file of 2^62 bytes": lambda b: b["files"][0].update(size_bytes=2**62),
    "a file of 10^400 bytes": lambda b: b["files"][0].update(size_bytes=10**400),
    "a file of 2^60 bytes in one-byte chunks": lambda b: b["files"][0].update(
        size_bytes=2**60, chunk_size_bytes=1, digest_table=DIGEST
    ),
    "a file of 2^60 bytes in one chunk": lambda b: b["files"][0].update(size_bytes=2**60, chunk_size_bytes=2**60),
    "a file of 2^40 bytes in one chunk": lambda b: b["files"][0].update(size_bytes=2**40, chunk_size_bytes=2**40),
    "a file of 64 MiB that is not there": lambda b: b["files"][0].update(size_bytes=2**26, chunk_size_bytes=2**26),
    "chunks of nothing": lambda b: b["files"][0].update(chunk_size_bytes=0),
    "chunks of less": lambda b: b["files"][0].update(chunk_size_bytes=-1),
    "more digests than chunks": lambda b: b["files"][0]["digests"].append(DIGEST),
    "a digest of other letters": lambda b: b["files"][0].update(digests=["G" * 64]),
    "a digest in Arabic digits": lambda b: b["files"][0].update(digests=["\u0661" * 64]),
    "a digest with a line end": lambda b: b["files"][0].update(digests=[DIGEST + "\n"]),
    "a digest table that is missing": lambda b: b["files"][0].update(digest_table=DIGEST),
    "a negative offset": _first_box(1, [-1, 0]),
    "an offset of 2^62": _first_box(1, [2**62, 0]),
    "a size of 2^62": _first_box(2, [2**62, 4]),
    "a size of 0": _first_box(2, [0, 4]),
    "a size of 10^400": _first_box(2, [10**400, 4]),
    "a box of other dimensions": _first_box(2, [2]),
    "a box of 10,000 dimensions": _add_box("w", [0] * 10_000, [1] * 10_000, 8),
    "a start of 2^62": _first_box(3, 2**62),
    "a start of 10^400": _first_box(3, 10**400),
    "a negative start": _first_box(3, -8),
    "a box of no tensor": _first_box(0, "nobody"),
    "a box of half a character": _first_box(0, "\ud800"),
    "a box of a list": _first_box(0, ["w"]),
    "a box there twice": lambda b: b["files"][0]["boxes"].append(b["files"][0]["boxes"][0]),
    "a box in two files": lambda b: b["files"][1]["boxes"].append(b["files"][0]["boxes"][0]),
    "a box over another": _first_box(2, [3, 4]),
    "a box in an empty tensor": _add_box("e", [0, 0], [1, 1], 8),
    "two boxes of one scalar": _add_box("b", [], [], 8),
    "a tree of absurd depth": lambda b: b.update(tree=_nested(900)),
    "a tree that is too deep": lambda b: b.update(tree=_nested(201)),
    "data of absurd depth": lambda b: b.update(data={"a": _nested(500)}),
    "metadata of absurd depth": lambda b: b.update(metadata={"a": _nested(500)}),
    "data of no object": lambda b: b.update(data=[1]),
    "an index of nothing": lambda b: b.update(index=None),
    "an index that is missing": lambda b: b.update(index={"path": "i", "size_bytes": 9, "digest": DIGEST}),
    "an index of 2^62 bytes": lambda b: b.update(index={"path": "i", "size_bytes": 2**62, "digest": DIGEST}),
    "an index of 2^30 bytes": lambda b: b.update(
        index={"path": "w0000.safetensors", "size_bytes": 2**30, "digest": DIGEST}
    ),
    "an index of -1 bytes": lambda b: b.update(index={"path": "i", "size_bytes": -1, "digest": DIGEST}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_a_hostile_writer_seals_is_refused(name: str) -> None:
    storage, prefix = _saved()
    reseal(storage, prefix, CHANGES[name])
    with pytest.raises(CheckpointError) as caught:
        _use(storage, prefix)
    assert prefix in str(caught.value)
    assert len(str(caught.value)) < 2000
    str(caught.value).encode()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"created_at":0.0', '"created_at":NaN'),
        ('"created_at":0.0', '"created_at":-Infinity'),
        ('"created_at":0.0', '"created_at":1e999'),
        ('"created_at":0.0', f'"created_at":{"9" * 5000}'),
        ('"metadata":{}', '"metadata":{"a":NaN}'),
        ('"metadata":{}', '"metadata":{"a":1,"a":2}'),
        ('"metadata":{}', '"metadata":{},"step":8'),
        ('"metadata":{}', f'"metadata":{{}},"digest":"{DIGEST}"'),
        ('"metadata":{}', '"metadata":{"a":' + "[" * 200_000 + "]" * 200_000 + "}"),
        ('"metadata":{}', '"metadata":' + '{"a":' * 200_000 + "1" + "}" * 200_000),
        ('"metadata":{}', '"metadata":' + "[" * 200_000),
        ('"metadata":{}', '"metadata":{"a":"\\x"}'),
        ('"metadata":{}', '"metadata":{"a":' + "9" * 5000 + "}"),
        ('"metadata":{}', '"metadata":{} trailing'),
        ('"metadata":{}', '"metadata":{},'),
        ('"metadata":{}', '"metadata":{"a":01}'),
        ('"metadata":{}', '"metadata":{"a":.5}'),
        ('"tensors":{', '"tensors":{"w":["float32",[6,4]],'),
    ],
)
def test_json_that_is_invalid_or_ambiguous_is_refused(old: str, new: str) -> None:
    storage, prefix = _saved()
    at = f"{prefix}/manifest.json"
    text = storage.read(at)[75:].decode()[2:]
    assert old in text
    storage.write(at, [seal("{" + text.replace(old, new, 1))])
    with pytest.raises(CheckpointError) as caught:
        _use(storage, prefix)
    assert "manifest.json" in str(caught.value)
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("rest", [b"", b'"', b'"}', b'",', b"\xff" * 50, '","é":1}'.encode(), b'"}' + b"\0" * 9])
def test_a_sealed_file_that_is_no_manifest_is_refused(rest: bytes) -> None:
    with pytest.raises(CorruptCheckpoint):
        decode(b'{"digest":"' + digest(rest).encode() + rest)


@pytest.mark.parametrize("size", [0, 31, 32, 33, -1, 1, 10_000])
def test_a_digest_table_of_another_size_is_refused_though_its_digest_is_right(size: int) -> None:
    storage, prefix = _saved(chunk=2)
    at = f"{FIRST}.b3"
    whole = storage.read(at)
    table = (whole * 9)[: size if size not in (1, -1) else len(whole) + size]
    storage.write(at, [table])
    reseal(storage, prefix, lambda body: body["files"][0].update(digest_table=digest(table)))
    with pytest.raises(CorruptCheckpoint, match=r"w0000\.safetensors\.b3"):
        _use(storage, prefix)


def test_a_checkpoint_that_claims_to_be_huge_is_refused_when_it_is_read() -> None:
    """Its manifest is consistent, so it opens; the described data is not in the file."""
    storage, prefix = _saved(num_writers=1)
    size, chunk = 2**45, 2**26
    table = bytes(32 * 2**19)
    storage.write(f"{FIRST}.b3", [table])

    def change(body: dict[str, Any]) -> None:
        body["tensors"] = {"w": ["uint8", [size]]}
        [file] = body["files"]
        file.update(size_bytes=size, chunk_size_bytes=chunk, digest_table=digest(table), boxes=[["w", [0], [size], 0]])

    reseal(storage, prefix, change)
    with pytest.raises(CheckpointError, match=r"w0000|more than fits"):
        _use(storage, prefix)
    with pytest.raises(IncompleteCheckpoint, match="w0000"):
        open_checkpoint(storage, prefix).read("w", [size - 5], [5])
    with pytest.raises(IncompleteCheckpoint, match="w0000"):
        open_checkpoint(storage, prefix).verify()


_NASTY = st.sampled_from(
    [None, True, -1, 0, 1, 2**31, 2**53, 2**62, 2**63, 2**64, 10**400, 0.5, 1e308, "", "w", "b", "..", "\ud800"]
) | st.recursive(
    st.integers(-3, 8) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("wbe"), inner, max_size=2),
    max_leaves=6,
)


@settings(max_examples=examples(60, of=200))
@given(data=st.data())
def test_a_manifest_changed_anywhere_opens_or_is_refused(data: st.DataObject) -> None:
    body = json.loads(json.dumps(_BODY))
    for _ in range(data.draw(st.integers(1, 3))):
        found = places(body, [])
        where, key = found[data.draw(st.integers(0, len(found) - 1))]
        how = data.draw(st.sampled_from(["set", "set", "drop", "double", "swap"]))
        if how == "set":
            where[key] = data.draw(_NASTY)
        elif how == "drop":
            del where[key]
        elif how == "double" and isinstance(where, list):
            where.append(where[key])
        else:
            other, at = found[data.draw(st.integers(0, len(found) - 1))]
            where[key] = json.loads(json.dumps(other[at]))
    storage, prefix = _STORAGE
    storage.write(f"{prefix}/manifest.json", [seal(body)])
    try:
        _use(storage, prefix)
    except CheckpointError as error:
        str(error).encode()


_STORAGE = _saved()
_BODY = json.loads(_STORAGE[0].read(f"{_STORAGE[1]}/manifest.json"))


@settings(max_examples=examples(45, of=150))
@given(st.lists(st.tuples(st.integers(0, 10_000), st.sampled_from(list('{}[],:"0919e-.\\n tu'))), max_size=4))
def test_a_manifest_whose_text_was_spoiled_opens_or_is_refused(changes: list[tuple[int, str]]) -> None:
    storage, prefix = _STORAGE
    text = list(json.dumps(_BODY, separators=(",", ":"))[78:])
    for at, character in changes:
        text[at % len(text)] = character
    storage.write(f"{prefix}/manifest.json", [seal("{" + "".join(text))])
    try:
        _use(storage, prefix)
    except CheckpointError as error:
        str(error).encode()


@pytest.mark.parametrize("count", tried_each_time([300], of=[300, 5000]))
def test_what_was_spoiled_anywhere_is_refused_or_read_in_little_memory_and_never_crashes(count: int) -> None:
    command = [sys.executable, "-m", "tests.checkpoint.spoiled", str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    for kind, watched in json.loads(done.stdout).items():
        assert watched["refused"] > count / 3, kind
        assert watched["grown_mib"] < 500, kind
