"""The calls of a handle, on a run that this process drives; the driver actor's handle passes the same calls on."""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.checkpoint import fork, list_checkpoints, open_storage
from raysharded.errors import ClusterError, ConfigError, RunFailed
from raysharded.ids import WorkerId
from raysharded.journal.log import read
from raysharded.run.handle import ENTRIES_OF_ONE, Seen
from raysharded.run.offline import StoredRun
from raysharded.run.results import Entry
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.processes import ProcessLauncher
from tests.ray.driving import hurry
from tests.ray.leftovers import wait_until
from tests.report.entries import checkpoint, started, step, write_run
from tests.training.harness import Outcome, SmallTask, samples, train

STEPS = 8
WAIT_S = 120.0


class Paced(SmallTask):
    """Slow until `hurry`, and slower from step 5 on: on a busy machine what a test waits for may come late."""

    def __init__(self, folder: Path) -> None:
        self._hurry = folder / "hurry"

    def lr_scale(self, step: int) -> float:
        until = time.monotonic() + (0.3 if step < 5 else 2.0)
        while not self._hurry.exists() and time.monotonic() < until:
            time.sleep(0.02)
        return super().lr_scale(step)


@cache
def undisturbed() -> Outcome:
    """One plain process with this job."""
    return train(1, task=SmallTask(), data=samples(), steps=STEPS, microbatches=4)


def trainer(
    folder: Path,
    workers: int | tuple[int, int] = 2,
    data: Any = None,
    task: rs.Task | None = None,
    **checkpoint: Any,
) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=task or SmallTask(),
        data=data or samples(),
        batch=rs.BatchConfig(global_batch_size=8, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=workers),
        run=rs.RunConfig(
            name="asked",
            storage_path=str(folder),
            max_steps=STEPS,
            checkpoint=rs.CheckpointConfig(**checkpoint),
        ),
        engine=rs.EngineConfig(prefetch=False),
    )


class Held:
    """A run whose first worker waits in the data of a step until the test releases it: requests come in its middle."""

    def __init__(self, trainer: rs.ElasticTrainer, step: int, folder: Path) -> None:
        self._let_go = folder / "ready-worker99"
        wait = Fault(worker=WorkerId(0), step=step, phase="data", kind="wait", until=WorkerId(99))
        trainer.faults = FaultPlan(faults=(wait,), folder=str(folder))
        self.run = trainer.start_with(ProcessLauncher)
        wait_for_step(self.run, step - 1)

    def go_on(self) -> None:
        """Release the worker, once the driver has received all requests so far."""
        self.run.remark("heard", {"step": 0})
        wait_for(self.run, "heard")
        self.let_go()

    def let_go(self) -> None:
        self._let_go.touch()


def wait_for(run: rs.Run, kind: str, step: int = 0) -> None:
    for batch in run.follow():
        if any(told == kind and fields["step"] >= step for _, told, fields in batch):
            return
    raise AssertionError(f"the run was over before {kind} of step {step}")


def wait_for_step(run: rs.Run, step: int) -> None:
    wait_for(run, "step", step)


def recorded(run: rs.Run, kind: str) -> list[dict[str, Any]]:
    return [entry for entry in read(open_storage(run.url)) if entry["kind"] == kind]


def assert_right(run: rs.Run) -> None:
    assert run.wait(WAIT_S).fingerprint == undisturbed().fingerprint
    assert [entry["step"] for entry in recorded(run, "step")] == list(range(1, STEPS + 1))


@pytest.mark.procs
def test_a_run_is_followed_forked_and_known_from_storage_when_it_is_over(tmp_path: Path) -> None:
    run = trainer(tmp_path, 1, every_steps=4, keep_last=9).start_with(ProcessLauncher)
    kinds = [kind for batch in run.follow() for _, kind, _ in batch]
    assert (kinds[0], kinds[-1], kinds.count("step")) == ("started", "finished", STEPS)
    assert_right(run)
    status = run.status()
    assert (status.phase, status.step, status.checkpoint_step, status.losses) == ("over", STEPS, STEPS, 0)
    assert run.metrics()["loss"].to_pylist() == [numbers["loss"] for numbers in undisturbed().numbers]
    with pytest.raises(RunFailed, match="is over"):
        run.reshard(None)
    with pytest.raises(ConfigError, match="'asked' is this run's own name"):
        run.fork("asked")
    other = run.fork("other", 4)
    assert other.wait(WAIT_S).fingerprint == undisturbed().fingerprint
    assert [entry["step"] for entry in recorded(other, "step")] == list(range(5, STEPS + 1))

    stored = StoredRun("asked", run.url)
    assert stored.wait(WAIT_S) == run.wait()
    assert [kind for batch in stored.follow() for _, kind, _ in batch if kind != "recording"] == kinds
    assert stored.status().phase == "finished"
    with pytest.raises(RunFailed, match=r"Run.pause: run 'asked' is over \(finished, step 8\)"):
        stored.pause()
    stored.stop()  # it is


