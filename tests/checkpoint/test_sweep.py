"""A save whose storage fails at any operation costs nothing but itself; a full disk is such a storage."""

from __future__ import annotations

import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from raysharded.checkpoint import Claims, Keep, Storage, list_checkpoints, newest_complete, open_storage, prune
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.errors import StorageError
from raysharded.testing.storages import FailingStorage
from tests.cases import tried_each_time
from tests.checkpoint.samples import SpreadStorage, State, bytes_of, raw, read_all, save, with_index
from tests.paths import ROOT

OLD: State = {"w": raw("float32", 12, 5), "step": raw("int64")}
NEW: State = {"w": raw("float32", 12, 5, seed=1), "step": raw("int64", seed=1)}
OPERATIONS = {"local": 3 + 3 * 2 + 4, "memory": 3 + 3 * 2 + 4, "spread": 3 + 3 * 2 + 6}
"""The newest claim, found and read, and the owner's; three files and tables; a listing of each of their folders (one,
or three where they are spread), the index, manifest, claim."""


def _save(storage: Storage, state: State, step: int, num_writers: int = 3) -> str:
    """A new driver owns the run and saves once, with digest tables and a box index."""
    claims = Claims(storage, "driver")
    generation = claims.own(1)
    return save(
        storage,
        state,
        step=step,
        save_id=f"g{generation:06d}",
        generation=generation,
        num_writers=num_writers,
        chunk=2,
        claims=claims,
    )


def _assert_newest_is(storage: Storage, state: State, step: int) -> None:
    checkpoint = newest_complete(storage).checkpoint
    assert checkpoint is not None
    assert checkpoint.step == step
    assert read_all(checkpoint) == bytes_of(state)
    checkpoint.verify()


FAILURES = ["untouched", "half", "took_effect"]
"""The state after an operation that took effect is nearly always the state before the next, untouched one."""
TRIED = [("local", "half"), ("spread", "took_effect")]


@pytest.mark.parametrize(("kind", "failure"), tried_each_time(TRIED, of=product(OPERATIONS, FAILURES)))
def test_a_storage_that_fails_at_any_operation_never_costs_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, failure: str
) -> None:
    with_index(monkeypatch)
    operations = OPERATIONS[kind]
    for fail_at in range(operations + 1):
        root = f"{tmp_path}/{failure}/{fail_at}"
        storage = (
            SpreadStorage(root) if kind == "spread" else open_storage(f"memory://{root}" if kind == "memory" else root)
        )
        _save(storage, OLD, 1)
        failing = FailingStorage(
            storage, fail_at=fail_at, untouched=failure == "untouched", took_effect=failure == "took_effect"
        )
        try:
            _save(failing, NEW, 2)
        except StorageError:
            assert failing.fired
        assert failing.fired == (fail_at < operations)
        committed = any(ref.step == 2 and ref.complete for ref in list_checkpoints(storage))
        assert committed == (fail_at >= operations - (failure == "took_effect"))
        _assert_newest_is(storage, *((NEW, 2) if committed else (OLD, 1)))
        last = _save(storage, NEW, 2, num_writers=2)  # the same step again, at another size
        _assert_newest_is(storage, NEW, 2)
        prune(storage, Keep(last=1), now=True)
        step, save_id = last.rsplit("-", 2)[1:]
        assert all(f"step-{step}-{save_id}" in key for key in storage.list("checkpoints"))
        _assert_newest_is(storage, NEW, 2)


_FULL = """
import resource, sys
from raysharded.checkpoint import Claims, open_storage
from raysharded.errors import StorageError
from tests.cases import tried_each_time
from tests.checkpoint.samples import raw, save

storage = open_storage(sys.argv[1])
if sys.argv[2]:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
claims = Claims(storage, "driver")
generation = claims.own(2)
state = {"w": raw("uint8", 3, 200_000, seed=1)}
try:
    save(storage, state, step=2, save_id="b", generation=generation, claims=claims)
except StorageError as error:
    sys.exit(f"refused: {error}")
"""


def _assert_full(storage: Storage, limit: str, said: str) -> None:
    small: State = {"w": raw("uint8", 3, 1000)}
    claims = Claims(storage, "driver")
    save(storage, small, step=1, generation=claims.own(1), claims=claims)
    command = [sys.executable, "-c", _FULL, storage.url, limit]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "refused: write" in done.stderr
    assert said in done.stderr
    _assert_newest_is(storage, small, 1)
    assert [ref.complete for ref in list_checkpoints(storage)] in ([True], [True, False])
    assert list(storage.unfinished()) == []  # the disk space is given back
    prune(storage, Keep(last=1), now=True)
    _save(storage, small, 3)
    _assert_newest_is(storage, small, 3)


def test_a_file_that_may_not_grow_is_an_error_and_costs_nothing_else(tmp_path: Path) -> None:
    _assert_full(LocalStorage(str(tmp_path)), "100000", "File too large")


def test_a_full_disk_is_an_error_and_costs_nothing_else(tmp_path: Path) -> None:
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "raysharded-test", str(tmp_path)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a small tmpfs cannot be mounted here: that takes root")
    try:
        _assert_full(LocalStorage(str(tmp_path)), "", "Free some space")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)
