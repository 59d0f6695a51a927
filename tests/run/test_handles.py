"""The calls of a handle, on a run that this process drives; the driver actor's handle passes the same calls on."""

from __future__ import annotations

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
from raysharded.run.handle import StepsOnce
from raysharded.run.offline import StoredRun
from raysharded.run.results import Entry
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.processes import ProcessLauncher
from tests.ray.driving import PacedTokens, hurry
from tests.ray.leftovers import wait_until
from tests.training.harness import GptTask, Outcome, Tokens, train

STEPS = 8
WAIT_S = 120.0


class Paced(Tokens):
    """Slow enough for two requests, one after the other, which take effect at different steps."""

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.08)
        return super().__getitem__(index)


@cache
def undisturbed() -> Outcome:
    """One plain process with this job."""
    return train(1, steps=STEPS, microbatches=4)


def trainer(
    folder: Path, workers: int | tuple[int, int] = 2, data: Tokens | None = None, **checkpoint: Any
) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        task=GptTask(),
        data=data or Tokens(),
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
    run = trainer(tmp_path, every_steps=4, keep_last=9).start_with(ProcessLauncher)
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
def test_a_fork_with_a_copy_trains_to_the_same_bits_without_its_parent(tmp_path: Path) -> None:
    parent = trainer(tmp_path, every_steps=4, keep_last=9).start_with(ProcessLauncher)
    parent.wait(WAIT_S)
    [ref] = [ref for ref in list_checkpoints(open_storage(parent.url)) if ref.step == 4]
    fork(open_storage(parent.url), ref, open_storage(str(tmp_path / "copied")))
    assert rs.remove_run(parent.url, copy_into_forks=True).copied == (str(tmp_path / "copied"),)
    made = trainer(tmp_path)
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
    run = trainer(tmp_path, (1, 3), data=PacedTokens(tmp_path)).start_with(ProcessLauncher)
    wait_for_step(run, 2)
    with pytest.raises(ConfigError, match=r"Run.resize: .*4.*\b1\b.*\b3\b"):
        run.resize(4)
    run.resize(1)
    wait_until(lambda: len(recorded(run, "worker_left")) == 2, "two workers have left", WAIT_S)
    hurry(tmp_path)
    assert_right(run)
    assert recorded(run, "step")[-1]["workers"] == 1


@pytest.mark.procs
def test_a_learning_rate_is_changed_and_a_run_goes_back(tmp_path: Path) -> None:
    run = trainer(tmp_path, data=Paced(), every_steps=2, keep_last=9).start_with(ProcessLauncher)
    wait_for_step(run, 3)
    with pytest.raises(ConfigError, match=r"Run.rewind: .*3"):
        run.rewind(3)
    run.set_learning_rate(0.5)
    wait_for(run, "learning_rate")
    run.rewind(2)  # later requests are undone with it
    assert run.wait(WAIT_S).fingerprint == undisturbed().fingerprint
    assert [entry["from_step"] <= STEPS for entry in recorded(run, "learning_rate")] == [True]


@pytest.mark.procs
def test_a_learning_rate_that_does_not_hold_yet_is_undone_by_going_back(tmp_path: Path) -> None:
    held = Held(trainer(tmp_path, every_steps=2, keep_last=9), 6, tmp_path)
    run = held.run
    wait_for(run, "checkpoint", 4)
    run.set_learning_rate(0.5)
    run.rewind(max(entry["step"] for entry in recorded(run, "checkpoint") if entry["step"] < 6))  # 4 may be left out
    held.go_on()
    assert run.wait(WAIT_S).fingerprint == undisturbed().fingerprint


def test_a_follower_sees_a_step_once_though_the_next_driver_records_it_again() -> None:
    def step(number: int, generation: int, step: int) -> Entry:
        return number, "step", {"generation": generation, "step": step}

    taken: Entry = (20_001, "taken_over", {"step": 4})
    first = [step(1, 1, 1), step(2, 1, 2), step(3, 2, 3), step(4, 2, 4)]
    second = [step(20_000, 2, 3), step(20_000, 2, 4), taken, step(20_002, 3, 4), step(20_003, 3, 5)]
    steps = StepsOnce()
    assert steps.of(first) == first
    assert steps.of(second) == second[2:], "a step that is computed again in a later generation is another"


def test_a_follower_gets_from_the_journal_what_the_driver_before_had_written() -> None:
    def step(generation: int, step: int) -> dict[str, Any]:
        return {"kind": "step", "at": 5.0, "generation": generation, "step": step}

    def told(number: int, entry: dict[str, Any], at: float = 4.9) -> Entry:
        return number, entry["kind"], {name: value for name, value in {**entry, "at": at}.items() if name != "kind"}

    lost = {"kind": "worker_lost", "at": 5.0, "worker": 1, "reasons": ["died"]}
    formed, checkpoint = {"kind": "formed", "at": 5.0}, {"kind": "checkpoint", "at": 5.0, "step": 3}
    started = {"kind": "started", "at": 9.0, "driver": "b"}
    later = {"kind": "taken_over", "at": 9.0}
    journal = [
        {"kind": "started", "at": 1.0, "driver": "a"},
        step(1, 1),
        step(1, 2),
        lost,
        formed,
        step(2, 3),
        checkpoint,
    ]
    steps = StepsOnce()
    fetched = [told(1, journal[0]), told(2, step(1, 1)), told(3, step(1, 2)), told(4, {**lost, "reasons": ("died",)})]
    assert steps.of(fetched) == fetched
    missed = [told(5, formed, 5.0), told(6, step(2, 3), 5.0), told(7, checkpoint, 5.0)]
    new = [told(20_001, started), told(20_002, step(2, 3)), told(20_003, step(2, 4))]
    assert steps.missed(journal, new, 4) == missed, "the next driver has written nothing yet"
    assert steps.missed([*journal, started, later, step(2, 4)], new, 4) == missed
    assert StepsOnce().missed(journal, new, 4) == [], "nothing was seen"
    assert steps.missed(journal, new[1:], 4) == [], "it is the same driver, whose oldest entries are not kept"
    assert steps.of([*missed, *new]) == [*missed, new[0], new[2]]
