"""A save that dies at any moment leaves the previous checkpoint loadable and nothing of itself to be seen."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import raysharded
from raysharded.checkpoint import Storage, list_checkpoints, newest_complete, open_storage, prune
from raysharded.checkpoint.fakes import FailingStorage, save_rows
from raysharded.errors import StorageError

ROOT = Path(raysharded.__file__).parents[1]
OLD = {"w": np.arange(60, dtype=np.float32).reshape(12, 5), "step": np.array(1)}
NEW = {"w": OLD["w"] + 1, "step": np.array(2)}


def _assert_newest_is(storage: Storage, arrays: dict[str, NDArray[Any]], step: int) -> None:
    checkpoint = newest_complete(storage).checkpoint
    assert checkpoint is not None
    assert checkpoint.step == step
    checkpoint.verify()
    for name, array in arrays.items():
        assert checkpoint.read(name, [0] * array.ndim, array.shape).tobytes() == array.tobytes()


@pytest.mark.parametrize("took_effect", [False, True])
@pytest.mark.parametrize("kind", ["local", "memory"])
def test_a_storage_that_fails_at_any_operation_never_costs_the_previous_checkpoint(
    tmp_path: Path, kind: str, took_effect: bool
) -> None:
    for fail_at in range(100):
        storage = open_storage(f"{'' if kind == 'local' else 'memory://'}{tmp_path}/{took_effect}/{fail_at}")
        save_rows(storage, OLD, step=1, save_id="a", num_writers=3)
        failing = FailingStorage(storage, fail_at=fail_at, took_effect=took_effect)
        try:
            save_rows(failing, NEW, step=2, save_id="b", num_writers=3)
        except StorageError:
            assert failing.fired
        committed = any(ref.step == 2 and ref.complete for ref in list_checkpoints(storage))
        assert committed == (not failing.fired or (took_effect and fail_at == failing.operations - 1 == 4))
        _assert_newest_is(storage, *((NEW, 2) if committed else (OLD, 1)))
        save_rows(storage, NEW, step=2, save_id="c", num_writers=2)  # the same step again, at another size
        _assert_newest_is(storage, NEW, 2)
        if not failing.fired:
            assert fail_at == 5  # three shards, the listing before the commit, the commit
            return
    raise AssertionError("the save never came to its end")


_SAVER = """
import os, signal, sys
import numpy as np
from raysharded.checkpoint import open_storage
from raysharded.checkpoint.fakes import save_rows
from raysharded.checkpoint.storage_local import LocalStorage

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class DiesAfterFirstPart(list):
    def __iter__(self):
        yield self[0]
        yield self[1][:8]
        die()

moment, write = sys.argv[2], LocalStorage.write
if moment == "in a shard":
    LocalStorage.write = lambda self, key, parts: write(
        self, key, DiesAfterFirstPart(parts) if "w0001" in key else parts
    )
elif moment == "before a shard has its name":
    os.replace = lambda a, b: die()
elif moment == "before the manifest":
    LocalStorage.put_if_absent = die
elif moment == "before the manifest has its name":
    os.link = die
elif moment == "after the manifest has its name":
    link = os.link
    os.link = lambda a, b: (link(a, b), die())
arrays = {"w": np.arange(60, dtype=np.float32).reshape(12, 5) + 1, "step": np.array(2)}
save_rows(open_storage(sys.argv[1]), arrays, step=2, save_id="b", num_writers=3)
"""


@pytest.mark.parametrize(
    ("moment", "committed"),
    [
        ("in a shard", False),
        ("before a shard has its name", False),
        ("before the manifest", False),
        ("before the manifest has its name", False),
        ("after the manifest has its name", True),
    ],
)
def test_a_save_killed_by_sigkill_is_whole_or_invisible_and_its_debris_is_pruned(
    tmp_path: Path, moment: str, committed: bool
) -> None:
    storage = open_storage(str(tmp_path))
    save_rows(storage, OLD, step=1, save_id="a", num_writers=3)
    command = [sys.executable, "-c", _SAVER, str(tmp_path), moment]
    done = subprocess.run(command, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    _assert_newest_is(storage, *((NEW, 2) if committed else (OLD, 1)))
    last = save_rows(storage, NEW, step=3, save_id="c", num_writers=2)
    prune(storage, 1)
    assert storage.list() == [f"{last}/manifest.json", f"{last}/w0000.safetensors", f"{last}/w0001.safetensors"]
