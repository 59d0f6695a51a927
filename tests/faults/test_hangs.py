"""Workers that hang are found, named and replaced, with real processes; the bits are those of the undisturbed run."""

from __future__ import annotations

import ctypes
import os
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan
from tests.training.harness import Collector, Outcome, Tokens, make_driver, make_job, make_limits, train

pytestmark = [pytest.mark.procs, pytest.mark.alone]

STEPS = 7
MICROBATCHES = 4
HANG_S = 2.0
"""The shortest deadline here; a step takes a tenth of a second."""
FOREVER_S = 120


class Hangs(Tokens):
    """The first worker to read its 18th sample, in step 3, never gets it: 6 are read at the start, 2 more in step 1."""

    def __init__(self, folder: Path, *, holds_lock: bool) -> None:
        super().__init__()
        self._marker, self._holds_lock, self._reads = str(folder / "hung"), holds_lock, 0

    def __getitem__(self, index: int) -> Any:
        self._reads += 1
        if self._reads == 18:
            self._hang_once()
        return super().__getitem__(index)

    def _hang_once(self) -> None:
        try:
            os.close(os.open(self._marker, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
        if self._holds_lock:
            lock, mutex = ctypes.PyDLL(None).pthread_mutex_lock, ctypes.create_string_buffer(64)
            for _ in range(2):  # like an extension that never releases the interpreter
                lock(mutex)
        else:
            time.sleep(FOREVER_S)


@cache
def undisturbed() -> Outcome:
    return train(1, steps=STEPS, microbatches=MICROBATCHES)


def stuck(outcome: Outcome) -> list[dict[str, Any]]:
    return [dict(fields) for kind, fields in outcome.entries if kind == "stuck"]


def recoveries(outcome: Outcome) -> list[dict[str, Any]]:
    return [dict(fields) for kind, fields in outcome.entries if kind == "recovery"]


@pytest.mark.parametrize(
    "phase",
    ["agree", "snapshot", *(pytest.param(phase, marks=pytest.mark.long) for phase in ("forward", "backward", "apply"))],
)
def test_a_stopped_worker_is_abandoned_at_the_deadline_in_any_phase(phase: str) -> None:
    stopped = Fault(worker=WorkerId(1), step=3, phase=phase, kind="stop")
    outcome = train(3, steps=STEPS, microbatches=MICROBATCHES, faults=[stopped], hang_timeout_s=HANG_S)
    (found,) = stuck(outcome)
    assert found["worker"] == 1
    assert "stopped or cut off" in found["reason"]
    (recovery,) = recoveries(outcome)
    assert (recovery["source"], recovery["lost"]) == ("memory", [1])
    assert outcome.bits == undisturbed().bits


@pytest.mark.parametrize("phase", ["form", "transfer"])
def test_a_worker_that_is_stopped_while_a_generation_forms_is_abandoned(phase: str) -> None:
    faults = [
        Fault(worker=WorkerId(2), step=3, phase="forward"),
        Fault(worker=WorkerId(0), step=3, phase=phase, kind="stop"),
    ]
    outcome = train(4, steps=STEPS, microbatches=MICROBATCHES, faults=faults, hang_timeout_s=HANG_S)
    assert 0 in [found["worker"] for found in stuck(outcome)]
    assert {recovery["source"] for recovery in recoveries(outcome)} == {"memory"}
    assert outcome.bits == undisturbed().bits


def test_who_alone_holds_a_shard_is_waited_for_while_a_generation_forms_and_nothing_is_lost(tmp_path: Path) -> None:
    faults = (
        Fault(worker=WorkerId(2), step=3, phase="forward"),  # the keeper of its mirror
        Fault(worker=WorkerId(1), step=3, phase="form", kind="wedge", seconds=8.0),
    )
    job = make_job(
        f"{tmp_path}/run", steps=STEPS, microbatches=MICROBATCHES, faults=FaultPlan(faults=faults, folder=str(tmp_path))
    )
    limits = make_limits(job, 4, min_workers=1, max_worker_losses=1, forming_patience_s=2.0)
    listener = Collector()
    state = make_driver(job, limits, listener).run()
    entries = [(kind, fields) for kind, fields in listener.entries if kind in ("stuck", "worker_lost", "generation")]
    assert [fields["worker"] for kind, fields in entries if kind == "worker_lost"] == [2]
    assert ["nobody else holds" in fields["reason"] for kind, fields in entries if kind == "stuck"] == [True]
    assert {fields["source"] for kind, fields in entries[1:] if kind == "generation"} == {"memory"}
    assert state.result_fingerprint == undisturbed().fingerprint


def test_a_worker_that_is_stopped_after_the_last_step_is_abandoned_and_the_others_write_the_checkpoint() -> None:
    stopped = Fault(worker=WorkerId(1), step=STEPS, phase="save", kind="stop")
    outcome = train(3, steps=STEPS, microbatches=MICROBATCHES, faults=[stopped], hang_timeout_s=HANG_S)
    assert [found["worker"] for found in stuck(outcome)] == [1]
    assert outcome.bits == undisturbed().bits


@pytest.mark.parametrize("holds_lock", [False, True], ids=["reading", "holding the interpreter"])
def test_a_worker_that_is_stuck_in_the_users_data_code_is_named_with_the_line(holds_lock: bool, tmp_path: Path) -> None:
    data = Hangs(tmp_path, holds_lock=holds_lock)
    outcome = train(3, steps=STEPS, microbatches=MICROBATCHES, data=data, losses=1, hang_timeout_s=HANG_S)
    assert (tmp_path / "hung").exists()
    (found,) = stuck(outcome)
    assert found["phase"] == "data"
    assert re.search(r"in _hang_once at Hangs\[\d+\]$", found["reason"])
    assert ("lock(mutex)" if holds_lock else "time.sleep(FOREVER_S)") in found["stack"]
    assert len(recoveries(outcome)) == 1
    assert outcome.bits == undisturbed().bits
