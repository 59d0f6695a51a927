"""The moment when a run may be followed: a watcher's verdict on a lease, and two drivers that want the same run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from raysharded.checkpoint import Claims, SigningKey, Storage, open_storage
from raysharded.checkpoint.format.signing import place_of
from raysharded.clock import SystemClock
from raysharded.errors import RunFailed, RunOwnedElsewhere, StorageError
from raysharded.ownership.leadership import AcquiredLease, LeaseTerms, RunLeadership
from raysharded.ownership.lease import Holder, LeaseVerdict, Process, Seen, decode, encode, judge, lease_key, read_lease
from raysharded.ownership.process_identity import is_gone, this_process

HOLDER = Holder(
    driver="a1b2", host="node-1", process=Process(machine="boot/1", pid=7, started=99), since=0.0, lease_s=15.0
)


def seen(holder: Holder) -> Seen:
    return decode(encode(holder), "lease/a1b2.json")


def test_a_lease_is_read_as_it_was_written() -> None:
    holder = replace(HOLDER, cluster="gcs/session", job="01", beat=3, ended=True)
    assert seen(holder).holder == holder


@pytest.mark.parametrize("data", [b"", b"{}", encode(HOLDER)[:-5]])
def test_a_lease_that_is_torn_has_no_holder_and_still_shows_whether_it_changes(data: bytes) -> None:
    torn = decode(data, "lease")
    assert torn.holder is None
    assert judge(torn, torn, 14.0, dead=False, own_lease_s=15.0) is LeaseVerdict.UNKNOWN
    assert judge(torn, torn, 16.0, dead=False, own_lease_s=15.0) is LeaseVerdict.EXPIRED
    assert judge(torn, seen(HOLDER), 1.0, dead=False, own_lease_s=15.0) is LeaseVerdict.HELD


@pytest.mark.parametrize(
    ("now", "watched_s", "dead", "verdict"),
    [
        (None, 0.0, False, LeaseVerdict.FREE),
        (seen(replace(HOLDER, ended=True)), 0.0, False, LeaseVerdict.FREE),
        (seen(HOLDER), 0.0, True, LeaseVerdict.DEAD),
        (seen(HOLDER), 0.0, False, LeaseVerdict.UNKNOWN),
        (seen(HOLDER), 15.0, False, LeaseVerdict.UNKNOWN),
        (seen(HOLDER), 15.1, False, LeaseVerdict.EXPIRED),
        (seen(replace(HOLDER, beat=1)), 0.5, False, LeaseVerdict.HELD),
        (seen(replace(HOLDER, beat=1)), 100.0, False, LeaseVerdict.HELD),  # the watcher slept: it is there all the same
        (seen(replace(HOLDER, lease_s=60.0)), 30.0, False, LeaseVerdict.HELD),
    ],
)
def test_who_watches_a_lease_follows_only_whom_it_knows_to_be_dead(
    now: Seen | None, watched_s: float, dead: bool, verdict: LeaseVerdict
) -> None:
    assert judge(seen(HOLDER), now, watched_s, dead=dead, own_lease_s=15.0) is verdict


def test_a_lease_that_the_key_did_not_sign_for_its_place_frees_no_run(tmp_path: Path) -> None:
    storage, key, other = open_storage(str(tmp_path / "run")), SigningKey(b"k" * 16), SigningKey(b"o" * 16)
    at, ended = lease_key("driver"), replace(HOLDER, ended=True)
    place = place_of(storage.url, at)
    forged = [encode(ended), encode(ended, key=other, place=place), encode(ended, key=key, place="another/run")]
    for data in forged:
        storage.write(at, [data])
        found = read_lease(storage, "driver", key=key)
        assert found.holder is None
        assert judge(None, found, 0.0, dead=False, own_lease_s=15.0) is LeaseVerdict.UNKNOWN
    storage.write(at, [encode(ended, key=key, place=place)])
    assert judge(None, read_lease(storage, "driver", key=key), 0.0, dead=False, own_lease_s=15.0) is LeaseVerdict.FREE


def test_the_longer_lease_counts() -> None:
    long = seen(replace(HOLDER, lease_s=60.0))
    assert judge(long, long, 30.0, dead=False, own_lease_s=15.0) is LeaseVerdict.UNKNOWN
    assert judge(seen(HOLDER), seen(HOLDER), 30.0, dead=False, own_lease_s=60.0) is LeaseVerdict.UNKNOWN


def test_a_process_is_known_to_be_dead_when_it_ended_or_another_has_its_number() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        here = this_process()
        started = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        process = Process(machine=here.machine, pid=child.pid, started=started)
        assert not is_gone(process)
        assert is_gone(replace(process, started=started + 1))
        assert not is_gone(replace(process, machine="another", started=started + 1))
        child.kill()
        child.wait()
        assert is_gone(process)
    assert not is_gone(here)


def test_a_process_that_proc_hides_is_not_taken_for_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = this_process()
    boot, space = here.machine.split("/", 1)
    (tmp_path / "sys/kernel/random").mkdir(parents=True)
    (tmp_path / "sys/kernel/random/boot_id").write_text(boot)
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to(space)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        monkeypatch.setattr("raysharded.ownership.process_identity._PROC", tmp_path)
        process = replace(here, pid=child.pid)
        assert not is_gone(process)
        child.kill()
        child.wait()
        assert is_gone(process)


# -- two drivers --


class Driver:
    """The parts of a driver that matter here: its claims, its hold on the run, its messages in and out."""

    def __init__(self, storage: Storage, name: str, **terms: object) -> None:
        self.told: list[str] = []
        self.disowned = threading.Event()
        self.said: list[dict[str, object]] = []
        self.claims = Claims(storage, name)
        lease = LeaseTerms(**{"lease_s": 0.6, **terms})  # type: ignore[arg-type]
        self.ownership = RunLeadership(
            "run",
            storage,
            self.claims,
            SystemClock(),
            lease,
            self._lose,
            self.said.append,
            where=("", ""),
            has_ended=lambda _cluster, _job: False,
        )

    def _lose(self, reason: str) -> None:
        self.told.append(reason)
        self.disowned.set()


@contextmanager
def drivers(*all_of_them: Driver) -> Iterator[None]:
    try:
        yield
    finally:
        for driver in all_of_them:
            driver.ownership.end(5.0)


class Silent:
    """A driver's view of storage in which its heartbeat does not arrive, as if it stood still."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.silent = False

    def write(self, key: str, parts: list[bytes]) -> None:
        if self.silent and key.startswith("lease/"):
            raise StorageError("does not answer")
        self._storage.write(key, parts)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


