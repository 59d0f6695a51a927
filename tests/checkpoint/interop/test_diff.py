"""Differences between two checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from raysharded.checkpoint.format.manifest import SAFETENSORS_DTYPES
from raysharded.checkpoint.interop.diff import diff, numbers
from raysharded.checkpoint.reader import Checkpoint, open_checkpoint
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.errors import CheckpointError
from raysharded.testing.storages import CountingStorage, save_rows


def _saved(tmp_path: Path, save_id: str, num_writers: int, **arrays: Any) -> Checkpoint:
    storage = LocalStorage(str(tmp_path))
    return open_checkpoint(storage, save_rows(storage, arrays, step=1, save_id=save_id, num_writers=num_writers))


def test_equal_tensors_are_equal_in_all_layouts(tmp_path: Path) -> None:
    arrays = {"w": np.random.default_rng(0).normal(size=(50, 3)), "n": np.arange(7)}
    found = diff(_saved(tmp_path, "a", 2, **arrays), _saved(tmp_path, "b", 3, **arrays))
    assert found.is_empty
    assert set(found.equal) == {"w", "n"}


def test_all_that_differs_is_listed_with_how_much(tmp_path: Path) -> None:
    base = {"same": np.ones(3), "w": np.array([3.0, 4.0, 0.0, 0.0]), "gone": np.ones(2), "shape": np.ones((2, 3))}
    other = {"same": np.ones(3), "w": np.array([3.0, 4.0, 0.5, 0.0]), "new": np.ones(2), "shape": np.ones((3, 2))}
    found = diff(_saved(tmp_path, "a", 1, **base), _saved(tmp_path, "b", 2, **other))
    assert not found.is_empty
    assert (found.only_in_a, found.only_in_b, found.equal) == (("gone",), ("new",), ("same",))
    assert [(name, a.shape, b.shape) for name, a, b in found.changed] == [("shape", (2, 3), (3, 2))]
    (w,) = found.different
    assert (w.name, w.num_elements, w.num_differing, w.num_not_finite) == ("w", 4, 1, 0)
    assert (w.max_abs, w.mean_abs, w.relative_l2) == (0.5, 0.125, 0.1)


def test_elements_that_are_not_finite_are_counted_and_spoil_nothing(tmp_path: Path) -> None:
    a = np.array([1.0, np.nan, np.inf, 0.0])
    b = np.array([2.0, np.nan, 5.0, -0.0])
    (found,) = diff(_saved(tmp_path, "a", 1, w=a), _saved(tmp_path, "b", 1, w=b)).different
    assert (found.num_differing, found.num_not_finite, found.max_abs) == (3, 1, 1.0)
    assert found.relative_l2 == 1.0


def test_names_choose_what_is_compared(tmp_path: Path) -> None:
    a, b = _saved(tmp_path, "a", 1, x=np.ones(2), y=np.ones(2)), _saved(tmp_path, "b", 1, x=np.ones(2), y=np.zeros(2))
    assert diff(a, b, names=("x*",)).is_empty
    with pytest.raises(CheckpointError, match="no tensor is called 'z'"):
        diff(a, b, names=("z",))
    c = _saved(tmp_path, "c", 1, **{"w[0]": np.ones(2), "w[1]": np.ones(2)})
    assert diff(c, c, names=("w[0]",)).equal == ("w[0]",)


def test_tensors_in_files_with_the_same_digests_are_not_read(tmp_path: Path) -> None:
    inner = LocalStorage(str(tmp_path))
    prefixes = [
        save_rows(
            inner,
            {"w": np.ones((4, 3)), "v": np.arange(8) + n * np.array([0, 0, 0, 0, 0, 0, 0, 1])},
            step=1,
            save_id=f"s{n}",
            num_writers=1,
        )
        for n in range(2)
    ]
    counting = CountingStorage(inner)
    same = [open_checkpoint(counting, prefixes[0]), open_checkpoint(counting, prefixes[0])]
    counting.reads.clear()
    assert diff(*same).is_empty
    assert not counting.reads
    assert diff(*same).by_digests == diff(*same).equal
    found = diff(same[0], open_checkpoint(counting, prefixes[1]))
    assert (found.equal, found.by_digests) == (("w",), ())


@pytest.mark.parametrize("dtype", [name for name in SAFETENSORS_DTYPES if name != "complex64"])
def test_numbers_are_those_that_torch_reads(dtype: str) -> None:
    item_bytes = SAFETENSORS_DTYPES[dtype][1]
    data = np.random.default_rng(0).integers(0, 2 if dtype == "bool" else 256, 2048 * item_bytes, np.uint8)
    if item_bytes == 1 and dtype != "bool":
        data = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(data).view(getattr(torch, dtype)).to(torch.float64).numpy()
    np.testing.assert_array_equal(numbers(data, dtype), expected)
