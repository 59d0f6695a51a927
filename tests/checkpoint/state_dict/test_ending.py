"""A save that was begun is finished or loudly lost: at the end of a program, from several threads, and after a fork."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharded.checkpoint import api
from raysharded.checkpoint.async_save import process_exit
from raysharded.checkpoint.async_save.pending_save import outcome_of
from raysharded.checkpoint.async_save.process_exit import BegunSave, _Unflushable
from raysharded.errors import CheckpointError, StorageError
from tests.checkpoint.state_dict import last_save
from tests.checkpoint.state_dict.test_beside import DEADLINE_S, Gate, gate as gate
from tests.forked import in_a_fork

CASES = {"exit": 3, "raises": 1, "forgets": 0, "goes on": 0, "fails": 120, "closes": 120, "beside": 120}
"""A program's way to end -> its exit status."""
TRIED = ["exit", "goes on", "fails"]


@pytest.mark.procs
@pytest.mark.parametrize("ways", [TRIED, pytest.param(list(CASES), marks=pytest.mark.long)], ids=len)
def test_the_last_saves_of_a_program_are_finished_and_its_status_reports_a_lost_one(
    tmp_path: Path, ways: list[str]
) -> None:
    cases = {how: CASES[how] for how in ways}
    ran = subprocess.run(
        [sys.executable, str(last_save.__file__), str(tmp_path), *cases],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=240,
        check=True,
    )
    said = {how: (tmp_path / f"{how}.err").read_text() for how in cases}
    assert json.loads(ran.stdout) == cases, said
    for how, status in cases.items():
        if status != 120:
            assert api.open(tmp_path / how / "last").step == 7
            assert "lost" not in said[how]
    assert api.open(tmp_path / "goes on" / "torch-9").step == 9, "torch's thread went on when pools took no more work"
    assert api.open(tmp_path / "goes on" / "atexit").step == 8, "so did a function that atexit called"
    assert api.open(tmp_path / "goes on" / "thread").step == 10, "and a thread that Python joins"
    for how in {"fails", "closes", "beside"} & cases.keys():
        assert "the save of step 7 to" in said[how]
        assert "its exit status is 120" in said[how]


def test_a_failure_that_was_raised_in_the_program_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with api.AsyncSaver() as saver:
        told = saver.save(tmp_path / "file" / "c", {"w": torch.ones(1)})
        with pytest.raises(StorageError, match="folder"):
            told.result(DEADLINE_S)
        assert not outcome_of(told).is_lost
        silent = saver.save(tmp_path / "file" / "d", {"w": torch.ones(1)})
    assert silent.done
    assert outcome_of(silent).is_lost
    assert outcome_of(silent) in lost_saves()
    with api.AsyncSaver() as saver:
        saver.save(tmp_path / "c", {"w": torch.ones(1)})
    assert lost_saves() == [], "a newer one is there"


def test_a_save_of_another_saver_hides_no_loss(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    weights, average = api.AsyncSaver(when_busy="wait"), api.AsyncSaver(when_busy="wait")
    lost = weights.save(tmp_path / "file" / "c", {"w": torch.ones(1)})
    wait_for(lost)
    assert average.save(tmp_path / "average", {"w": torch.ones(1)}).result(DEADLINE_S).step == 0
    assert lost_saves() == [outcome_of(lost)]
    assert average.save(tmp_path / "another", {"w": torch.ones(1)}).result(DEADLINE_S).step == 0
    assert lost_saves() == [outcome_of(lost)]
    assert weights.save(tmp_path / "c", {"w": torch.ones(1)}).result(DEADLINE_S).step == 0
    weights.close()
    average.close()
    assert lost_saves() == []


def lost_saves() -> list[BegunSave]:
    return [save for save, _ in process_exit._saves.failed.values() if save.is_lost]


def wait_for(pending: api.PendingSave) -> None:
    """Return when the save has ended, and all that follows from that. Its exception stays with it."""
    outcome_of(pending).wait()
    while outcome_of(pending) in process_exit._saves.going_on:
        pass


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_saver_continues_after_a_save_that_could_not_be_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    saver = api.AsyncSaver(when_busy="wait")

    def refuse(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(saver._pool, "submit", refuse)
        with pytest.raises(type(error)):
            saver.save(tmp_path / "c", {"w": torch.ones(1)}, step=1)
    assert not process_exit._saves.going_on
    assert saver.save(tmp_path / "c", {"w": torch.ones(1)}, step=2).result(DEADLINE_S).step == 2
    saver.close()


def test_streams_fail_to_flush_for_the_interpreter_alone(capsys: pytest.CaptureFixture[str]) -> None:
    stream = _Unflushable(sys.stderr)
    print("through it", file=stream, flush=True)
    assert capsys.readouterr().err == "through it\n"


@pytest.mark.parametrize("when_busy", ["wait", "skip"])
def test_threads_that_share_a_saver_save_what_each_gave(tmp_path: Path, when_busy: Any) -> None:
    saver = api.AsyncSaver(when_busy=when_busy)
    pending: dict[int, api.PendingSave] = {}

    def save(number: int) -> None:
        for turn in range(4):
            step = number * 4 + turn
            pending[step] = saver.save(tmp_path / str(step), {"w": torch.full((20_000,), step)}, step=step)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    saver.close()
    saved = [step for step, save in pending.items() if not save.skipped]
    assert len(pending) == 32
    assert saved
    assert when_busy == "skip" or len(saved) == 32
    for step in saved:
        assert pending[step].result(DEADLINE_S).step == step
        assert api.open(tmp_path / str(step)).read("w").unique().tolist() == [step]


def in_a_child(act: Callable[[], None]) -> None:
    """Run `act` in a fork of this process. Raises if it raises, or hangs."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            act()
            status = 0
        finally:
            os._exit(status)
    ended = threading.Event()
    threading.Timer(DEADLINE_S, lambda: None if ended.is_set() else os.kill(pid, 9)).start()
    _, status = os.waitpid(pid, 0)
    ended.set()
    assert status == 0


def save_across_a_fork(folder: str) -> None:
    """Fork while a save is being written and a thread holds the saver's lock."""
    with pytest.MonkeyPatch.context() as patch:
        gate = Gate(patch)
        saver = api.AsyncSaver(when_busy="wait")
        pending = saver.save(f"{folder}/parent", {"w": torch.ones(4)}, step=1)
        assert gate.reached.wait(DEADLINE_S)
        waits = threading.Thread(target=lambda: saver.save(f"{folder}/second", {"w": torch.ones(4)}, step=2))
        waits.start()
        while not saver._lock.locked():
            pass

        def child() -> None:
            assert pending.done
            assert not pending.skipped
            with pytest.raises(CheckpointError, match="by the process that this one was forked from"):
                pending.result()
            gate.opened.set()
            assert saver.save(f"{folder}/child", {"w": torch.zeros(4)}, step=3).result(DEADLINE_S).step == 3
            saver.close()

        in_a_child(child)
        gate.opened.set()
        waits.join(DEADLINE_S)
        assert pending.result(DEADLINE_S).step == 1
        saver.close()


@pytest.mark.procs
def test_a_forked_child_has_a_separate_saver(tmp_path: Path) -> None:
    in_a_fork(save_across_a_fork, str(tmp_path))
    assert {path.name: api.open(path).step for path in tmp_path.iterdir()} == {"parent": 1, "second": 2, "child": 3}