class Hangs:
    """A storage whose claims cannot be read until `now` is set: the request just hangs."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.now = threading.Event()
        self.now.set()

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        if key.startswith("claims/"):
            assert self.now.wait(20.0)
        return self._storage.read(key, offset, size)

    def __getattr__(self, name: str) -> object:
        return getattr(self._storage, name)


def test_a_run_that_is_held_is_refused_and_one_that_was_released_is_free_at_once(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    first, second = Driver(storage, "first"), Driver(storage, "second")
    with drivers(first, second):
        assert first.ownership.acquire().first == 1
        with pytest.raises(RunOwnedElsewhere, match=rf"driver first \(process {os.getpid()} on "):
            second.ownership.acquire()
        first.ownership.end(5.0)
        acquired = second.ownership.acquire()
    assert acquired.first == 2
    assert acquired.because == "it ended, or never held a lease"
    assert second.said[0]["lease_s"] == 0.6  # the first time it was not sure


def test_who_is_silent_for_the_leases_time_is_followed_and_learns_of_it(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    hers = Silent(storage)
    first, second = Driver(hers, "first"), Driver(storage, "second")  # type: ignore[arg-type]  # has all methods
    with drivers(first, second):
        first.ownership.acquire()
        assert first.ownership.may_act()
        hers.silent = True
        began = time.monotonic()
        acquired = second.ownership.acquire()
        assert time.monotonic() - began > 0.6
        assert acquired.because == "it gave no sign of life"
        assert first.disowned.wait(10.0)
        assert "driver second has taken over" in first.told[0]
        assert not first.ownership.may_act()
        assert second.ownership.may_act()


def test_a_run_is_taken_by_force_without_waiting(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    first, second = Driver(storage, "first", lease_s=60.0), Driver(storage, "second", lease_s=60.0, take_over=True)
    with drivers(first, second):
        first.ownership.acquire()
        assert second.ownership.acquire().because == "a takeover was requested"


def test_of_two_that_want_to_follow_at_once_one_is_refused(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    Claims(storage, "long gone").own(1)
    both = [Driver(storage, "one"), Driver(storage, "other")]
    outcomes: list[str] = []
    start = threading.Barrier(2)

    def acquire(driver: Driver) -> None:
        start.wait(10.0)
        try:
            driver.ownership.acquire()
            outcomes.append("owns")
        except RunOwnedElsewhere:
            outcomes.append("refused")

    threads = [threading.Thread(target=acquire, args=(driver,)) for driver in both]
    with drivers(*both):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
        assert len(storage.list("lease")) == 1
    assert sorted(outcomes) == ["owns", "refused"]


def test_a_wait_can_be_abandoned(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    Claims(storage, "first").own(1)
    storage.write(lease_key("first"), [encode(replace(HOLDER, driver="first", lease_s=60.0))])
    waiting: list[Driver] = []
    second = Driver(storage, "second", given_up=lambda: any(driver.said for driver in waiting))
    waiting.append(second)
    with drivers(second), pytest.raises(RunFailed, match="had not begun"):
        second.ownership.acquire()


def test_a_driver_that_writes_a_last_checkpoint_is_waited_for(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    ending, second = Driver(storage, "ending", ending=True), Driver(storage, "second")
    first_step = threading.Event()
    acquired: list[AcquiredLease] = []

    def follow() -> None:
        acquired.append(second.ownership.acquire())
        first_step.set()

    with drivers(ending, second):
        ending.ownership.acquire()
        follower = threading.Thread(target=follow)
        follower.start()
        assert not first_step.wait(3 * 0.6)  # neither refused nor let in
        ending.ownership.end(5.0)
        follower.join(10.0)
    assert acquired[0].because == "it ended, or never held a lease"


def test_a_driver_that_stood_still_is_reported_only_if_storage_does_not_confirm_that_it_leads(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each start stands still while Ray starts workers."""
    driver = Driver(open_storage(str(tmp_path)), "driver", lease_s=30.0)
    with drivers(driver), caplog.at_level("INFO", "raysharded.driver"):
        driver.ownership.acquire()
        driver.ownership._loop._set = (float("-inf"), float("-inf"))
        driver.ownership.check_awake()
    told = [(one.levelname, one.getMessage()) for one in caplog.records if "stood still" in one.getMessage()]
    assert [level for level, _ in told] == ["INFO"]
    assert told[0][1].endswith("and still leads the run")


def test_a_driver_that_wakes_up_does_not_wait_for_storage_that_hangs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    storage = open_storage(str(tmp_path))
    hanging = Hangs(storage)
    driver = Driver(hanging, "driver")  # type: ignore[arg-type]  # has all methods
    with drivers(driver):
        driver.ownership.acquire()
        hanging.now.clear()
        time.sleep(0.6)  # it stands still
        began = time.monotonic()
        driver.ownership.check_awake()
        assert not driver.ownership.is_sure()
        assert time.monotonic() - began < 0.6
        assert "storage has not confirmed yet that it leads the run" in caplog.text
        hanging.now.set()


def test_a_driver_that_wakes_up_after_it_was_followed_is_refused_at_once(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    first, second = Driver(storage, "first", lease_s=30.0), Driver(storage, "second", take_over=True)
    with drivers(first, second):
        first.ownership.acquire()
        second.ownership.acquire()
        first.ownership.check_awake()  # it did not stand still
        first.ownership._loop._set = (float("-inf"), float("-inf"))
        with pytest.raises(RunOwnedElsewhere, match="second has taken over"):
            first.ownership.check_awake()
