"""Drivers that die, stop and come back: the next one adopts their workers, or they save their state and end."""

from __future__ import annotations

import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from raysharded.checkpoint import newest_complete, open_storage
from raysharded.driver.replay.rerun import load as load_replays
from raysharded.errors import RunOwnedElsewhere
from raysharded.ids import WorkerId
from raysharded.journal.log import read
from raysharded.protocol.messages import WorkerInfo
from raysharded.protocol.session import DriverSession, job_identity, run_digest
from raysharded.protocol.worker_launcher import Reply
from raysharded.ray_backend import adoption
from raysharded.report import load
from raysharded.report.data_audit import audit
from raysharded.run.translation import job_of
from tests.ray import mixture_driving
from tests.ray.driving import MICROBATCHES, STEPS, DriverProcess, hurry, trainer, undisturbed
from tests.ray.launchers import Owner, make_launcher
from tests.ray.leftovers import assert_no_slot_is_leaked, processes_marked, wait_until
from tests.training.harness import make_job, train

pytestmark = pytest.mark.ray


@pytest.fixture
def address(cluster: None) -> str:
    """Address of a cluster that was started before any driver of these tests."""
    return str(ray.get_runtime_context().gcs_address)


@pytest.fixture
def start() -> Iterator[Callable[..., DriverProcess]]:
    """Starts drivers in separate processes, none of which outlives the test."""
    started: list[DriverProcess] = []

    def one(*args: Any, **kwargs: Any) -> DriverProcess:
        started.append(DriverProcess(*args, **kwargs))
        return started[-1]

    yield one
    for driver in started:
        driver.process.kill()
        driver.process.wait()


Start = Callable[..., DriverProcess]


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def go_on(folder: Path, workers: int | tuple[int, int] = 2, **fit: Any) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """Drive the run to its end in this process: its fingerprint, and the journal's entries by kind."""
    entries: dict[str, list[dict[str, Any]]] = {}
    hurry(folder)
    result = trainer(folder, workers).fit(lambda kind, fields: entries.setdefault(kind, []).append(fields), **fit)
    return result.fingerprint, entries


def assert_drivers_decide_the_same_again(folder: Path, drivers: int) -> None:
    """Replay each driver's decisions, as far as its journal goes."""
    replays = load_replays(str(folder / "driven"))
    assert len(replays) == drivers
    assert [found.differences for found in replays] == [()] * drivers
    assert all(found.moments[0].state is not None for found in replays)
    assert replays[-1].moments[-1].decided().endswith("; end")


@pytest.mark.parametrize("moment", ["step", pytest.param("generation", marks=pytest.mark.long)])
def test_workers_of_a_driver_that_was_killed_continue_with_the_next_one(
    moment: str, tmp_path: Path, address: str, start: Start
) -> None:
    first = start(tmp_path, 2, address)
    first.wait_for(lambda kind, fields: kind == moment and fields["step"] >= (3 if moment == "step" else 0))
    first.process.kill()
    first.process.wait()
    told = max((fields["step"] for kind, fields in first.entries if kind == "step"), default=0)
    fingerprint, entries = go_on(tmp_path)
    (taken,) = entries["taken_over"]
    assert taken["workers"] == [0, 1]
    assert taken["step"] >= told - 1  # the step before the newest one was committed
    assert entries["generation"][0]["source"] == ("memory" if moment == "step" else entries["generation"][0]["source"])
    assert "worker_ready" not in entries  # no process was started
    assert entries["started"][0]["because"] == "its process is gone"
    assert fingerprint == undisturbed().fingerprint
    report = load(str(tmp_path / "driven"))
    assert report.ledger is not None
    assert report.ledger.ok
    assert not report.summary.differences
    assert [record.step for record in report.summary.steps] == list(range(1, STEPS + 1))
    if moment == "step":  # the other one may not have recorded its beginning
        assert_drivers_decide_the_same_again(tmp_path, 2)
    assert_no_slot_is_leaked()


