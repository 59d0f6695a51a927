"""The newest complete checkpoint is found, what is broken is reported, and pruning never takes the last good one."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from raysharded.checkpoint import Storage, list_checkpoints, newest_complete, open_storage, prune, save_prefix
from raysharded.checkpoint.fakes import FailingStorage, save_rows
from raysharded.errors import CheckpointError, CorruptCheckpoint, IncompleteCheckpoint, StorageError


@pytest.fixture(params=["local", "memory"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    return open_storage(str(tmp_path / "run") if request.param == "local" else f"memory://{tmp_path}/run")


def _save(storage: Storage, step: int, save_id: str = "a") -> str:
    arrays = {"w": np.arange(20, dtype=np.float32) + step}
    return save_rows(storage, arrays, step=step, save_id=save_id, num_writers=2)


def _unfinished(storage: Storage, step: int, save_id: str = "u") -> str:
    prefix = _save(storage, step, save_id)
    storage.delete([f"{prefix}/manifest.json"])
    return prefix


def _steps(storage: Storage) -> list[tuple[int, bool]]:
    return [(ref.step, ref.complete) for ref in list_checkpoints(storage)]


def test_a_run_without_saves_has_none(storage: Storage) -> None:
    assert list_checkpoints(storage) == []
    assert newest_complete(storage).checkpoint is None
    assert prune(storage, 1) == []


def test_saves_are_listed_oldest_first_whatever_else_is_there(storage: Storage) -> None:
    for step in (100, 20, 3):
        _save(storage, step)
    _unfinished(storage, 50)
    for key in ("checkpoints/note.txt", "checkpoints/step-x/manifest.json", "journal/0", "other/step-0000000007-a/x"):
        storage.write(key, [b"?"])
    assert _steps(storage) == [(3, True), (20, True), (50, False), (100, True)]


def test_steps_beyond_ten_digits_stay_in_order(storage: Storage) -> None:
    _save(storage, 10**10)
    _save(storage, 10**10 - 1)
    assert _steps(storage) == [(10**10 - 1, True), (10**10, True)]


def test_the_newest_complete_is_opened_and_unfinished_ones_are_reported(storage: Storage) -> None:
    _save(storage, 1)
    expected = _save(storage, 2)
    broken = _unfinished(storage, 3)
    newest = newest_complete(storage)
    assert newest.checkpoint is not None
    assert newest.checkpoint.prefix == expected
    assert [skip.ref.prefix for skip in newest.skipped] == [broken]
    assert "never committed" in newest.skipped[0].reason
    assert broken in newest.skipped[0].reason


def test_a_damaged_newest_is_an_error_unless_skipping_is_allowed(storage: Storage) -> None:
    good, bad, lost = _save(storage, 1), _save(storage, 2), _save(storage, 3)
    storage.write(f"{bad}/manifest.json", [b'{"digest":"torn'])
    storage.delete([f"{lost}/w0001.safetensors"])
    with pytest.raises(IncompleteCheckpoint, match=r"step 3: 1 of 2 data files .*w0001"):
        newest_complete(storage)
    newest = newest_complete(storage, skip_damaged=True)
    assert newest.checkpoint is not None
    assert newest.checkpoint.prefix == good
    assert [skip.ref.prefix for skip in newest.skipped] == [lost, bad]
    storage.delete(key for key in storage.list(lost))
    with pytest.raises(CorruptCheckpoint, match=bad):
        newest_complete(storage)


def test_pruning_keeps_the_newest_and_removes_every_file_of_the_rest(storage: Storage) -> None:
    prefixes = [_save(storage, step) for step in (1, 2, 3, 4)]
    storage.write(f"{prefixes[0]}/w0000.safetensors.tmp-0123", [b"left behind"])
    assert prune(storage, 2) == prefixes[:2]
    assert _steps(storage) == [(3, True), (4, True)]
    assert {key.rsplit("/", 1)[0] for key in storage.list()} == set(prefixes[2:])
    assert prune(storage, 2) == []
    assert prune(storage, 1) == prefixes[2:3]
    with pytest.raises(CheckpointError, match="keep_last=0"):
        prune(storage, 0)


def test_pruning_removes_debris_below_the_newest_complete_step_that_no_one_is_writing(storage: Storage) -> None:
    old, flying = _unfinished(storage, 1), _unfinished(storage, 2)
    _save(storage, 5)
    same, newer = _unfinished(storage, 5), _unfinished(storage, 9)
    assert prune(storage, 2, in_flight={flying}) == [old]
    assert {ref.prefix for ref in list_checkpoints(storage) if not ref.complete} == {flying, same, newer}


def test_pruning_without_a_usable_checkpoint_deletes_nothing(storage: Storage) -> None:
    _unfinished(storage, 1)
    bad = _save(storage, 2)
    storage.write(f"{bad}/manifest.json", [b"torn"])
    before = storage.list()
    assert prune(storage, 1) == []
    assert storage.list() == before


def test_a_damaged_newest_does_not_count_among_those_kept(storage: Storage) -> None:
    _save(storage, 1)
    good, bad = _save(storage, 2), _save(storage, 3)
    storage.delete([f"{bad}/w0000.safetensors"])
    prune(storage, 1)
    newest = newest_complete(storage, skip_damaged=True).checkpoint
    assert newest is not None
    assert newest.prefix == good
    newest.verify()
    assert _steps(storage) == [(2, True), (3, True)]


def test_a_pruning_that_is_interrupted_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    for fail_at in range(100):
        storage = open_storage(str(tmp_path / str(fail_at)))
        for step in (1, 2, 3):
            _save(storage, step)
        failing = FailingStorage(storage, fail_at=fail_at)
        with suppress(StorageError):
            prune(failing, 1)
        newest = newest_complete(storage)
        assert newest.checkpoint is not None
        assert newest.checkpoint.step == 3
        for ref in list_checkpoints(storage):
            if ref.complete:
                assert len(ref.keys) == 3, "a committed checkpoint has lost a file"
        prune(storage, 1)
        assert storage.list() == storage.list(save_prefix(3, "a"))
        if not failing.fired:
            assert fail_at > 5
            return
    raise AssertionError("pruning never came to its end")
