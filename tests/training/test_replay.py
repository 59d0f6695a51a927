"""Runs of real workers that were recorded, incidents and all, and are replayed without a difference."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.driver.driver import Driver
from raysharded.driver.replay.rerun import Replay, load
from raysharded.driver.state.events import Event, WorkerReply
from raysharded.errors import TaskError
from raysharded.ids import WorkerId
from raysharded.protocol.job import Job
from raysharded.protocol.messages import ProbeReply, Saved, Stopped, StopReason
from raysharded.protocol.worker_launcher import WorkerLost
from raysharded.report import load as load_report
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.processes import fit
from tests.training.harness import Collector, SmallTask, make_driver, make_job, make_limits, samples
from tests.training.test_non_finite import Diverging, first_sample_of

pytestmark = pytest.mark.procs
HANG_S = 2.0
"""The shortest deadline here; a step takes a tenth of a second."""


def drive(job: Job, workers: int, *, stop_at: int | None = None, resumed: bool = False, **limits: Any) -> Collector:
    """Run a recorded driver to its end, or until the test stops it at a step."""
    listener = Collector()
    drivers: list[Driver] = []

    def listen(kind: str, fields: dict[str, Any]) -> None:
        listener(kind, fields)
        if kind == "step" and fields["step"] == stop_at:
            drivers[0].stop(checkpoint_within_s=60.0)

    drivers.append(make_driver(job, make_limits(job, workers, **limits), listen, record_events=True))
    if resumed:
        drivers[0].restore()
    drivers[0].run()
    return listener


def planned(tmp_path: Path, faults: Collection[Fault], **settings: Any) -> tuple[Job, FaultPlan]:
    plan = FaultPlan(faults=tuple(faults), folder=str(tmp_path))
    return make_job(f"{tmp_path}/run", task=SmallTask(), microbatches=4, faults=plan, **settings), plan


def replayed(job: Job) -> Replay:
    (found,) = load(job.run_url)
    assert not found.differences
    assert load_report(job.run_url).ok
    return found


def told(found: Replay, what: Callable[[Event], bool]) -> list[Event]:
    return [moment.event for moment in found.moments if moment.event is not None and what(moment.event)]


def says(kind: type, **fields: Any) -> Callable[[Event], bool]:
    """True for a message of this kind with these fields."""
    return lambda event: (
        isinstance(event, WorkerReply)
        and isinstance(event.message, kind)
        and all(getattr(event.message, name) == value for name, value in fields.items())
    )


def test_kills_a_hang_an_error_of_the_task_and_checkpoints_are_replayed(tmp_path: Path) -> None:
    faults = [
        Fault(worker=WorkerId(1), step=2, phase="backward"),
        Fault(worker=WorkerId(2), step=4, phase="forward", kind="stop"),
        Fault(worker=WorkerId(0), step=7, phase="backward", kind="raise"),
    ]
    job, plan = planned(tmp_path, faults, steps=8, save_every=3)
    more: dict[str, Any] = {"max_worker_losses": 4, "task_error_retries": 1, "hang_timeout_s": HANG_S}
    drive(job, 3, min_workers=1, **more)
    assert all(plan.fired(fault) for fault in faults)
    found = replayed(job)
    assert told(found, lambda event: isinstance(event, WorkerLost))
    assert told(found, says(ProbeReply))
    assert told(found, says(Saved, step=3))
    (raised,) = told(found, says(Stopped, reason=StopReason.TASK_ERROR))
    assert isinstance(raised, WorkerReply)
    assert isinstance(raised.message, Stopped)
    assert isinstance(raised.message.error, TaskError)
    assert "injected by a fault plan" in raised.message.error.user_traceback


@pytest.mark.long  # `tests/golden` replays recorded audits and rewinds
def test_an_audit_that_finds_wrong_numbers_is_replayed(tmp_path: Path) -> None:
    corrupt = Fault(worker=WorkerId(1), step=3, phase="backward", kind="corrupt", every=True)
    job, _ = planned(tmp_path, [corrupt], steps=4, save_every=2, engine=rs.EngineConfig(audit_every_steps=2))
    listener = drive(job, 3, min_workers=1, max_worker_losses=3)
    assert "corruption" in dict(listener.entries)
    assert told(replayed(job), says(Stopped, reason=StopReason.CORRUPT))


def test_going_back_because_of_a_number_that_is_not_finite_is_replayed(tmp_path: Path) -> None:
    task = Diverging([first_sample_of(4)])
    job = make_job(f"{tmp_path}/run", task=task, microbatches=4, steps=6, save_every=2, on_non_finite="rewind")
    listener = drive(job, 1)
    assert "rewind" in dict(listener.entries)
    replayed(job)


class Slow(SmallTask):
    """Leaves time to end a run in the middle."""

    def lr_scale(self, step: int) -> float:
        time.sleep(0.05)
        return super().lr_scale(step)


def test_each_driver_of_a_run_that_was_stopped_and_resumed_is_replayed(tmp_path: Path) -> None:
    job = make_job(f"{tmp_path}/run", task=Slow(), microbatches=4, steps=8)
    drive(job, 1, stop_at=4)
    drive(job, 1, resumed=True)
    first, second = load(job.run_url)
    assert (first.differences, second.differences) == ((), ())
    resumed = second.moments[0].state
    assert resumed is not None
    assert resumed.checkpoint is not None
    assert 4 <= resumed.checkpoint.step < 8
    assert load_report(job.run_url).ok


def test_a_run_that_ends_with_an_error_ends_with_it_again(tmp_path: Path) -> None:
    raises = Fault(worker=WorkerId(1), step=2, phase="forward", kind="raise")
    job, _ = planned(tmp_path, [raises], steps=4)
    with pytest.raises(TaskError, match="injected"):
        drive(job, 2)
    found = replayed(job)
    assert "end with TaskError: " in found.moments[-1].decided()


def make_trainer(folder: Path, *, record_events: bool) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=SmallTask(),
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=1),
        run=rs.RunConfig(name="run", storage_path=str(folder), max_steps=2, record_events=record_events),
    )


def test_a_trainer_records_on_request_and_its_listener_receives_nothing_of_it(tmp_path: Path) -> None:
    heard: list[str] = []
    fit(make_trainer(tmp_path / "recorded", record_events=True), lambda kind, _: heard.append(kind))
    (found,) = load(str(tmp_path / "recorded" / "run"))
    assert not found.differences
    assert {"event", "recording"}.isdisjoint(heard)
    fit(make_trainer(tmp_path / "not", record_events=False))
    kinds = [json.loads(line)["kind"] for path in (tmp_path / "not/run/journal").iterdir() for line in path.open()]
    assert {"event", "recording"}.isdisjoint(kinds)