@pytest.mark.procs
@pytest.mark.long  # the test above trains a fork, and those of a removal read what it copies
def test_a_fork_with_a_copy_trains_to_the_same_bits_without_its_parent(tmp_path: Path) -> None:
    parent = trainer(tmp_path, 1, every_steps=4, keep_last=9).start_with(ProcessLauncher)
    parent.wait(WAIT_S)
    [ref] = [ref for ref in list_checkpoints(open_storage(parent.url)) if ref.step == 4]
    fork(open_storage(parent.url), ref, open_storage(str(tmp_path / "copied")))
    assert rs.remove_run(parent.url, copy_into_forks=True).copied == (str(tmp_path / "copied"),)
    made = trainer(tmp_path, 1)
    made.run = replace(made.run, name="copied")
    copied = made.start_with(ProcessLauncher)
    assert copied.wait(WAIT_S).fingerprint == undisturbed().fingerprint
    assert [entry["step"] for entry in recorded(copied, "step")] == list(range(5, STEPS + 1))


@pytest.mark.procs
def test_a_run_that_is_driven_elsewhere_is_known_from_storage_and_takes_no_requests(tmp_path: Path) -> None:
    held = Held(trainer(tmp_path), 2, tmp_path)
    run = held.run
    stored = StoredRun("asked", run.url)
    with pytest.raises(ClusterError, match=r"Run.checkpoint: run 'asked' is running .*\(it is held by driver"):
        stored.checkpoint()
    live, seen = run.status().as_dict(), stored.status().as_dict()
    assert list(live) == list(seen)
    for name in (
        "name",
        "url",
        "state",
        "workers",
        "members",
        "pids",
        "nodes",
        "generation",
        "driver_pid",
        "driver_node",
    ):
        assert live[name] == seen[name], name
    assert (live["state"], live["workers"], live["driver_pid"], len(live["pids"])) == ("running", 2, os.getpid(), 2)
    with pytest.raises(ConfigError, match=r"it is running, held by driver"):
        rs.remove_run(run.url)
    run.stop()
    held.let_go()
    with pytest.raises(RunFailed, match="Stopped"):
        run.wait(WAIT_S)
    with pytest.raises(RunFailed, match=r"'asked' was stopped at step \d+\. Started again, it resumes from the start"):
        stored.wait(WAIT_S)


def test_wrong_values_are_refused_before_anything_is_requested(tmp_path: Path) -> None:
    run = StoredRun("asked", str(tmp_path))
    with pytest.raises(ConfigError, match=r"Run.resize: workers=0: give a whole number of 1 or more"):
        run.resize(0)
    with pytest.raises(ConfigError, match=r"Run.set_learning_rate.factor=nan: give a number of at least 0"):
        run.set_learning_rate(float("nan"))
    with pytest.raises(ConfigError, match=r"Run.rewind: step=-1"):
        run.rewind(-1)
    with pytest.raises(ConfigError, match=r"Run.drain.within_s=-1"):
        run.drain("here", within_s=-1)


@pytest.mark.procs
def test_a_run_that_is_paused_stands_still_until_it_is_resumed(tmp_path: Path) -> None:
    held = Held(trainer(tmp_path), 3, tmp_path)
    run = held.run
    with pytest.raises(
        ConfigError, match=r"the data of the run are a list, and only a raysharded\.Mixture has weights"
    ):
        run.set_mixture_weights({"one": 1.0})
    run.pause()
    held.go_on()
    deadline = time.monotonic() + WAIT_S
    while run.status().phase != "paused":
        assert time.monotonic() < deadline
        time.sleep(0.05)
    step, newest = run.status().step, run.entries()[-1][0]
    assert not [kind for _, kind, _ in run.entries(newest, timeout_s=2.0) if kind == "step"]
    assert run.status().step == step
    run.resume()
    assert_right(run)


