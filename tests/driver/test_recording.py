"""Promises of the driver's journal thread: order, no waiting, a pause after a failure, and a bounded end."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raysharded.checkpoint import Storage, open_storage
from raysharded.clock import Clock, SystemClock
from raysharded.errors import RunOwnedElsewhere, StorageError
from raysharded.journal.log import Journal, read
from raysharded.journal.writer import BACK_OFF_S, Recorder
from tests.driver.test_journal import SetClock
from tests.ray.leftovers import wait_until

WAIT_S = 20.0


class Unreliable:
    """A storage whose puts wait until they may go, or fail."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.reached, self.may_go = threading.Event(), threading.Event()
        self.may_go.set()
        self.fails = False
        self.tries = 0

    def put_if_absent(self, key: str, data: bytes) -> bool:
        self.tries += 1
        self.reached.set()
        assert self.may_go.wait(WAIT_S)
        if self.fails:
            raise StorageError("the bucket does not answer")
        return self._storage.put_if_absent(key, data)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


@pytest.fixture
def clock() -> SetClock:
    return SetClock()


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[Unreliable]:
    unreliable = Unreliable(open_storage(str(tmp_path)))
    yield unreliable
    unreliable.may_go.set()


def recorder(storage: Unreliable, clock: Clock, writer: str = "me") -> Recorder:
    return Recorder(Journal(storage, clock, writer), clock)  # type: ignore[arg-type]  # forwards the rest


def steps(storage: Unreliable) -> list[int]:
    return [entry["step"] for entry in read(storage)]  # type: ignore[arg-type]  # as above


def test_who_records_never_waits_for_storage_and_entries_keep_their_order_and_their_time(
    storage: Unreliable, clock: SetClock
) -> None:
    storage.may_go.clear()
    record = recorder(storage, clock)
    record.record("step", {"step": 0}, durable=True)
    assert storage.reached.wait(WAIT_S)
    for step in range(1, 5):
        clock.now += 1
        record.record("step", {"step": step}, durable=step == 2)
    storage.may_go.set()
    record.flush()
    assert steps(storage) == [0, 1, 2, 3, 4]
    assert [entry["at"] for entry in read(storage)] == [1000.5, 1001.5, 1002.5, 1003.5, 1004.5]  # type: ignore[arg-type]


def test_after_a_failure_storage_is_left_alone_for_a_while_and_nothing_is_lost(
    storage: Unreliable, clock: SetClock
) -> None:
    storage.fails = True
    record = recorder(storage, clock)
    for step in range(10):
        record.record("step", {"step": step}, durable=True)
    record.flush()
    assert storage.tries == 1
    storage.fails = False
    clock.now += BACK_OFF_S
    record.record("step", {"step": 10})
    record.flush()
    record.raise_error()
    assert steps(storage) == list(range(11))


def test_entries_are_written_in_time_though_none_follows(tmp_path: Path) -> None:
    """As when a run pauses: its status comes from the journal."""
    storage, clock = open_storage(str(tmp_path)), SystemClock()
    record = Recorder(Journal(storage, clock, "me", flush_interval_s=0.2), clock)
    record.record("started", {}, durable=True)
    record.flush()
    for kind in ("step", "paused"):
        record.record(kind, {"step": 1})
    wait_until(lambda: len(list(read(storage))) == 3, "the entry of the pause", WAIT_S)
    record.close(WAIT_S)


def test_however_many_wait_for_a_slow_storage_one_segment_serves_them_all(storage: Unreliable, clock: SetClock) -> None:
    storage.may_go.clear()
    record = recorder(storage, clock)
    record.record("step", {"step": 0}, durable=True)
    assert storage.reached.wait(WAIT_S)
    marks = []
    for step in range(1, 100):
        record.record("step", {"step": step}, durable=True)
        marks.append(record.mark())
    storage.may_go.set()
    for written in marks:
        written()
    assert steps(storage) == list(range(100))
    assert storage.tries == 2


def test_a_failure_is_known_with_its_beginning_until_a_write_succeeds(storage: Unreliable, clock: SetClock) -> None:
    storage.fails = True
    record = recorder(storage, clock)
    for seconds in range(3):
        clock.now = 1000.0 + 100 * seconds
        record.record("step", {"step": 1}, durable=True)
        record.flush()
    assert storage.tries == 3
    failure = record.failure
    assert failure is not None
    assert failure.since == 1000.0
    assert "does not answer" in str(failure.error)
    record.raise_error()
    storage.fails = False
    clock.now += BACK_OFF_S
    record.flush()
    assert record.failure is None


def test_the_end_waits_no_longer_than_its_limit(storage: Unreliable, clock: SetClock) -> None:
    storage.may_go.clear()
    record = recorder(storage, clock)
    record.record("step", {"step": 1}, durable=True)
    with pytest.raises(StorageError, match="could not be written within"):
        record.close(0.01)


def test_the_end_is_tried_once_more_though_storage_just_failed(storage: Unreliable, clock: SetClock) -> None:
    storage.fails = True
    record = recorder(storage, clock)
    record.record("step", {"step": 1}, durable=True)
    record.flush()
    storage.fails = False
    record.close(WAIT_S)
    assert steps(storage) == [1]
    record.flush()  # nobody writes any more, and nobody waits


def test_the_end_is_tried_again_until_its_limit(storage: Unreliable) -> None:
    storage.fails = True
    record = recorder(storage, SystemClock())
    record.record("step", {"step": 1}, durable=True)
    record.flush()
    tries = storage.tries
    threading.Timer(1.0, lambda: setattr(storage, "fails", False)).start()
    record.close(WAIT_S)
    assert storage.tries > tries + 1
    assert steps(storage) == [1]


def test_the_end_of_a_failed_run_is_not_tried_for_long(storage: Unreliable) -> None:
    storage.fails = True
    record = recorder(storage, SystemClock())
    record.record("step", {"step": 1}, durable=True)
    record.flush()
    tries = storage.tries
    with pytest.raises(StorageError, match="does not answer"):
        record.close(WAIT_S, repeat_s=0.0)
    assert storage.tries == tries + 1


def test_another_driver_of_the_run_is_reported(storage: Unreliable, clock: SetClock) -> None:
    mine, other = recorder(storage, clock), recorder(storage, clock, "other")
    other.record("started", {}, durable=True)
    other.flush()
    mine.record("started", {}, durable=True)
    mine.flush()
    with pytest.raises(RunOwnedElsewhere):
        mine.raise_error()
