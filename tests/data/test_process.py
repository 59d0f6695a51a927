"""The process that reads a worker's data: its results, and its end."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from raysharded.actors.process.os_processes import start_ticks
from raysharded.actors.telemetry.stack_probe import frames_of_dump
from raysharded.data.access.reader import Draws
from raysharded.data.access.reader_process import DataProcess, ProcessReader
from raysharded.data.access.repeat_check import differ
from raysharded.data.access.sample_reader import DatasetReader
from raysharded.errors import TaskError
from tests.data.samples import Drawing, Large, Unlike, leave_torch_alone, two_threads
from tests.forked import in_a_fork, readers_as_in_a_worker as readers_as_in_a_worker

pytestmark = pytest.mark.procs
DEADLINE_S = 30.0


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def reader_of(data: Any, settings: Callable[[], None] = leave_torch_alone) -> tuple[DataProcess, ProcessReader]:
    process = DataProcess([data, None], refuses=True, settings=settings)
    return process, ProcessReader(process, 0, type(data).__name__)


@pytest.fixture(scope="module")
def fresh() -> Iterator[tuple[DataProcess, ProcessReader]]:
    """A fresh interpreter, as no server has forked this process."""
    process, reader = reader_of(Large(40_000))
    yield process, reader
    process.close()


def test_samples_of_a_fresh_interpreter_stay_as_they_are_while_anybody_has_them(
    fresh: tuple[DataProcess, ProcessReader],
) -> None:
    process, reader = fresh
    assert reader.num_samples() == 50
    kept = [reader.read_samples([index, index + 1], "now", 0) for index in range(6)]
    for _ in range(20):
        reader.read_samples([49, 49], "now", 0)
    for index, reads in enumerate(kept):
        assert reads.ids == [index, index + 1]
        for number, sample in zip(reads.ids, reads.samples, strict=True):
            assert sample["name"] == f"sample {number}"
            assert sample["pid"] == process.pid != os.getpid()
            assert (sample["values"] == number).all()
            sample["values"] += 1  # it is the reader's own
    assert process._started is not None
    assert len(process._started.receiver._segments) <= len(kept) + 4, "segments are used again"


def test_a_process_reads_what_this_one_reads_and_settles_torch_when_that_is_loaded() -> None:
    process, reader = reader_of(Drawing(with_torch=True), two_threads)
    try:
        reader.check([0, 7])
        reads = reader.read_samples([3, 4, 3], "now", 5)
        here = DatasetReader(Drawing(with_torch=True), draws=Draws(refuses=True, puts_back=True))
        threads = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            expected = here.read_samples([3, 4, 3], "now", 5)
        finally:
            torch.set_num_threads(threads)
        assert not differ(reads.samples, expected.samples)
        assert reads.samples[0]["half"].dtype == torch.bfloat16
        assert reads.samples[0]["none"].shape == (0, 2)
        assert reads.samples[0]["threads"] == 2
        torch.set_default_dtype(torch.float64)  # as a task's build_model may
        try:
            assert reader.read_samples([3], "now", 5).samples[0]["number"].dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert reader.read_samples([3], "now", 5).samples[0]["number"].dtype == torch.float32
    finally:
        process.close()


def test_torch_is_not_loaded_for_data_that_do_not_need_it(fresh: tuple[DataProcess, ProcessReader]) -> None:
    process, reader = reader_of(Drawing(with_torch=False), two_threads)
    try:
        assert reader.read_samples([3], "now", 5).samples[0]["torch loaded"] is False
    finally:
        process.close()


# -- in a worker that was forked from the server --


def _awkward(folder: Path) -> dict[str, Any]:
    process, reader = reader_of(Unlike(folder))
    found: dict[str, Any] = {"first": process.pid}
    for index in (1, 2, 4, 5):
        try:
            reader.read_samples([index], "now", 0)
        except TaskError as error:
            found[str(index)] = (str(error), error.user_traceback)
    found["then"] = reader.read_samples([6], "now", 0).samples[0]["number"]
    found["last"] = process.pid
    process.close()
    found["left"] = start_ticks(found["last"])
    try:
        reader.read_samples([6], "now", 0)
    except RuntimeError as error:
        found["closed"] = str(error)
    return found


def test_what_goes_wrong_in_it_is_an_error_with_words_and_it_continues(tmp_path: Path) -> None:
    found = in_a_fork(_awkward, tmp_path)
    text, _ = found["1"]
    assert (
        "the process that reads the data ended with exit code 7; it was started again, and ended with exit code 7"
        in text
    )
    assert "read_samples(0, [1], 'now', 0)" in text
    text, _ = found["2"]
    assert "cannot be pickled and so cannot leave the process that reads it" in text
    text, traceback = found["4"]
    assert "Unlike[4] raised now: KeyError: 'no such row'" in text
    assert 'raise KeyError("no such row")' in traceback
    text, _ = found["5"]
    assert "KeyboardInterrupt" in text
    assert found["then"] == 6
    assert found["last"] != found["first"], "it was started again"
    assert found["left"] is None
    assert found["closed"] == "this loader is closed"


def _hang(folder: Path) -> None:
    """Never ends by itself."""
    process, reader = reader_of(Unlike(folder))
    reader.read_samples([0], "now", 0)
    threading.Thread(target=reader.read_samples, args=([3], "now", 0), daemon=True).start()
    wait_until((folder / "hangs").exists)
    while not (stacks := process.stacks()) or frames_of_dump(stacks)[-1].name != "__getitem__":
        time.sleep(0.01)  # it is on its way there
    (folder / "seen").write_text(pickle.dumps((os.getpid(), process.pid, stacks), 0).decode("latin1"))
    os.rename(folder / "seen", folder / "told")
    threading.Event().wait()


def test_it_is_seen_where_it_hangs_and_dies_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    waiting = threading.Thread(target=_hang_and_die, args=(tmp_path,))
    waiting.start()
    wait_until((tmp_path / "told").exists)
    worker, reading, stacks = pickle.loads((tmp_path / "told").read_text().encode("latin1"))
    assert start_ticks(reading) is not None
    frames = frames_of_dump(stacks)
    assert (frames[-1].name, frames[-1].line) == ("__getitem__", "lock(mutex)")
    os.kill(worker, signal.SIGKILL)
    waiting.join(DEADLINE_S)
    wait_until(lambda: start_ticks(reading) is None)


def _hang_and_die(folder: Path) -> None:
    with pytest.raises(EOFError):
        in_a_fork(_hang, folder)


class Closed:
    """Does not pickle."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_data_that_cannot_be_pickled_are_refused_with_the_way_out() -> None:
    with pytest.raises(TaskError, match=r"cannot pickle '_thread.lock' object\. .* EngineConfig\(prefetch=False\)"):
        DataProcess([Closed()], refuses=True, settings=leave_torch_alone)


@pytest.mark.usefixtures("readers_as_in_a_worker")
def test_one_that_was_killed_is_reported_when_it_is_replaced_and_not_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A kill of all processes of a worker often comes to this one first: then the worker prints nothing."""
    process, reader = reader_of(Unlike(tmp_path))
    try:
        with pytest.raises(TaskError, match="both times"):
            reader.read_samples([1], "now", 0)  # it ends, and so does the one in its place
        assert caplog.messages == []
        assert reader.read_samples([6], "now", 0).ids == [6]
        killed = process.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        assert reader.read_samples([6], "now", 0).ids == [6]
        (message,) = caplog.messages
        assert message.startswith(f"process {killed}, which read the data, was ended by SIGKILL")
    finally:
        process.close()
