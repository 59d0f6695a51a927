"""Random histories of a run whose loop is a user's: kills, hangs, notices, pauses and other numbers of workers."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from raysharded.driver.driver import Driver
from raysharded.task import TrainFunction
from tests.cases import tried_each_time
from tests.session.loops import Loop
from tests.training.harness import make_limits
from tests.training.test_leaving import Seen, a_job, drive

pytestmark = pytest.mark.procs
ACTS = ("kill", "kill", "hang", "leave", "pause", "resize")
SHORT = ("pause", "leave")
NUM_ACTS, MOST_WORKERS, HANG_S, MOST_STEPS_BETWEEN = 6, 4, 4.0, 4


def happen(act: str, driver: Driver, seen: Seen, random: Random) -> None:
    """Let one thing happen to the run, at a random moment of the next few steps."""
    goal = seen.step + random.randrange(MOST_STEPS_BETWEEN)
    seen.wait(lambda s: s.step >= goal)
    time.sleep(random.random() * 0.2)  # a random moment of the step, not a time that something takes
    member = random.choice(driver.state.members)
    match act:
        case "kill" | "hang" | "leave":
            kind = {"kill": signal.SIGKILL, "hang": signal.SIGSTOP, "leave": signal.SIGTERM}[act]
            facts = driver.state.facts.get(member)  # it may have left meanwhile
            if facts is not None:
                os.kill(facts.pid, kind)
        case "pause":
            count = len(seen.of("paused"))
            driver.pause()
            seen.wait(lambda s: len(s.of("paused")) > count)
            driver.resume()
        case "resize":
            driver.resize(random.randrange(1, MOST_WORKERS + 1))


@pytest.mark.parametrize(
    ("seed", "acts"), tried_each_time([(0, SHORT)], [(0, SHORT), *((seed, None) for seed in range(50))])
)
def test_a_random_history_ends_with_the_bits_of_the_task(
    seed: int, acts: tuple[str, ...] | None, tmp_path: Path
) -> None:
    random = Random(seed)
    job = replace(a_job(tmp_path), task=TrainFunction(Loop()))
    limits = make_limits(
        job,
        2 if acts else random.randrange(1, MOST_WORKERS + 1),
        min_workers=1,
        max_workers=MOST_WORKERS,
        max_worker_losses=NUM_ACTS,
        hang_timeout_s=HANG_S,
        progress_timeout_s=20.0,
    )

    def act(driver: Driver, seen: Seen) -> None:
        for number in range(len(acts or range(NUM_ACTS))):
            happen(acts[number] if acts else random.choice(ACTS), driver, seen, random)
        goal = seen.step + 2
        seen.wait(lambda s: s.step >= goal)

    drive(job, limits, act)