@pytest.mark.procs
def test_a_run_is_resized_within_its_limits(tmp_path: Path) -> None:
    run = trainer(tmp_path, (1, 2), task=Paced(tmp_path)).start_with(ProcessLauncher)
    wait_for_step(run, 2)
    with pytest.raises(ConfigError, match=r"Run.resize: .*3.*\b1\b.*\b2\b"):
        run.resize(3)
    run.resize(1)
    wait_until(lambda: len(recorded(run, "worker_left")) == 1, "a worker has left", WAIT_S)
    hurry(tmp_path)
    assert_right(run)
    assert recorded(run, "step")[-1]["workers"] == 1


@pytest.mark.procs
def test_a_learning_rate_is_changed_and_a_run_goes_back(tmp_path: Path) -> None:
    run = trainer(tmp_path, task=Paced(tmp_path), every_steps=2, keep_last=9).start_with(ProcessLauncher)
    wait_for_step(run, 3)
    with pytest.raises(ConfigError, match=r"Run.rewind: .*3"):
        run.rewind(3)
    run.set_learning_rate(0.5)
    wait_for(run, "learning_rate")
    run.rewind(2)  # later requests are undone with it
    wait_for(run, "rewind")
    hurry(tmp_path)
    assert run.wait(WAIT_S).fingerprint == undisturbed().fingerprint
    assert [entry["from_step"] <= STEPS for entry in recorded(run, "learning_rate")] == [True]


@pytest.mark.procs
def test_weights_of_a_mixture_are_changed_and_wrong_ones_are_refused_with_a_reason(tmp_path: Path) -> None:
    sources = {"one": samples(), "two": samples()}
    data = rs.Mixture(sources, {"one": 1, "two": 1}, max_epochs={"two": 0.12})
    run = trainer(tmp_path, data=data, task=Paced(tmp_path)).start_with(ProcessLauncher)
    wait_for_step(run, 2)
    for weights, told in (
        ({"three": 1.0}, "'three' is none of the sources one, two"),
        ({"one": -1.0}, "give a finite number of 0 or more"),
        ({}, "they add up to 0"),
        ({"two": 1.0}, r"the mixture would end after \d+ samples, and the run needs 64"),
    ):
        with pytest.raises(ConfigError, match=rf"Run.set_mixture_weights: .*{told}"):
            run.set_mixture_weights(weights)
    run.set_mixture_weights({"one": 1.0})
    wait_for(run, "mixture_weights")
    hurry(tmp_path)
    run.wait(WAIT_S)
    (entry,) = recorded(run, "mixture_weights")
    assert (entry["weights"], entry["from_position"]) == ({"one": 1.0}, (entry["from_step"] - 1) * 8)


@pytest.mark.procs
@pytest.mark.long  # a test above undoes one that holds
def test_a_learning_rate_that_does_not_hold_yet_is_undone_by_going_back(tmp_path: Path) -> None:
    held = Held(trainer(tmp_path, 1, every_steps=2, keep_last=9), 6, tmp_path)
    run = held.run
    wait_for(run, "checkpoint", 4)
    run.set_learning_rate(0.5)
    run.rewind(max(entry["step"] for entry in recorded(run, "checkpoint") if entry["step"] < 6))  # 4 may be left out
    held.go_on()
    assert run.wait(WAIT_S).fingerprint == undisturbed().fingerprint


def test_a_follower_sees_a_step_once_though_the_next_driver_records_it_again() -> None:
    def done(number: int, generation: int, step: int) -> Entry:
        return number, "step", {"generation": generation, "step": step}

    taken: Entry = (20_001, "taken_over", {"step": 4})
    first = [done(1, 1, 1), done(2, 1, 2), done(3, 2, 3), done(4, 2, 4)]
    second = [done(20_000, 2, 3), done(20_000, 2, 4), taken, done(20_002, 3, 4), done(20_003, 3, 5)]
    steps = Seen()
    assert steps.of(first) == first
    assert steps.of(second) == second[2:], "a step that is computed again in a later generation is another"