@pytest.mark.parametrize("moment", ["decided", pytest.param("begun", marks=pytest.mark.long)])
def test_weights_changed_by_hand_hold_when_another_driver_takes_over(
    moment: str, tmp_path: Path, address: str, start: Start
) -> None:
    first = start(tmp_path, 2, address, program="mixture_driving")
    decision = first.wait_for(lambda kind, _: kind == "mixture_weights")
    journal = open_storage(str(tmp_path / "mixed"))
    wait_until(lambda: any(entry["kind"] == "mixture_weights" for entry in read(journal)), "the decision is written")
    if moment == "begun":
        first.wait_for_step(decision["from_step"])
    first.process.kill()
    first.process.wait()
    entries: dict[str, list[dict[str, Any]]] = {}
    hurry(tmp_path)
    trained = mixture_driving.trainer(tmp_path, 2)
    result = trained.fit(lambda kind, fields: entries.setdefault(kind, []).append(fields))
    assert entries["taken_over"][0]["workers"] == [0, 1]
    assert entries["generation"][0]["source"] == "memory"
    planned = mixture_driving.mixture(tmp_path, decision["from_position"])
    assert result.fingerprint == train(1, data=planned, steps=STEPS, microbatches=MICROBATCHES).fingerprint
    found = audit(trained.url)
    assert found.ok
    assert {one.name: one.read for one in found.sources} == planned.counts(STEPS * mixture_driving.BATCH)
    assert_no_slot_is_leaked()


def test_a_new_driver_that_may_have_fewer_workers_resumes_from_the_memory_of_all(
    tmp_path: Path, address: str, start: Start
) -> None:
    first = start(tmp_path, 2, address)
    first.wait_for_step(3)
    first.process.kill()
    first.process.wait()
    fingerprint, entries = go_on(tmp_path, 1)
    assert entries["taken_over"][0]["workers"] == [0, 1]
    assert entries["generation"][0]["source"] == "memory"
    assert sorted(left["worker"] for left in entries["worker_left"]) == [1]
    assert entries["step"][-1]["workers"] == 1
    assert fingerprint == undisturbed().fingerprint
    assert_no_slot_is_leaked()


@pytest.mark.long
def test_workers_without_a_driver_write_a_last_checkpoint_and_end(tmp_path: Path, address: str, start: Start) -> None:
    first = start(tmp_path, 2, address, orphan_wait_s=1.0)
    first.wait_for_step(3)
    first.process.kill()
    first.process.wait()
    wait_until(lambda: not any(map(is_alive, first.pids)), "the workers' end")
    assert_no_slot_is_leaked()
    saved = newest_complete(open_storage(str(tmp_path / "driven"))).checkpoint
    assert saved is not None
    assert saved.step >= 3
    fingerprint, entries = go_on(tmp_path, 1)
    assert entries["started"][0]["resumed_after_step"] == saved.step
    assert "taken_over" not in entries
    assert fingerprint == undisturbed().fingerprint
    report = load(str(tmp_path / "driven"))
    assert report.ledger is not None
    assert report.ledger.ok
    assert_drivers_decide_the_same_again(tmp_path, 2)


def test_a_driver_that_was_stopped_is_followed_and_harms_nothing_when_it_wakes_up(
    tmp_path: Path, address: str, start: Start
) -> None:
    first = start(tmp_path, 1, address)
    first.wait_for_step(3)
    first.process.send_signal(signal.SIGSTOP)
    woken = False
    seen: dict[str, list[dict[str, Any]]] = {}

    def listen(kind: str, fields: dict[str, Any]) -> None:
        nonlocal woken
        seen.setdefault(kind, []).append(fields)
        if kind == "step" and "formed" in seen and not woken:
            woken = True
            first.process.send_signal(signal.SIGCONT)
            raised.update(first.wait_for(lambda kind, _: kind == "raised"))
            hurry(tmp_path)

    raised: dict[str, Any] = {}
    result = trainer(tmp_path, 1).fit(listen)
    assert seen["started"][0]["because"] == "it gave no sign of life"
    assert seen["taken_over"][0]["workers"] == [0]
    assert raised["error"] == "RunOwnedElsewhere"
    assert "worker_lost" not in seen  # the resumed driver killed no worker
    assert result.fingerprint == undisturbed().fingerprint
    assert_drivers_decide_the_same_again(tmp_path, 2)
    assert_no_slot_is_leaked()


