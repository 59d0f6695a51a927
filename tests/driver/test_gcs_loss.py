"""A driver without its cluster's GCS: its entries and requests, by a clock that the test moves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raysharded.checkpoint import open_storage
from raysharded.checkpoint.retention.policy import Keep
from raysharded.driver.checkpoints.committer import RunFiles
from raysharded.driver.driver import Driver
from raysharded.driver.gcs_loss import DECIDE_AFTER_S, GcsLoss, GcsTimes
from raysharded.driver.state.state import Checkpointed, Phase, State
from raysharded.errors import ClusterError
from raysharded.journal.entry_text import incident_text
from raysharded.journal.log import Journal
from raysharded.journal.reader import entries_of, read_segments
from raysharded.protocol.worker_launcher import GCS_LIMIT_SETTING, GcsHealth
from raysharded.run.listeners import ignore
from tests.driver.scripted import LIMITS
from tests.driver.test_journal import SetClock
from tests.driver.test_slow_starts import NeverReady
from tests.report.entries import ManualClock

TRAINING = State(limits=LIMITS, driver="d", phase=Phase.TRAINING, step=7)
SAVED = replace(TRAINING, checkpoint=Checkpointed(step=7, prefix="p"))


class Bench:
    """A driver, and its GCS."""

    def __init__(self, limit_s: float = 60.0, lease_s: float = 15.0, *, leased: bool = True) -> None:
        self.clock, self.told = SetClock(), list[tuple[str, dict[str, Any]]]()
        self.asked: list[str | float | None] = []
        self.health: GcsHealth | None = GcsHealth(silent_s=0.0, limit_s=limit_s, leased=leased)
        self.loss = GcsLoss(
            lambda: self.health, self.clock, lambda *entry: self.told.append(entry), self, lease_s=lease_s
        )

    def checkpoint(self) -> None:
        self.asked.append("checkpoint")

    def stop(self, *, checkpoint_within_s: float | None) -> None:
        self.asked.append(checkpoint_within_s)

    def silent(self, silent_s: float, state: State = TRAINING) -> list[str]:
        """The kinds of entries when the GCS has been silent for so long."""
        assert self.health is not None
        before = self.health.silent_s
        self.health = replace(self.health, silent_s=silent_s)
        self.clock.now += max(0.0, silent_s - before)
        self.told.clear()
        self.loss.look(state)
        return [kind for kind, _ in self.told]


def test_a_loss_is_said_once_then_saved_and_ends_the_run_before_rays_limit() -> None:
    bench = Bench()
    assert bench.silent(0.0) == []
    assert bench.loss.warning(TRAINING) == ""
    assert bench.silent(5.5) == ["gcs_lost"]
    assert incident_text(*bench.told[0]) == (
        "step 7: the Ray cluster's GCS has not answered for 5.50 s: the run trains on, and ends with a checkpoint "
        "before Ray ends it, in 54 s"
    )
    assert "has not answered for 5.50 s" in bench.loss.warning(TRAINING)
    assert bench.silent(5.5 + DECIDE_AFTER_S - 0.1) == []
    assert bench.asked == []
    bench.silent(5.5 + DECIDE_AFTER_S)
    bench.silent(30.0)
    assert bench.asked == ["checkpoint"]
    assert bench.loss.error(TRAINING) is None
    bench.silent(45.0)
    bench.silent(50.0)
    assert bench.asked == ["checkpoint", 10.0]  # it has ended 5 s before the limit
    error = bench.loss.error(TRAINING)
    assert isinstance(error, ClusterError)
    assert GCS_LIMIT_SETTING in str(error)
    assert "has not answered for 45 s" in str(error)


def test_a_gcs_that_is_back_costs_nothing_and_the_next_loss_is_another() -> None:
    bench = Bench()
    bench.silent(6.0)
    assert bench.silent(0.0) == ["gcs_back"]
    assert bench.told[0][1] == {"step": 7, "after_s": 6.0}
    assert bench.silent(0.0) == []
    assert bench.asked == []
    assert bench.loss.error(TRAINING) is None
    assert bench.silent(6.0) == ["gcs_lost"]


def test_a_step_that_is_saved_is_not_written_again() -> None:
    bench = Bench()
    bench.silent(6.0, SAVED)
    bench.silent(30.0, SAVED)
    assert bench.asked == []


def test_a_stop_that_waits_for_its_checkpoint_gets_the_time_of_the_last_one() -> None:
    bench, stopping = Bench(), replace(TRAINING, stop_requested=True)
    bench.silent(6.0, stopping)
    bench.silent(54.0, stopping)
    assert bench.asked == ["checkpoint"]
    bench.silent(55.0, stopping)
    assert bench.asked == ["checkpoint", 10.0]


def test_a_run_that_finishes_without_a_gcs_has_no_error() -> None:
    bench = Bench()
    bench.silent(45.0)
    assert isinstance(bench.loss.error(TRAINING), ClusterError)
    assert bench.loss.error(replace(TRAINING, phase=Phase.OVER, result_fingerprint="f")) is None


def test_a_run_that_is_over_is_not_stopped() -> None:
    bench = Bench()
    bench.silent(50.0, replace(TRAINING, phase=Phase.OVER))
    assert (bench.told, bench.asked, bench.loss.error(TRAINING)) == ([], [], None)


def test_a_cluster_without_a_gcs_is_never_lost() -> None:
    bench = Bench()
    bench.health = None
    bench.loss.begin([{"kind": "checkpoint", "step": 3, "seconds": 1e6}])
    bench.loss.look(TRAINING)
    bench.loss.on_entry("checkpoint", {"step": 4, "seconds": 1e6})
    assert (bench.told, bench.asked, bench.loss.error(TRAINING)) == ([], [], None)


def test_a_checkpoint_that_takes_longer_than_a_loss_leaves_is_said_with_rays_setting() -> None:
    bench = Bench()
    bench.loss.begin([{"kind": "step", "step": 1}, {"kind": "checkpoint", "step": 3, "seconds": 20.0}])
    assert bench.told == []
    for step in (5, 6):
        bench.loss.on_entry("checkpoint", {"step": step, "seconds": 40.0})
    ((kind, fields),) = bench.told  # once
    assert incident_text(kind, fields) == (
        "step 5: Ray ends its processes 1 min 0 s after its GCS is lost, a checkpoint takes 40 s: a last checkpoint "
        f"needs 1 min 15 s. Set {GCS_LIMIT_SETTING} higher for all its processes"
    )


class WithGcs(NeverReady):
    """A launcher on a cluster whose GCS answers; it starts no worker."""

    def gcs_health(self) -> GcsHealth:
        return GcsHealth(silent_s=0.0, limit_s=60.0, leased=False)


def test_a_driver_that_resumes_knows_how_long_checkpoints_took(tmp_path: Path) -> None:
    storage, clock = open_storage(str(tmp_path)), ManualClock()
    Journal(storage, clock, "before").append("checkpoint", {"step": 3, "seconds": 100.0}, durable=True)
    files = RunFiles(name="run", storage=storage, keep=Keep(last=1), metadata={}, global_batch_size=8, key=None)
    driver = Driver(LIMITS, WithGcs(clock, "", failing=False), files, clock, ignore)
    with pytest.raises(ClusterError):
        driver.run()
    kinds = {entry["kind"]: entry for _, segment in read_segments(storage) for _, entry in entries_of(segment)}
    assert kinds["gcs_limit"]["write_s"] == 100.0


@pytest.mark.parametrize("leased", [True, False])
def test_a_lease_longer_than_rays_limit_is_said_at_the_start_if_workers_outlive_the_driver(*, leased: bool) -> None:
    bench = Bench(lease_s=60.0, leased=leased)
    bench.loss.begin([])
    assert [kind for kind, _ in bench.told] == ["gcs_limit"] * leased


@pytest.mark.parametrize("limit_s", [20.0, 60.0, 600.0])
@pytest.mark.parametrize("write_s", [0.0, 5.0, 100.0])
def test_the_end_follows_the_decision_and_leaves_time_to_write_where_there_is_any(
    limit_s: float, write_s: float
) -> None:
    times = GcsTimes(limit_s=limit_s, write_s=write_s, lease_s=0.0)
    assert times.end_s >= 15.0
    if times.needed_s <= limit_s:
        assert times.end_s + write_s <= limit_s
        assert times.left_s >= write_s
