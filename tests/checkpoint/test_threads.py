"""A pool does each piece of work once, also where the system refuses it a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from raysharded import checkpoint
from raysharded.checkpoint.threads import Threads

DEADLINE_S = 60.0


@pytest.fixture
def refuse(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Makes every start of a thread of a pool fail once so many have been started, until it is called again."""
    start, left = threading.Thread.start, [0]

    def limited(thread: threading.Thread) -> None:
        if left[0] <= 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    def limit(most: int) -> None:
        left[0] = most

    monkeypatch.setattr(threading.Thread, "start", limited)
    return limit


def test_work_that_was_queued_before_its_thread_failed_to_start_is_not_done_again(
    refuse: Callable[[int], None],
) -> None:
    done: list[int] = []
    with Threads(1) as pool:
        refuse(0)
        assert [pool.submit(lambda n=n: done.append(n) or n).result(DEADLINE_S) for n in range(3)] == [0, 1, 2]  # type: ignore[misc,func-returns-value]
        refuse(1)  # a thread starts, and takes from the queue what was put there before
        assert pool.submit(lambda: 3).result(DEADLINE_S) == 3
    assert done == [0, 1, 2]


def test_what_another_thread_of_the_pool_has_taken_is_its_own_to_finish(refuse: Callable[[int], None]) -> None:
    begun, gate = threading.Event(), threading.Event()
    done: list[int] = []

    def waits() -> str:
        begun.set()
        gate.wait(DEADLINE_S)
        return "first"

    with Threads(2) as pool:
        refuse(1)
        first = pool.submit(waits)
        assert begun.wait(DEADLINE_S)
        outcomes = [pool.submit(done.append, n) for n in range(20)]  # done here, and in the queue
        gate.set()
        assert first.result(DEADLINE_S) == "first"
        assert [outcome.result(DEADLINE_S) for outcome in outcomes] == [None] * 20
    assert sorted(done) == list(range(20))


def test_an_error_of_work_that_is_done_here_is_in_its_future(refuse: Callable[[int], None]) -> None:
    with Threads(1) as pool:
        refuse(0)
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda: 1 / 0).result(DEADLINE_S)
    with pytest.raises(RuntimeError, match="shutdown"):
        pool.submit(print)


def test_a_part_of_a_tensor_is_read_right_where_threads_are_refused(
    tmp_path: Path, refuse: Callable[[int], None]
) -> None:
    refuse(1000)
    whole = torch.arange(1024 * 4096, dtype=torch.float32).view(4096, 1024)  # 16 MiB: several chunks
    checkpoint.save(tmp_path / "a", {"w": whole}, step=1)
    opened = checkpoint.open(tmp_path / "a")
    for threads in (0, 1, 2):
        refuse(threads)
        assert torch.equal(opened.read("w", (slice(None), slice(0, 512))), whole[:, :512])


def test_a_save_whose_thread_was_refused_is_not_written_again_by_the_next_one(
    tmp_path: Path, refuse: Callable[[int], None]
) -> None:
    state = {"w": torch.ones(3)}
    with checkpoint.AsyncSaver() as saver:
        refuse(0)
        saver.save(tmp_path / "latest", state, step=1, overwrite=True)
        refuse(1000)
        state["w"] += 1
        saver.save(tmp_path / "other", state, step=2)
    assert checkpoint.open(tmp_path / "latest").read("w").tolist() == [1.0] * 3
    assert checkpoint.open(tmp_path / "other").read("w").tolist() == [2.0] * 3