@pytest.mark.usefixtures("cluster")
def test_a_second_driver_is_refused_with_who_holds_the_run_and_since_when(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1).start_local()
    wait_until(lambda: run.status().step >= 1, "step 1")
    with pytest.raises(RunOwnedElsewhere, match=rf"\(process {os.getpid()} on .*\) since \d{{4}}-.*take_over=True"):
        trainer(tmp_path, 1).fit(progress=False)
    fingerprint, entries = go_on(tmp_path, 1, take_over=True)
    assert entries["started"][0]["because"] == "a takeover was requested"
    assert fingerprint == undisturbed().fingerprint
    with pytest.raises(RunOwnedElsewhere, match=r"has taken over|no longer owns"):
        run.wait(240)
    assert_no_slot_is_leaked()


def test_a_driver_that_slept_before_it_took_the_workers_leaves_them_to_the_newer_one(
    tmp_path: Path, address: str
) -> None:
    lost: list[dict[str, Any]] = []
    newer = trainer(tmp_path, 1)
    run = newer.start_local(lambda kind, fields: lost.append(fields) if kind == "worker_lost" else None)
    wait_until(lambda: run.status().step >= 1, "step 1")
    job = job_of(newer.spec())
    older = DriverSession(
        driver="older",
        epoch=0,
        run_name="driven",
        global_batch_size=newer.batch.global_batch_size,
        metadata={},
        signed=False,
        lease_s=60.0,
        orphan_wait_s=60.0,
    )
    assert adoption.adopt(run_digest(job.run_url), older, job_identity(job), Owner()) == ([], 0)
    hurry(tmp_path)
    assert run.wait(240).fingerprint == undisturbed().fingerprint
    assert not lost
    assert_no_slot_is_leaked()


def test_a_worker_is_ended_without_waiting_for_storage_to_name_its_owner(tmp_path: Path, address: str) -> None:
    class Unsure(Owner):
        """Storage hangs."""

        told = threading.Event()

        def is_sure(self) -> bool:
            return False

        def may_act(self) -> bool:
            return self.told.wait(240)

    hold = Unsure()
    launcher = make_launcher(make_job(str(tmp_path), steps=1), hold)
    launcher.start(WorkerId(0))
    facts: list[WorkerInfo] = []
    deadline = time.monotonic() + 300.0
    while not facts:
        assert time.monotonic() < deadline
        facts += ready_in(launcher.wait(0.1))
    began = time.monotonic()
    launcher.kill(WorkerId(0))
    assert time.monotonic() - began < 5.0
    assert is_alive(facts[0].pid)
    hold.told.set()
    wait_until(lambda: not is_alive(facts[0].pid), "the worker's end")
    launcher.close()
    assert_no_slot_is_leaked()


def ready_in(happened: list[Any]) -> list[WorkerInfo]:
    return [one.value for one in happened if isinstance(one, Reply) and isinstance(one.value, WorkerInfo)]


class Where:
    """Reports the node of an actor."""

    def where(self) -> tuple[str, str, int]:
        return *adoption.where(), os.getpid()


def test_a_driver_in_an_actor_counts_as_gone_when_ray_has_started_it_again_and_not_with_its_job(address: str) -> None:
    in_task = ray.get(ray.remote(num_cpus=0)(adoption.where).remote())
    assert adoption.where() == (in_task[0], ray.get_runtime_context().get_job_id())
    assert in_task[1] == ""
    actor: Any = ray.remote(Where).options(num_cpus=0, max_restarts=1, max_task_retries=-1).remote()
    cluster, first, pid = ray.get(actor.where.remote())
    assert not adoption.has_ended(*in_task)
    assert not adoption.has_ended(cluster, first)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: adoption.has_ended(cluster, first), "the news")
    again = ray.get(actor.where.remote(), timeout=60)
    assert again[1] != first
    assert not adoption.has_ended(*again[:2])
    ray.kill(actor)
    wait_until(lambda: adoption.has_ended(*again[:2]), "the news of its end")


@pytest.mark.clusters
def test_with_a_separate_ray_nothing_is_left_of_a_driver_that_was_killed(tmp_path: Path, start: Start) -> None:
    marker = uuid.uuid4().hex
    first = start(tmp_path, 1, None, marker=marker)
    first.wait_for_step(1)
    first.process.kill()
    first.process.wait()

    def left() -> list[str]:  # Ray's own agents of a node take their time on a busy machine
        return [line for line in processes_marked(f"RAYSHARDED_TEST={marker}") if "Agent" not in line]

    wait_until(lambda: not left(), lambda: f"all processes gone: {left()}")
