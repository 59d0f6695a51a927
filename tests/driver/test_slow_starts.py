"""Reports of a driver while its workers start."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.policy import Keep
from raysharded.driver.checkpoints.committer import RunFiles
from raysharded.driver.driver import Driver
from raysharded.errors import ClusterError, RunFailed
from raysharded.ids import WorkerId
from raysharded.journal.reader import entries_of, read_segments
from raysharded.protocol.session import DriverSession, FoundWorkers
from raysharded.protocol.worker_launcher import GcsHealth, Happened, LeadershipCheck, WorkerLost
from raysharded.ray_backend.capacity import shortage_text
from raysharded.run.listeners import ignore
from tests.driver.scripted import LIMITS
from tests.report.entries import ManualClock

FULL = "Each worker needs 1 GPU (the cluster has 0, 0 free)."


class NeverReady:
    """Starts no worker, while the time of the clock goes by."""

    def __init__(self, clock: ManualClock, shortage: str, failing: bool) -> None:
        self.clock, self.shortage, self.failing = clock, shortage, failing
        self.started: list[WorkerId] = []

    def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 1

    def secret(self, prefix: str) -> bytes:
        return b""

    def where(self) -> tuple[str, str]:
        return "", ""

    def has_ended(self, cluster: str, job: str) -> bool:
        return False

    def of_another_version(self) -> None:
        return None

    def enter(self, terms: DriverSession, hold: LeadershipCheck) -> FoundWorkers:
        return FoundWorkers()

    def start(self, worker: WorkerId, avoid: tuple[str, ...] = ()) -> None:
        self.started.append(worker)

    def call(self, worker: WorkerId, method: str, *args: Any) -> None:
        raise AssertionError("no worker is there")

    def kill(self, worker: WorkerId, *, at_once: bool = True) -> None:
        pass

    def wait(self, timeout_s: float) -> list[Happened]:
        self.clock.now += 0.5
        died = self.started if self.failing else []
        self.started = []
        return [WorkerLost(worker=worker, reason="out of memory") for worker in died]

    def describe_shortage(self, wanted: int | None = None) -> str:
        return self.shortage

    def gcs_health(self) -> GcsHealth | None:
        return None

    def abandon(self) -> None:
        pass

    def close(self) -> None:
        pass


def said(folder: Path, *, shortage: str = "", failing: bool = False) -> list[tuple[float, str]]:
    """(seconds since the start, what is missing) of every entry `waiting` of a run that fails within two minutes."""
    clock = ManualClock()
    launcher = NeverReady(clock, shortage, failing)
    storage = open_storage(str(folder))
    files = RunFiles(name="slow", storage=storage, keep=Keep(last=1), metadata={}, global_batch_size=8, key=None)
    limits = replace(LIMITS, max_start_failures=8, start_backoff_s=6.0)
    driver = Driver(limits, launcher, files, clock, ignore)
    began = clock.wall()
    with pytest.raises((ClusterError, RunFailed)):
        driver.run()
    entries = [entry for _, segment in read_segments(storage) for _, entry in entries_of(segment)]
    return [(entry["at"] - began, entry["missing"]) for entry in entries if entry["kind"] == "waiting"]


def test_workers_that_only_take_long_to_start_lack_nothing(tmp_path: Path) -> None:
    assert said(tmp_path) == []


def test_what_is_missing_is_said_after_ten_seconds(tmp_path: Path) -> None:
    (first, missing), *_ = said(tmp_path, shortage=FULL)
    assert 10 <= first < 12
    assert missing == FULL


def test_workers_that_fail_to_start_are_said_to_be_missing_after_ten_seconds(tmp_path: Path) -> None:
    (first, missing), *_ = said(tmp_path, failing=True)
    assert 10 <= first < 12
    assert missing == "2 workers in a row did not start; the first: out of memory."


def test_a_shortage_that_ends_when_others_free_what_they_use_is_told_from_one_that_does_not() -> None:
    needs, have, free = {"CPU": 0.5}, {"CPU": 2.0}, {"CPU": 0.0}
    short = "Each worker needs 0.5 CPU (the cluster has 2, 0 free)."
    assert shortage_text(needs, 4, have, free) == (
        f"{short} That is enough for the run: it starts when what others use now is free."
    )
    assert shortage_text(needs, 5, have, free) == short
    assert shortage_text(needs, 4, have, free, ["a" * 56, "b" * 56]) == (
        f"{short} No worker is placed on aaaaaaaa, bbbbbbbb: drained by request, or failed too often or just now."
    )
    bundles = shortage_text(needs, 5, have, free, where="the placement group of this process")
    assert bundles == "Each worker needs 0.5 CPU (the placement group of this process has 2, 0 free)."
