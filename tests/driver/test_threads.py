"""A driver leaves no thread behind, in all of its endings."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from raysharded.checkpoint import Claims, open_storage
from raysharded.checkpoint.retention.policy import Keep
from raysharded.clock import SystemClock
from raysharded.driver.driver import Driver
from raysharded.errors import ClusterError, RunOwnedElsewhere
from raysharded.journal.log import Journal, read
from raysharded.journal.writer import Recorder
from raysharded.ownership.lease import Holder, encode, lease_key, read_lease
from raysharded.ownership.process_identity import this_process
from raysharded.protocol.session import DriverSession, FoundWorkers
from raysharded.protocol.worker_launcher import LeadershipCheck
from raysharded.testing.processes import ProcessLauncher
from tests.training.harness import files_of, make_driver, make_job, make_limits


def test_a_driver_that_is_refused_has_started_no_thread(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    alive = Holder(driver="alive", host="h", process=this_process(), since=0.0, lease_s=60.0)
    Claims(storage, "alive").own(1)
    storage.write(lease_key("alive"), [encode(alive)])
    stop = threading.Event()

    def beat() -> None:
        beats = 0
        while not stop.wait(0.05):
            beats += 1
            storage.write(lease_key("alive"), [encode(replace(alive, beat=beats))])

    beating = threading.Thread(target=beat)
    beating.start()
    before = set(threading.enumerate())
    try:
        job = make_job(str(tmp_path))
        driver = make_driver(job, make_limits(job, 1), lambda _kind, _fields: None)
        with pytest.raises(RunOwnedElsewhere):
            driver.restore()
        assert set(threading.enumerate()) <= before
    finally:
        stop.set()
        beating.join()


def test_a_journal_that_is_anothers_by_now_is_left_alone(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    before = set(threading.enumerate())
    recorder = Recorder(Journal(storage, SystemClock(), "driver"), SystemClock())
    recorder.record("started", {}, durable=True)
    recorder.flush()
    recorder.record("step", {})
    recorder.abandon()
    deadline = time.monotonic() + 60.0
    while set(threading.enumerate()) - before:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert [entry["kind"] for entry in read(storage)] == ["started"]


class InterruptedAtTheEnd(ProcessLauncher):
    """No cluster is there, and Ctrl-C comes while workers are ended."""

    def enter(self, terms: DriverSession, hold: LeadershipCheck) -> FoundWorkers:
        raise ClusterError("no cluster")

    def close(self) -> None:
        super().close()
        raise KeyboardInterrupt


def test_a_driver_that_is_interrupted_while_it_ends_its_workers_releases_its_run(tmp_path: Path) -> None:
    before, job = set(threading.enumerate()), make_job(str(tmp_path))
    files = files_of(job, None, keep=Keep(last=1), metadata={}, key=None)
    launcher = InterruptedAtTheEnd(job)
    driver = Driver(make_limits(job, 1), launcher, files, SystemClock(), lambda _kind, _fields: None)
    with pytest.raises(KeyboardInterrupt):
        driver.run()
    holder = read_lease(files.storage, driver.state.driver).holder
    assert holder is not None
    assert holder.ended, "another driver does not wait for it"
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "lease"]
