"""Every kind of fault, on real worker processes: it fires, the run continues, and ends with the undisturbed bits."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import raysharded as rs
from raysharded.driver.state.state import State
from raysharded.errors import RunFailed, TaskError
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan, network
from raysharded.testing.processes import fit
from tests.cases import tried_each_time
from tests.training.harness import Collector, GptTask, Tokens, make_driver, make_job, make_limits, train

pytestmark = [pytest.mark.procs, pytest.mark.alone]

STEPS = 5
MICROBATCHES = 4
WORKERS = 3
ONE = WorkerId(1)
QUICK: Mapping[str, Any] = {
    "min_workers": 1,
    "max_worker_losses": None,
    "hang_timeout_s": 2.0,
    "task_error_retries": 1,
}


@cache
def undisturbed() -> Any:
    return train(1, steps=STEPS, microbatches=MICROBATCHES).bits


def disturbed(folder: Path, fault: Fault, **limits: Any) -> tuple[State, Collector]:
    """A run that meets one fault; asserts that it fired."""
    plan = FaultPlan(faults=(fault,), folder=str(folder))
    job = make_job(f"{folder}/run", steps=STEPS, microbatches=MICROBATCHES, faults=plan)
    listener = Collector()
    state = make_driver(job, make_limits(job, WORKERS, **{**QUICK, **limits}), listener).run()
    assert plan.fired(fault)
    numbers = tuple(listener.numbers[step] for step in range(1, STEPS + 1))
    assert (repr(numbers), state.result_fingerprint) == undisturbed()
    return state, listener


def lost(listener: Collector) -> list[int]:
    return [fields["worker"] for kind, fields in listener.entries if kind == "worker_lost"]


@pytest.mark.parametrize("phase", tried_each_time(["agree"], ["data", "forward", "agree", "snapshot"]))
def test_a_worker_cut_off_without_a_reset_is_abandoned_and_the_others_continue(phase: str, tmp_path: Path) -> None:
    _, listener = disturbed(tmp_path, Fault(worker=ONE, step=3, phase=phase, kind="drop"))
    assert lost(listener) == [ONE]


@pytest.mark.parametrize("kind", ["stop", "wedge", "stuck"])
def test_a_worker_that_does_not_continue_is_abandoned_and_the_others_do(kind: Any, tmp_path: Path) -> None:
    seconds = 60.0 if kind == "wedge" else None
    _, listener = disturbed(tmp_path, Fault(worker=ONE, step=3, phase="backward", kind=kind, seconds=seconds))
    assert lost(listener) == [ONE]


def test_a_slow_worker_is_waited_for(tmp_path: Path) -> None:
    fault = Fault(worker=ONE, step=2, phase="forward", kind="slow", seconds=0.1, every=True)
    _, listener = disturbed(tmp_path, fault)
    assert not lost(listener)


def test_an_error_that_happens_once_costs_a_try_and_no_worker(tmp_path: Path) -> None:
    _, listener = disturbed(tmp_path, Fault(worker=ONE, step=3, phase="forward", kind="raise", message="bad day"))
    assert not lost(listener)
    assert [fields["source"] for kind, fields in listener.entries if kind == "generation"] == ["start", "memory"]


def test_an_error_ends_a_run_that_allows_none_with_its_message(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="bad day"):
        disturbed(
            tmp_path, Fault(worker=ONE, step=3, phase="data", kind="raise", message="bad day"), task_error_retries=0
        )


def test_a_worker_that_is_requested_to_leave_costs_no_bit(tmp_path: Path) -> None:
    disturbed(tmp_path, Fault(worker=ONE, step=2, phase="forward", kind="term"))


def test_a_fault_in_a_checkpoint_costs_a_worker_and_no_bit(tmp_path: Path) -> None:
    _, listener = disturbed(tmp_path, Fault(worker=ONE, step=STEPS, phase="save", kind="kill"))
    assert lost(listener) == [ONE]


def test_a_trainer_meets_its_faults_on_plain_processes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The example of docs/testing.md."""
    trainer = rs.ElasticTrainer(
        task=GptTask(),
        data=Tokens(),
        batch=rs.BatchConfig(global_batch_size=2 * MICROBATCHES, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=(2, 3)),
        run=rs.RunConfig(name="run", storage_path=str(tmp_path), max_steps=STEPS),
    )
    fault = Fault(worker=ONE, step=3, phase="backward", kind="kill")
    trainer.faults = FaultPlan(faults=(fault,), folder=str(tmp_path))
    result = fit(trainer)
    assert trainer.faults.fired(fault)
    assert result.report().ok
    assert result.fingerprint == undisturbed()[1]
    with contextlib.suppress(RunFailed):
        assert fit(trainer) == result  # finished already
    assert f"is finished with step {STEPS}, and max_steps is {STEPS}: nothing is trained" in caplog.text


def test_a_connection_that_is_silenced_carries_nothing_and_stays_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            for end in (ours, theirs):
                end.settimeout(0.3)
            ours.sendall(b"before")
            assert theirs.recv(10) == b"before"
            network.silence(ours)
            theirs.sendall(b"to ours")
            with pytest.raises(TimeoutError):
                ours.recv(10)
            ours.send(b"x")  # the one segment that may pass
            assert len(received_while(ours, theirs)) <= 1 + 64 * 1024


def received_while(sending: socket.socket, receiving: socket.socket) -> bytes:
    """The part of an endless stream that arrives before a time-out."""
    received = bytearray()
    with contextlib.suppress(TimeoutError):
        while True:
            sending.send(bytes(1000))
            received += receiving.recv(1 << 20)
    return bytes(received)
