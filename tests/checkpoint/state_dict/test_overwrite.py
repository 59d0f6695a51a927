"""A checkpoint that is overwritten is the older one or the newer one at any moment, and never lost, mixed or taken away
from its readers."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from raysharded.checkpoint import api
from raysharded.checkpoint.interop import RayshardedReader, RayshardedWriter
from raysharded.checkpoint.reader import open_checkpoint
from raysharded.checkpoint.retention.orphan_files import GRACE_S, sweep
from raysharded.checkpoint.sharded_io.coordinator import Coordinator
from raysharded.checkpoint.sharded_io.save import About, Saved, Target, content_of, write
from raysharded.checkpoint.storage import Storage, open_storage
from raysharded.checkpoint.storage.local import LocalStorage
from raysharded.checkpoint.storage.optional_operations import swap
from raysharded.errors import CheckpointError, IncompleteCheckpoint, StorageError
from raysharded.locations import join_url
from raysharded.testing.storages import FailingStorage
from tests.checkpoint.samples import with_index
from tests.checkpoint.state_dict.ranks import outcomes
from tests.checkpoint.state_dict.test_beside import DEADLINE_S, Gate, gate as gate

SIZE = 300


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((SIZE,), step), "step": step, f"extra.{step}": torch.ones(step)}


def assert_whole(uri: Any, *steps: int) -> int:
    """The step of the checkpoint, which is whole, and of one of these steps."""
    with api.open(uri) as opened:
        step: int = opened.state()["step"]
        assert opened.step == step
        assert step in steps
        assert opened.state()["w"].tolist() == [step] * SIZE
        assert f"extra.{step}" in opened.tensors
    return step


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.s3)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "c") if request.param == "local" else join_url(request.getfixturevalue("s3_url"), "c")


def test_a_checkpoint_is_overwritten_only_where_that_is_requested(url: str) -> None:
    api.save(url, state_of(1), step=1, overwrite=True)
    with pytest.raises(CheckpointError, match=r"is a checkpoint already.*overwrite=True"):
        api.save(url, state_of(2), step=2)
    assert_whole(url, 1)
    api.save(url, state_of(2), step=2, overwrite=True)
    assert_whole(url, 2)
    with api.AsyncSaver() as saver:
        saver.save(url, state_of(3), step=3, overwrite=True).result(DEADLINE_S)
    assert_whole(url, 3)
    into = state_of(3)
    assert api.load(url, into).step == 3


def test_who_has_opened_a_checkpoint_reads_on_when_it_is_overwritten_until_its_grace_has_passed(url: str) -> None:
    api.save(url, state_of(1), step=1)
    first = api.open(url)
    digest = first.digest
    api.save(url, state_of(2), step=2, overwrite=True)
    storage = open_storage(url)
    above, name = open_storage(url.replace("/c?", "?") if "?" in url else os.path.dirname(url)), "c"
    for wall in (time.time, lambda: time.time() + GRACE_S - 600):
        kept = sweep(above, name, wall=wall)
        assert kept.debris == ()
        assert "it was overwritten within a day, or is being" in kept.left[0].reason
        assert first.state()["w"].tolist() == [1] * SIZE
    by_digest = open_checkpoint(above, name, digest=digest)
    assert by_digest.step == 1, "the ranks of a load that began before open what its first rank opened"
    assert sweep(above, name, wall=lambda: time.time() + GRACE_S + 600, dry_run=True).debris
    assert first.state()["w"].tolist() == [1] * SIZE
    assert sweep(above, name, wall=lambda: time.time() + GRACE_S + 600).left == ()
    assert_whole(url, 2)
    with pytest.raises(IncompleteCheckpoint):
        first.read("w")
    assert not [key for key in storage.list() if key.startswith("replaced-")]
    assert sweep(above, name).debris == ()


def test_what_was_overwritten_goes_at_once_where_that_is_requested(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_index(monkeypatch)
    for step in range(3):
        many = {f"t{number}": torch.full((1,), number) for number in range(50 + step)}
        api.save(tmp_path / "c", many, step=step, overwrite=True)
    assert len(list(tmp_path.glob("c/boxes-*"))) == 3
    assert sweep(open_storage(str(tmp_path)), "c", grace_s=0.0).left == ()
    assert len(list(tmp_path.glob("c/boxes-*"))) == len(list(tmp_path.glob("c/*/*.safetensors"))) == 1
    assert not list(tmp_path.glob("c/replaced-*"))
    assert api.open(tmp_path / "c").read("t49").tolist() == [49]


def grow_older(folder: Path, hours: float) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            at = path.stat().st_mtime - hours * 3600
            os.utime(path, (at, at))


def test_what_is_overwritten_again_and_again_is_collected_all_the_same(tmp_path: Path) -> None:
    """Every four hours, with a collection each night."""
    above = open_storage(str(tmp_path))
    for step in range(30):
        api.save(tmp_path / "c", state_of(step + 1), step=step + 1, overwrite=True)
        grow_older(tmp_path, 4.0)
        if step % 6 == 5:
            sweep(above, "c")
    assert len(list(tmp_path.glob("c/*/*.safetensors"))) <= 7
    assert len(list(tmp_path.glob("c/replaced-*"))) <= 7
    assert_whole(tmp_path / "c", 30)


def test_a_collection_leaves_a_save_alone_that_overwrites_after_another_one_failed_to(
    tmp_path: Path, gate: Gate
) -> None:
    gate.opened.set()
    api.save(tmp_path / "c", state_of(1), step=1)
    storage = FailingStorage(open_storage(str(tmp_path)), fail_at=4)
    with pytest.raises(StorageError):
        overwrite_through(storage, 2)
    assert list(tmp_path.glob("c/replaced-*"))
    grow_older(tmp_path, 72.0)
    with api.AsyncSaver() as saver:
        gate.opened.clear()
        gate.reached.clear()
        pending = saver.save(tmp_path / "c", state_of(3), step=3, overwrite=True)
        assert gate.reached.wait(DEADLINE_S)
        above = open_storage(str(tmp_path))
        sweep(above, "c")
        gate.opened.set()
        pending.result(DEADLINE_S)
        sweep(above, "c")
    assert_whole(tmp_path / "c", 3)


def test_of_two_saves_that_overwrite_the_same_one_wins_and_the_other_fails(tmp_path: Path, gate: Gate) -> None:
    gate.opened.set()
    api.save(tmp_path / "c", state_of(1), step=1)
    gate.opened.clear()
    gate.waiting = 0
    savers = [api.AsyncSaver(), api.AsyncSaver()]
    pending = [
        saver.save(tmp_path / "c", state_of(step), step=step, overwrite=True)
        for step, saver in enumerate(savers, start=2)
    ]
    deadline = time.monotonic() + DEADLINE_S
    while gate.waiting < 2 and time.monotonic() < deadline:  # both have seen the first: they write
        time.sleep(0.01)
    gate.opened.set()
    for saver in savers:
        saver.close()
    errors = []
    for one in pending:
        try:
            one.result(DEADLINE_S)
        except CheckpointError as error:
            errors.append(str(error))
    assert len(errors) == 1
    assert "another save was committed there in the meantime" in errors[0]
    assert_whole(tmp_path / "c", 2, 3)


def test_of_many_that_swap_what_they_saw_each_step_has_one_winner(url: str) -> None:
    """Each adds one to what it read; no addition is lost."""
    turns = 40 if "?" not in url else 6
    storage = open_storage(url)
    storage.write("n", [b"0"])

    def add(writer: int) -> int:
        own = open_storage(url)
        done = 0
        while done < turns:
            seen = own.read("n")
            done += swap(own, "n", seen, b"%d %d" % (int(seen.split()[0]) + 1, writer))
        return done

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(add, range(4))) == 4 * turns
    assert int(storage.read("n").split()[0]) == 4 * turns
    assert swap(storage, "n", b"another", b"x") is False
    assert int(storage.read("n").split()[0]) == 4 * turns
    assert [key for key in storage.list() if key != "n"] == []


def swap_and_die(rank: int, folder: str) -> None:
    """Die while holding the lock of the file that is to be replaced."""
    storage = LocalStorage(folder)
    replace = os.replace
    os.replace = lambda *_: os._exit(1)
    try:
        swap(storage, "m", b"old", b"new")
    finally:
        os.replace = replace


@pytest.mark.procs
def test_who_dies_while_it_swaps_leaves_the_older_and_no_lock(tmp_path: Path) -> None:
    (tmp_path / "m").write_bytes(b"old")
    outcomes(1, swap_and_die, str(tmp_path))
    assert (tmp_path / "m").read_bytes() == b"old"
    assert swap(LocalStorage(str(tmp_path)), "m", b"old", b"newer")
    assert (tmp_path / "m").read_bytes() == b"newer"


def test_a_swap_of_what_is_not_there_is_lost_and_a_lock_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    storage = LocalStorage(str(tmp_path))
    monkeypatch.setattr("raysharded.checkpoint.storage.local_files._LOCK_S", 0.05)
    (tmp_path / "m").write_bytes(b"old")
    with (tmp_path / "m").open("r+b") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(StorageError, match=r"swap .*/m failed"):
            swap(storage, "m", b"old", b"new")
    assert swap(storage, "m", b"old", b"new")
    (tmp_path / "m").unlink()
    assert swap(storage, "m", b"new", b"newer") is False


def overwrite_through(storage: Storage, step: int) -> Saved:
    target = Target(uri="c", storage=storage, prefix="c", overwrite=True)
    return write(content_of(state_of(step)), target, About(step=step), Coordinator.of(None, 1.0))


@pytest.mark.parametrize("failure", ["untouched", "half", "took_effect"])
def test_a_storage_that_fails_at_any_operation_leaves_one_of_the_two_whole(tmp_path: Path, failure: str) -> None:
    api.save(tmp_path / "c", state_of(1), step=1)
    newest, fail_at = 1, 0
    while True:
        storage = FailingStorage(
            open_storage(str(tmp_path)),
            fail_at=fail_at,
            took_effect=failure == "took_effect",
            untouched=failure == "untouched",
        )
        step, fail_at = newest + 1, fail_at + 1
        try:
            overwrite_through(storage, step)
        except StorageError:
            newest = assert_whole(tmp_path / "c", newest, step)
        if not storage.fired:
            break
    assert fail_at > 6, "reads, a listing, the older manifest, a data file, a listing, the swap"
    assert assert_whole(tmp_path / "c", step) == step


def test_readers_see_one_of_the_two_at_any_moment(tmp_path: Path) -> None:
    api.save(tmp_path / "c", state_of(1), step=1)
    ended = threading.Event()

    def read() -> int:
        count = 0
        while not ended.is_set():
            assert_whole(tmp_path / "c", *range(1, 30))
            count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        for step in range(2, 20):
            api.save(tmp_path / "c", state_of(step), step=step, overwrite=True)
        ended.set()
        assert reading.result(DEADLINE_S) > 0


def test_a_runs_own_checkpoint_and_a_storage_without_swaps_are_refused(tmp_path: Path) -> None:
    import fsspec

    own = tmp_path / "step-0000000005-abc"
    api.save(own, state_of(5), step=5)
    with pytest.raises(CheckpointError, match="a run's own checkpoint"):
        api.save(own, state_of(5), step=5, overwrite=True)
    fsspec.filesystem("memory").store.clear()
    api.save("memory://place/c", state_of(1), step=1, overwrite=True)
    with pytest.raises(StorageError, match="cannot compare and swap"):
        api.save("memory://place/c", state_of(2), step=2, overwrite=True)
    assert_whole("memory://place/c", 1)


def test_a_damaged_checkpoint_can_be_overwritten(tmp_path: Path) -> None:
    api.save(tmp_path / "c", state_of(1), step=1)
    (tmp_path / "c" / "manifest.json").write_bytes(b"damaged, and //..// in the place of a digest" * 9)
    api.save(tmp_path / "c", state_of(2), step=2, overwrite=True)
    assert_whole(tmp_path / "c", 2)
    for wall in (time.time, lambda: time.time() + GRACE_S + 600):
        sweep(open_storage(str(tmp_path)), "c", wall=wall)
        assert_whole(tmp_path / "c", 2)
    assert not list(tmp_path.glob("c/replaced-*"))


def test_torchs_calls_overwrite_too(tmp_path: Path) -> None:
    state = {"w": torch.zeros(4)}
    for step in range(3):
        save({"w": torch.full((4,), float(step))}, storage_writer=RayshardedWriter(tmp_path / "c", overwrite=True))
        load(state, storage_reader=RayshardedReader(tmp_path / "c"))
        assert state["w"].tolist() == [step] * 4
    with pytest.raises(CheckpointException, match="is a checkpoint already"):
        save(state, storage_writer=RayshardedWriter(tmp_path / "c"))


def overwrite_together(rank: int, folder: str) -> int:
    return api.save(folder, {"w": torch.full((SIZE,), 2), "step": 2}, step=2, overwrite=True, timeout_s=60).step


@pytest.mark.procs
def test_ranks_overwrite_together(tmp_path: Path) -> None:
    api.save(tmp_path / "c", state_of(1), step=1)
    assert outcomes(2, overwrite_together, str(tmp_path / "c")) == [2, 2]
    assert api.open(tmp_path / "c").state()["step"] == 2
