"""Deaths are explained after their loss; the same one in one step again and again ends the run, kills never."""

from __future__ import annotations

from typing import Any

import pytest

from raysharded.driver.state.events import Ready
from raysharded.errors import RunFailed, StepFailed
from raysharded.ids import WorkerId
from raysharded.protocol.death import Death, DeathExplained
from raysharded.protocol.messages import StopReason, WorkerInfo
from tests.driver.scripted import Run, training


def explain(run: Run, worker: int, **death: Any) -> None:
    place = {"generation": run.state.generation, "step": 3, "phase": "forward", "microbatch": 5, "samples": (40, 2)}
    run.hear(DeathExplained(worker=WorkerId(worker), death=Death(**{**place, **death})))


def dies(run: Run, worker: int, **death: Any) -> None:
    """A member of a generation that has done two steps dies in its third; the others continue without it."""
    others = [member for member in run.state.members if member != worker]
    run.lost(worker)
    explain(run, worker, **death)
    if run.error_or_none() is None and run.state.members:
        for other in others:
            run.stopped(other, StopReason.ABORTED, 2)
        run.formed()


def test_a_cause_is_recorded_and_takes_the_place_of_the_launchers_words() -> None:
    run = training(3, step=2)
    dies(run, 1, status=3, stderr=("last words",), stderr_file="/logs/worker.err")
    run.trained(3)
    (entry,) = run.records("worker_died")
    assert (entry["worker"], entry["node"], entry["step"], entry["phase"]) == (1, "node1", 3, "forward")
    assert (entry["status"], entry["signal"], entry["cause"]) == (3, "", "exited with status 3")
    assert (entry["microbatch"], entry["samples"]) == (5, [40, 2])
    assert (entry["stderr"], entry["stderr_file"]) == (["last words"], "/logs/worker.err")
    (recovery,) = run.records("recovery")
    assert recovery["reasons"] == ["its process exited with status 3"]


def test_three_of_the_same_end_the_run_with_place_samples_last_words_and_the_way_out() -> None:
    run = training(4, step=2, max_same_deaths=3)
    dies(run, 0, signal="SIGSEGV")
    dies(run, 1, signal="SIGSEGV")
    dies(run, 2, signal="SIGSEGV", stderr=("Fatal Python error",), stderr_file="/logs/worker.err")
    assert isinstance(run.error, StepFailed)
    assert isinstance(run.error, RunFailed)
    assert str(run.error) == (
        "each of workers 0, 1 and 2, in 3 generations, was ended by SIGSEGV, a crash of native code, in forward of "
        "step 3: the run cannot get past it (FailureConfig.max_same_deaths=3). All were at microbatch 5 of the step "
        "(samples 40 and 2 of the dataset). To skip it: let the dataset return something harmless for these indices, "
        "with the same length, and the loss give them no weight (Loss(total, 0)); then start the run again.\n"
        "The last lines of the standard error of worker 2 (/logs/worker.err):\n  Fatal Python error"
    )
    (verdict,) = run.records("repeated_death")
    assert (verdict["step"], verdict["phase"], verdict["microbatch"]) == (3, "forward", 5)
    assert verdict["workers"] == [0, 1, 2]


@pytest.mark.parametrize(
    "death",
    [
        {"signal": "SIGKILL"},
        {"signal": "SIGTERM"},
        {"signal": "SIGKILL", "out_of_memory": "the kernel's memory killer ended it"},
        {"status": 1, "from_outside": True},
        {"status": 0},
        {"stderr": ("no cause is known",)},
    ],
)
def test_deaths_from_outside_never_end_a_run(death: dict[str, Any]) -> None:
    run = training(4, step=2, max_same_deaths=2, min_workers=1)
    for worker in (0, 1, 2):
        dies(run, worker, **death)
    assert run.error_or_none() is None
    assert len(run.records("worker_died")) == 3
    assert run.state.deaths == ()


@pytest.mark.parametrize("other", [{"status": 4}, {"phase": "backward"}, {"step": 4}])
def test_other_deaths_are_not_the_same(other: dict[str, Any]) -> None:
    run = training(4, step=2, max_same_deaths=2, min_workers=1)
    dies(run, 0, status=3)
    dies(run, 1, **{"status": 3, **other})
    assert run.error_or_none() is None


def test_a_step_that_gets_done_is_not_held_against_the_run() -> None:
    run = training(4, step=2, max_same_deaths=2, min_workers=1)
    dies(run, 0, status=3)
    run.trained(3)
    assert run.state.deaths == ()
    dies(run, 1, status=3, step=4)
    assert run.error_or_none() is None


def test_one_nodes_deaths_are_the_nodes_as_long_as_there_are_others() -> None:
    run = training(4, step=2, max_same_deaths=2, min_workers=1, save_at_end=False)
    run.state = run.with_nodes({0: "a", 1: "a", 2: "b", 3: "b"})
    dies(run, 0, status=3)
    dies(run, 1, status=3)
    assert run.error_or_none() is None
    dies(run, 2, status=3)
    assert isinstance(run.error, StepFailed)


def test_deaths_on_gpus_that_failed_themselves_are_not_the_programs_and_end_the_gpus_use() -> None:
    xid = "Xid 79 (it has fallen off the bus)"
    run = training(4, step=2, max_same_deaths=3)
    for worker in (0, 1, 2):
        run.state = run.with_devices({worker: "GPU 7 GPU-bad"})
        dies(run, worker, signal="SIGABRT", gpu=(xid,), gpu_is_broken=True)
    assert run.error_or_none() is None, "three of the same would end the run"
    entries = run.records("worker_died")
    assert [entry["gpu"] for entry in entries] == [[xid]] * 3
    assert entries[0]["cause"].endswith(f"; its GPU reported {xid}")
    facts = WorkerInfo(
        pid=9, node="node", node_id="node9", arithmetic={"cpu": "x"}, num_samples=100, device="GPU 7 GPU-bad"
    )
    run.trained(3)
    run.hear(Ready(worker=max(run.state.starting), facts=facts))
    assert run.records("worker_refused")[-1]["reason"].startswith("GPU 7 GPU-bad failed 3 times in this run")


def test_a_death_on_a_gpu_that_a_program_may_have_stopped_counts_as_its_own() -> None:
    run = training(4, step=2, max_same_deaths=3)
    for worker in (0, 1, 2):
        dies(run, worker, signal="SIGABRT", gpu=("Xid 31 (an access to memory that is not mapped)",))
    assert isinstance(run.error, StepFailed)
    assert "its GPU reported Xid 31" in str(run.error)
    assert not run.state.device_failures
