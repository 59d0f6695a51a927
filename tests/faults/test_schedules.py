"""Random schedules of kills and joins, with real processes: every one ends with the bits of the undisturbed run.

RAYSHARDED_REAL_SCHEDULES sets the number of tries before a release.
"""

from __future__ import annotations

import os
import random
from functools import cache
from typing import Any

import pytest

import raysharded as rs
from raysharded.ids import WorkerId
from raysharded.testing import Fault
from tests.cases import tried_each_time
from tests.training.harness import Outcome, train

pytestmark = [pytest.mark.procs, pytest.mark.alone]

EACH_TIME = (1, 2, 3)
"""Each way to draw a schedule, and each engine."""
NUM_SCHEDULES = max(4, int(os.environ.get("RAYSHARDED_REAL_SCHEDULES", "24")))
WORKERS = 4
STEPS = 8
MICROBATCHES = 4
PATIENT_S = 60.0
"""A worker that waits for a replacement is not stuck."""
PHASES = ("forward", "backward", "agree", "apply", "snapshot")
FORMING_PHASES = ("form", "transfer")
BF16 = rs.EngineConfig(param_dtype="bfloat16")


Kill = tuple[int, int, str]
"""(worker, step, phase)"""


def schedule(seed: int) -> list[Kill]:
    """One to three kills. Workers 0 to 3 are there from the start; 4 replaces the first that is lost, and so on."""
    draw = random.Random(seed)
    first = [
        (worker, draw.randint(1, 4), draw.choice(PHASES))
        for worker in draw.sample(range(WORKERS), draw.choice((1, 1, 2)))
    ]
    if seed % 3 == 0:  # the replacement is killed while it joins, or soon after
        return [*first, (WORKERS, 1, draw.choice((*PHASES, *FORMING_PHASES)))]
    if seed % 3 == 1:  # a survivor is killed in the middle of the reshard that the first loss began
        survivors = [worker for worker in range(WORKERS) if worker not in {kill[0] for kill in first}]
        return [*first, (draw.choice(survivors), first[0][1], "transfer")]
    return first


def waits(kills: list[Kill], until: int) -> list[Fault]:
    """Faults that make a living worker wait, late enough, until the replacement is ready to join."""
    survivor = next(worker for worker in range(WORKERS) if worker not in {kill[0] for kill in kills})
    return [Fault(worker=WorkerId(survivor), step=6, phase="forward", kind="wait", until=WorkerId(until))]


@cache
def undisturbed(engine: rs.EngineConfig) -> Outcome:
    return train(1, steps=STEPS, microbatches=MICROBATCHES, engine=engine)


def survive(kills: list[Kill], *, engine: rs.EngineConfig | None = None, **settings: Any) -> Outcome:
    """A run whose workers are killed, which `train` asserts, and that ends with the undisturbed bits."""
    engine = engine or rs.EngineConfig()
    outcome = train(WORKERS, steps=STEPS, microbatches=MICROBATCHES, kills=kills, engine=engine, **settings)
    assert outcome.bits == undisturbed(engine).bits
    return outcome


@pytest.mark.parametrize("seed", tried_each_time(EACH_TIME, range(NUM_SCHEDULES)))
def test_any_schedule_of_losses_ends_with_the_undisturbed_bits(seed: int) -> None:
    kills = schedule(seed)
    engine = BF16 if seed % 4 == 3 else rs.EngineConfig(accumulation="local" if seed % 4 == 2 else "sharded")
    awaiting = waits(kills, WORKERS) if any(worker == WORKERS for worker, _, _ in kills) else []
    disturbed = survive(kills, faults=awaiting, engine=engine, hang_timeout_s=PATIENT_S)
    lost = {fields["worker"] for kind, fields in disturbed.entries if kind == "worker_lost"}
    assert {worker for worker, _, _ in kills} <= lost


@pytest.mark.parametrize("phase", tried_each_time(["backward", "snapshot"], PHASES))
def test_a_single_loss_in_any_phase_costs_no_committed_step(phase: str) -> None:
    outcome = train(3, steps=4, microbatches=MICROBATCHES, kills=[(1, 3, phase)])
    recovery = next(fields for kind, fields in outcome.entries if kind == "recovery")
    assert recovery["source"] == "memory"
    assert (
        recovery["resumed_after_step"] >= 1
    )  # in step 3 or right after it: step 1 was committed by the agreement of 2
    assert recovery["steps_redone"] <= 2


def test_a_loss_right_after_a_reshard_costs_no_committed_step() -> None:
    outcome = survive([(1, 3, "backward"), (2, 3, "agree")])
    recoveries = [fields for kind, fields in outcome.entries if kind == "recovery"]
    assert {recovery["source"] for recovery in recoveries} == {"memory"}
    assert sorted(worker for recovery in recoveries for worker in recovery["lost"]) == [1, 2]


def test_two_losses_at_once_that_mirrors_cover_are_recovered_from_memory() -> None:
    outcome = survive([(0, 4, "backward"), (2, 4, "backward")])
    recoveries = [fields for kind, fields in outcome.entries if kind == "recovery"]
    assert {recovery["source"] for recovery in recoveries} == {"memory"}


def test_a_worker_and_its_mirror_lost_at_once_send_the_run_back_to_its_checkpoint() -> None:
    outcome = survive([(1, 7, "backward"), (2, 7, "backward")], save_every=3)
    sources = [fields["source"] for kind, fields in outcome.entries if kind == "recovery"]
    assert "checkpoint" in sources


def test_a_replacement_joins_at_a_step_boundary_and_nothing_is_computed_again() -> None:
    kills = [(1, 2, "forward")]
    outcome = survive(kills, faults=waits(kills, WORKERS), hang_timeout_s=PATIENT_S)
    generations = [fields for kind, fields in outcome.entries if kind == "generation"]
    assert [len(fields["members"]) for fields in generations] == [4, 3, 4]
    assert 4 in generations[-1]["members"]
    assert [fields["steps_redone"] for kind, fields in outcome.entries if kind == "recovery"] == [0]


def test_a_worker_and_its_mirror_lost_at_once_send_the_run_back_to_the_start_and_it_reports_it() -> None:
    outcome = survive([(1, 3, "backward"), (2, 3, "backward")])
    recoveries = [fields for kind, fields in outcome.entries if kind == "recovery"]
    assert "start" in {recovery["source"] for recovery in recoveries}