class Restarted(StoredRun):
    """A run whose driver actor was restarted: what a reader gets of it, batch by batch; its journal is on storage."""

    def __init__(self, url: str, batches: list[list[Entry]]) -> None:
        super().__init__("restarted", url)
        self._batches = batches

    def entries(self, after: int = 0, timeout_s: float = 0.0) -> list[Entry]:
        return self._batches.pop(0) if self._batches else []

    def is_over(self) -> bool:
        return not self._batches

    def is_restarted(self, after: int, number: int) -> bool:
        return (number - 1) // ENTRIES_OF_ONE > (after - 1) // ENTRIES_OF_ONE


def told(number: int, entry: tuple[str, dict[str, Any]]) -> Entry:
    return number, entry[0], {"at": 5.0, **entry[1]}


LOST = ("worker_lost", {"step": 1, "worker": 1, "reasons": ("died",), "loss": math.nan})
FAILED = ("checkpoint_failed", {"step": 2, "error": "s3://key:secret@host/x failed"})
PASSED_OVER = ("checkpoint_skipped", {"step": 2, "reason": "damaged"})
WAITS = ("waiting_for_owner", {"owner": "a", "lease_s": 15.0})
NEXT = 1 + ENTRIES_OF_ONE
FIRST_DRIVER = [started(), step(1), LOST, FAILED, step(2), checkpoint(2)]
NEXT_DRIVER = [PASSED_OVER, ("started", {**started(2)[1], "lr": math.inf}), step(3)]


@pytest.mark.parametrize(
    ("fetched", "missed"),
    [
        (FIRST_DRIVER[:2], FIRST_DRIVER[2:]),
        (FIRST_DRIVER[:3], FIRST_DRIVER[3:]),
        (FIRST_DRIVER[:5], FIRST_DRIVER[5:]),
        (FIRST_DRIVER[:1], FIRST_DRIVER[1:]),
        (FIRST_DRIVER, []),
    ],
    ids=["after a step", "after a loss", "before a checkpoint", "before any step", "all"],
)
@pytest.mark.parametrize("written", [0, len(NEXT_DRIVER)], ids=["next driver unwritten", "next driver written"])
def test_a_follower_gets_from_the_journal_what_the_driver_before_had_written(
    tmp_path: Path, fetched: list[Any], missed: list[Any], written: int
) -> None:
    url = write_run(tmp_path, FIRST_DRIVER, NEXT_DRIVER[:written])
    own = [told(1 + number, entry) for number, entry in enumerate(fetched)]
    later = [told(NEXT + number, entry) for number, entry in enumerate([WAITS, *NEXT_DRIVER])]
    run = Restarted(url, [own, later[:1], later[1:2], later[2:]])
    found = [entry for batch in run.follow() for entry in batch]
    assert [kind for _, kind, _ in found] == [kind for kind, _ in [*fetched, *missed, WAITS, *NEXT_DRIVER]]
    numbers = [number for number, _, _ in found]
    assert numbers == sorted(set(numbers))


def test_two_restarts_before_a_driver_begins_leave_nothing_out_and_keep_the_numbers_growing(tmp_path: Path) -> None:
    own = [told(1, started()), told(2, step(1))]
    later = [told(ENTRIES_OF_ONE + NEXT + number, entry) for number, entry in enumerate([WAITS, *NEXT_DRIVER])]
    run = Restarted(write_run(tmp_path, FIRST_DRIVER), [own, [told(NEXT, WAITS)], later])
    found = [entry for batch in run.follow() for entry in batch]
    assert [kind for _, kind, _ in found] == [kind for kind, _ in [*FIRST_DRIVER, WAITS, WAITS, *NEXT_DRIVER]]
    numbers = [number for number, _, _ in found]
    assert numbers == sorted(set(numbers))


def test_entries_of_a_driver_that_never_begins_come_when_the_run_is_over(tmp_path: Path) -> None:
    url = write_run(tmp_path, FIRST_DRIVER)
    run = Restarted(url, [[told(1, started()), told(2, step(1))], [told(NEXT, WAITS)]])
    kinds = [kind for batch in run.follow() for _, kind, _ in batch]
    assert kinds == [kind for kind, _ in [*FIRST_DRIVER, WAITS]]


def test_a_stored_run_of_two_drivers_is_followed_as_its_journal_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StoredRun("stored", write_run(tmp_path, FIRST_DRIVER, NEXT_DRIVER))
    monkeypatch.setattr(run, "newest_entries", lambda: pytest.fail("the journal was read a second time"))
    kinds = [kind for batch in run.follow() for _, kind, _ in batch]
    assert kinds == [entry["kind"] for entry in read(open_storage(run.url))]
