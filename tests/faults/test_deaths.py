"""A worker's death has a reason, and the same one again and again ends the run; on real processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.errors import RunFailed
from tests.cases import tried_each_time
from tests.faults.dying import Dies, crash, killed, leave
from tests.training.harness import Collector, Outcome, make_driver, make_job, make_limits, samples, train

pytestmark = [pytest.mark.procs, pytest.mark.alone]

STEPS, MICROBATCHES = 4, 4


@cache
def undisturbed() -> Outcome:
    return train(1, steps=STEPS, microbatches=MICROBATCHES, data=samples())


def run(folder: Path, task: rs.Task, workers: int, **limits: Any) -> tuple[Collector, str, BaseException | None]:
    """(journal, fingerprint, error) of a run."""
    listener = Collector()
    job = make_job(f"{folder}/run", task=task, steps=STEPS, microbatches=MICROBATCHES, data=samples())
    made = {"min_workers": 1, "max_worker_losses": None, "join_wait_s": 60.0, "start_backoff_s": 0.01, **limits}
    try:
        state = make_driver(job, make_limits(job, workers, **made), listener).run()
    except RunFailed as error:
        return listener, "", error
    return listener, state.result_fingerprint or "", None


def of(listener: Collector, kind: str) -> list[Mapping[str, Any]]:
    return [fields for found, fields in listener.entries if found == kind]


@pytest.mark.parametrize(
    ("die", "status", "number", "cause"),
    [
        (leave, 3, "", "exited with status 3"),
        (killed, None, "SIGKILL", "was ended by SIGKILL"),
        pytest.param(crash, None, "SIGSEGV", "was ended by SIGSEGV, a crash of native code", marks=pytest.mark.long),
    ],
    ids=["os._exit(3)", "SIGKILL", "SIGSEGV"],
)
def test_a_death_is_on_record_with_its_cause_and_place(
    die: Callable[[], None], status: int | None, number: str, cause: str, tmp_path: Path
) -> None:
    listener, fingerprint, error = run(tmp_path, Dies(tmp_path, die, times=1), 4)
    assert error is None
    (entry,) = of(listener, "worker_died")
    (lost,) = of(listener, "worker_lost")
    assert entry["worker"] == lost["worker"]
    assert (entry["status"], entry["signal"], entry["cause"]) == (status, number, cause)
    assert entry["step"] > lost["step"]  # workers may be ahead of their reports
    assert entry["phase"] in ("forward", "prove")
    assert entry["microbatch"] in range(MICROBATCHES)
    assert len(entry["samples"]) == 2
    (recovery,) = of(listener, "recovery")
    assert recovery["reasons"] == [f"its process {cause}"]
    assert fingerprint == undisturbed().fingerprint


@pytest.mark.parametrize(
    ("die", "cause"),
    tried_each_time(
        [(crash, "was ended by SIGSEGV")], [(leave, "exited with status 3"), (crash, "was ended by SIGSEGV")]
    ),
)
def test_a_microbatch_that_ends_whoever_computes_it_ends_the_run_and_is_named(
    die: Callable[[], None], cause: str, tmp_path: Path
) -> None:
    task = Dies(tmp_path, die, times=99)
    listener, _, error = run(tmp_path, task, 4, max_same_deaths=3)
    assert len(of(listener, "worker_lost")) == 3
    (verdict,) = of(listener, "repeated_death")
    entry = of(listener, "worker_died")[0]
    assert verdict["microbatch"] == entry["microbatch"]
    text = str(error)
    assert f"{cause}" in text
    assert f"of step {entry['step']}" in text
    named = " and ".join(map(str, entry["samples"]))
    assert f"at microbatch {entry['microbatch']} of the step (samples {named} of the dataset)" in text


def test_kills_in_one_step_never_end_the_run_by_this(tmp_path: Path) -> None:
    task = Dies(tmp_path, killed, times=5)
    listener, fingerprint, error = run(tmp_path, task, MICROBATCHES, max_same_deaths=3)  # none pads at first
    assert error is None
    assert len(of(listener, "worker_died")) == 5
    assert fingerprint == undisturbed().fingerprint
