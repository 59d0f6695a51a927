"""A save that dies at any moment leaves the previous checkpoint loadable and no visible part of itself."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from raysharded.checkpoint import Claims, Keep, Storage, newest_complete, open_storage, prune
from raysharded.testing.storages import save_rows
from tests.checkpoint.killing import kill_savers
from tests.paths import ROOT

OLD = {"w": np.arange(60, dtype=np.float32).reshape(12, 5), "step": np.array(1)}
NEW = {"w": OLD["w"] + 1, "step": np.array(2)}


def _save(storage: Storage, arrays: dict[str, NDArray[Any]], *, step: int, num_writers: int) -> str:
    """A new driver owns the run and saves once."""
    claims = Claims(storage, "driver")
    generation = claims.own(1)
    return save_rows(
        storage,
        arrays,
        step=step,
        save_id=f"g{generation:06d}",
        num_writers=num_writers,
        generation=generation,
        claims=claims,
    )


def _assert_newest_is(storage: Storage, arrays: dict[str, NDArray[Any]], step: int) -> None:
    checkpoint = newest_complete(storage).checkpoint
    assert checkpoint is not None
    assert checkpoint.step == step
    checkpoint.verify()
    for name, array in arrays.items():
        assert checkpoint.read(name, [0] * array.ndim, array.shape).tobytes() == array.tobytes()


_SAVER = """
import os, signal, sys
import numpy as np
from raysharded.checkpoint import Claims, open_storage
from raysharded.checkpoint.format import encoding
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.testing.storages import save_rows

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)

class DiesAfterFirstPart(list):
    def __iter__(self):
        yield self[0]
        yield self[1][:8]
        die()

def linked(number, after):
    link, calls = os.link, []
    def dying(a, b):
        calls.append(b)
        if len(calls) == number and not after:
            die()
        link(a, b)
        if len(calls) == number:
            die()
    return dying

encoding.MIN_BOXES = 1
storage = open_storage(sys.argv[1])
claims = Claims(storage, "driver")
generation = claims.own(1)
moment, write = sys.argv[2], LocalStorage.write
if moment == "in a shard":
    LocalStorage.write = lambda self, key, parts: write(
        self, key, DiesAfterFirstPart(parts) if "w0001" in key else parts
    )
elif moment in ("in a digest table", "in the box index"):
    end = {"in a digest table": ".b3", "in the box index": ".parquet"}[moment]
    LocalStorage.write = lambda self, key, parts: write(
        self, key, DiesAfterFirstPart([b"half", *parts]) if key.endswith(end) else parts
    )
elif moment == "before a shard has its name":
    os.replace = lambda a, b: die()
elif moment == "before the manifest":
    LocalStorage.put_if_absent = die
else:
    what, when = moment.split(" has its name ")
    os.link = linked({"manifest": 1, "claim": 2}[what], when == "after")
arrays = {"w": np.arange(60, dtype=np.float32).reshape(12, 5) + 1, "step": np.array(2)}
save_rows(
    storage,
    arrays,
    step=2,
    save_id=f"g{generation:06d}",
    num_writers=3,
    chunk_size_bytes=2,
    generation=generation,
    claims=claims,
)
"""


@pytest.mark.parametrize(
    ("moment", "committed"),
    [
        ("in a shard", False),
        ("in a digest table", False),
        ("in the box index", False),
        ("before a shard has its name", False),
        ("before the manifest", False),
        ("manifest has its name before", False),
        ("manifest has its name after", False),
        ("claim has its name before", False),
        ("claim has its name after", True),
    ],
)
def test_a_save_killed_by_sigkill_is_whole_or_invisible_and_its_debris_is_pruned(
    tmp_path: Path, moment: str, committed: bool
) -> None:
    storage = open_storage(str(tmp_path))
    _save(storage, OLD, step=1, num_writers=3)
    command = [sys.executable, "-c", _SAVER, str(tmp_path), moment]
    done = subprocess.run(command, cwd=ROOT, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    _assert_newest_is(storage, *((NEW, 2) if committed else (OLD, 1)))
    last = _save(storage, NEW, step=3, num_writers=2)
    prune(storage, Keep(last=1), now=True)
    assert storage.list("checkpoints") == [
        f"{last}/manifest.json",
        f"{last}/w0000.safetensors",
        f"{last}/w0001.safetensors",
    ]
    assert storage.unfinished("checkpoints") == []


@pytest.mark.procs
@pytest.mark.parametrize("kind", ["local"])
def test_40_processes_killed_in_the_middle_of_a_save_cost_nothing_but_that_save(tmp_path: Path, kind: str) -> None:
    """On S3: tests/s3/test_kills.py."""
    killed = kill_savers(str(tmp_path / kind), kills=40, rows=600, chunk=1024)
    assert killed.in_a_save == 40
    assert len(killed.files_found) > 3  # they were hit at different moments
    assert killed.dangling > 0  # temporary files of theirs were found, and deleted
