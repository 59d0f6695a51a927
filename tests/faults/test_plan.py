"""A fault plan: refused when it makes no sense, the same after pickling, and each fault once."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from raysharded.errors import ConfigError
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.faults import InjectedFault

ONE = WorkerId(1)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"kind": "explode"}, "kind='explode': choose one of kill, stop"),
        ({"phase": "lunch"}, "phase='lunch': choose one of ready, form"),
        ({"kind": "slow"}, "kind='slow' needs seconds"),
        ({"kind": "wedge", "seconds": -1.0}, "give some above 0"),
        ({"kind": "kill", "every": True}, "every=True is for slow and corrupt"),
        ({"kind": "wait"}, "needs until"),
    ],
)
def test_a_fault_that_makes_no_sense_is_refused_with_the_reason(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Fault(**{"worker": ONE, "step": 1, "phase": "forward", **wrong})


def test_a_fault_strikes_its_worker_in_its_phase_once_from_its_step_on(tmp_path: Path) -> None:
    fault = Fault(worker=ONE, step=3, phase="forward", kind="raise", message="no such luck")
    plan: FaultPlan = pickle.loads(pickle.dumps(FaultPlan(faults=(fault,), folder=str(tmp_path))))
    for worker, step, phase in ((0, 3, "forward"), (1, 2, "forward"), (1, 3, "backward")):
        plan.strike(WorkerId(worker), step, phase)
    assert not plan.fired(fault)
    with pytest.raises(InjectedFault, match="no such luck"):
        plan.strike(ONE, 5, "forward")
    assert plan.fired(fault)
    plan.strike(ONE, 5, "forward")
    plan.strike(ONE, 6, "forward")


def test_a_worker_that_is_slow_on_every_step_is_so_once_a_step(tmp_path: Path) -> None:
    fault = Fault(worker=ONE, step=2, phase="data", kind="slow", seconds=0.03, every=True)
    plan = FaultPlan(faults=(fault,), folder=str(tmp_path))

    def took(step: int) -> float:
        started = time.perf_counter()
        plan.strike(ONE, step, "data")
        return time.perf_counter() - started

    assert [took(step) >= 0.03 for step in (1, 2, 2, 3, 2)] == [False, True, False, True, True]


def test_a_fault_that_is_ordered_later_strikes_too_if_the_plan_listens(tmp_path: Path) -> None:
    plan = FaultPlan(faults=(), folder=str(tmp_path), listens=True)
    plan.strike(ONE, 1, "apply")
    plan.order(Fault(worker=ONE, step=1, phase="apply", kind="raise"))
    FaultPlan(faults=(), folder=str(tmp_path)).strike(ONE, 1, "apply")  # this plan does not listen
    plan.strike(WorkerId(2), 1, "apply")
    with pytest.raises(InjectedFault):
        plan.strike(ONE, 1, "apply")
    plan.strike(ONE, 1, "apply")


def test_a_gradient_is_corrupted_once(tmp_path: Path) -> None:
    fault = Fault(worker=ONE, step=2, phase="backward", kind="corrupt")
    plan = FaultPlan(faults=(fault,), folder=str(tmp_path))
    plan.strike(ONE, 2, "backward")
    assert not plan.fired(fault)
    asked = [plan.corrupts(WorkerId(worker), step) for worker, step in ((0, 2), (1, 1), (1, 2), (1, 3))]
    assert asked == [False, False, True, False]
    assert plan.fired(fault)


WEDGED = """
import threading, time
from raysharded.testing.faults import hold_the_interpreter

ticks, stop = [], threading.Event()

def tick():
    while not stop.wait(0.01):
        ticks.append(time.monotonic())

thread = threading.Thread(target=tick)
thread.start()
started = time.monotonic()
hold_the_interpreter(0.5)
ended = time.monotonic()
stop.set()
thread.join()
print(sum(started + 0.05 < at < ended - 0.05 for at in ticks), ended - started)
"""


def test_a_wedged_process_runs_no_other_thread() -> None:
    done = subprocess.run([sys.executable, "-c", WEDGED], check=True, capture_output=True, text=True, timeout=60)
    ticks, lasted_s = done.stdout.split()
    assert int(ticks) == 0
    assert float(lasted_s) >= 0.5
