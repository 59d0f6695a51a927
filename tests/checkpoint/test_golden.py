"""Checkpoints that earlier versions wrote load forever, to the bit. Those in tests/golden are never written again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from numpy.typing import NDArray

from raysharded.checkpoint import Checkpoint, SigningKey, newest_complete, open_checkpoint, open_storage
from raysharded.checkpoint.state_dict.tree import unflatten
from raysharded.errors import CorruptCheckpoint
from tests.checkpoint.plain_reader import ITEM_BYTES, read_checkpoint

GOLDEN = Path(__file__).parent.parent / "golden"
FOLDER = "checkpoints/step-0000000007-golden2"
KEY = b"a key that is known to everybody"

STATE = {
    **{f"of.{dtype}": (dtype, (5, 3)) for dtype in ITEM_BYTES},
    "scalar": ("float64", ()),
    "empty": ("float32", (0, 4)),
    "empty.too": ("int8", (7, 0)),
    "name@with": ("bfloat16", (4, 2, 3)),
    "__metadata__": ("uint8", (9,)),
    "名字": ("int16", (6,)),
}
"""Tensors of every version 2 checkpoint: name -> (dtype, shape). Its bytes: see `_bytes`."""
TREE = {
    "dict": [
        ["model", {"dict": [["w", {"tensor": "of.float32"}], ["b", {"tensor": "of.bfloat16"}]]}],
        ["steps", {"list": [{"value": 1}, {"value": None}, {"float": "inf"}, {"tuple": [{"tensor": "scalar"}]}]}],
        [5, {"value": "five"}],
    ]
}


def _bytes(dtype: str, shape: tuple[int, ...]) -> bytes:
    size = int(np.prod(shape, dtype=np.int64)) * ITEM_BYTES[dtype]
    data = blake3(f"{dtype}{shape}".encode()).digest(length=size) if size else b""
    return bytes(byte & 1 for byte in data) if dtype == "bool" else data


def _tensors(checkpoint: Checkpoint) -> dict[str, bytes]:
    return {
        name: checkpoint.read(name, (0,) * len(info.shape), info.shape).tobytes()
        for name, info in checkpoint.tensors.items()
    }


def test_version_1_loads() -> None:
    checkpoint = newest_complete(open_storage(str(GOLDEN / "v1"))).checkpoint
    assert checkpoint is not None
    checkpoint.verify()
    assert (checkpoint.step, checkpoint.manifest.version) == (7, 1)
    assert checkpoint.manifest.metadata == {"seed": 3, "nested": {"a": [1, 2.5, None]}}
    expected: dict[str, NDArray[Any]] = {
        "weight": np.arange(35, dtype=np.float32).reshape(5, 7),
        "half@odd": np.arange(12, dtype=np.float16).reshape(3, 4),
        "count": np.array(41, np.int64),
        "mask": np.array([True, False, True]),
        "empty": np.zeros((0, 3), np.float32),
        "bytes": np.arange(100, dtype=np.uint8),
    }
    assert {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()} == {
        name: (str(array.dtype), array.shape) for name, array in expected.items()
    }
    for name, array in expected.items():
        read = checkpoint.read(name, (0,) * array.ndim, array.shape)
        assert np.array_equal(read.view(array.dtype).reshape(array.shape), array)


@pytest.mark.parametrize("kind", ["plain", "signed", "tables", "index", "spread", "tree"])
def test_version_2_loads(kind: str, tmp_path: Path) -> None:
    key = SigningKey(KEY) if kind == "signed" else None
    run = tmp_path / "golden"  # the name of the run, which a signed checkpoint states
    shutil.copytree(GOLDEN / "v2" / kind, run)
    checkpoint = open_checkpoint(open_storage(str(run)), FOLDER, key=key)
    checkpoint.verify()
    manifest = checkpoint.manifest
    assert (manifest.version, manifest.step, manifest.generation, manifest.save_id) == (2, 7, 3, "golden2")
    assert (manifest.run, manifest.writer, manifest.created_at) == ("golden", "driver", 1.5)
    assert {name: (info.dtype, info.shape) for name, info in checkpoint.tensors.items()} == STATE
    assert _tensors(checkpoint) == {name: _bytes(*about) for name, about in STATE.items()}
    assert manifest.metadata == {"seed": 3, "nested": {"a": [1, 2.5, None, "ü"]}}
    assert manifest.data == ({"position": [1, 2]} if kind == "tree" else {})
    assert manifest.tree == (TREE if kind == "tree" else None)


@pytest.mark.parametrize("kind", ["plain", "signed", "tables", "index", "spread", "tree"])
def test_version_2_is_as_described(kind: str) -> None:
    manifest, tensors = read_checkpoint(GOLDEN / "v2" / kind / FOLDER, KEY if kind == "signed" else None)
    assert tensors == {name: _bytes(*about) for name, about in STATE.items()}
    assert ("hmac" in manifest, "index" in manifest) == (kind == "signed", kind == "index")
    assert all(("digest_table" in file) == (kind == "tables") for file in manifest["files"])
    assert all(file["path"].startswith("../") == (kind == "spread") for file in manifest["files"])


def test_the_tree_of_version_2_gives_its_nested_state() -> None:
    assert unflatten(TREE, lambda name: f"<{name}>") == {
        "model": {"w": "<of.float32>", "b": "<of.bfloat16>"},
        "steps": [1, None, float("inf"), ("<scalar>",)],
        5: "five",
    }


def test_an_unsigned_golden_checkpoint_is_refused_with_a_key_and_a_signed_one_with_another() -> None:
    for kind, key in (("plain", KEY), ("signed", KEY[::-1])):
        with pytest.raises(CorruptCheckpoint, match="signed"):
            open_checkpoint(open_storage(str(GOLDEN / "v2" / kind)), FOLDER, key=SigningKey(key))


def test_the_golden_run_of_version_2_has_its_committed_checkpoint() -> None:
    found = newest_complete(open_storage(str(GOLDEN / "v2" / "plain")))
    assert found.checkpoint is not None
    assert (found.checkpoint.step, found.skipped) == (7, ())
