"""Fifty changes of the workers in one process: a survivor's objects, hooks and memory stay as they were."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import raysharded as rs
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.ids import WorkerId
from raysharded.task import TrainFunction
from raysharded.testing import Fault, FaultPlan
from tests.session.loops import MICROBATCHES, Loop
from tests.session.test_objects import Counting
from tests.training.harness import Collector, Outcome, make_driver, make_job, make_limits, train

pytestmark = [pytest.mark.procs, pytest.mark.long]
CHANGES = 50
PHASES = ("data", "forward", "backward", "agree", "apply", "snapshot")
STEPS, PACE_S, MOST_GROWTH = 8 * CHANGES, 0.1, 1.02  # worker 0 alone takes so long over a step: a join takes few


class Measuring(Counting):
    """Also notes memory, and compiled graphs, in the process of worker 0."""

    def left(self, session: Session, step: UserStep, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().left(session, step, model, optimizer)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self._note(f"pages of {os.getpid()}", f"{step.number} {pages}")
        self._note(f"graphs of {os.getpid()}", counters["stats"]["unique_graphs"])


class Killing(Collector):
    """Kills, in every generation of two, the worker that joined last, and lets worker 0 wait for the one after it.

    Orders follow what the driver recorded: a replacement is started once the step behind a loss is done, so worker 0
    may wait in the step after that and no sooner. A plan by steps alone lets it wait sooner, if a worker joins late.
    """

    def __init__(self, plan: FaultPlan, kills: int) -> None:
        super().__init__()
        self._plan, self._left = plan, kills

    def __call__(self, kind: str, fields: dict[str, Any]) -> None:
        super().__call__(kind, fields)
        if kind != "generation":
            return
        step, newest = fields["step"], WorkerId(max(fields["members"]))
        if newest > 0 and self._left:
            self._left -= 1
            self._plan.order(Fault(worker=newest, step=step + 2, phase=PHASES[self._left % len(PHASES)]))
        elif newest == 0:
            started = WorkerId(1 + len([kind for kind, _ in self.entries if kind == "worker_lost"]))
            self._plan.order(Fault(worker=newest, step=step + 2, phase="data", kind="wait", until=started))


def changing(folder: Path, loop: Loop, engine: rs.EngineConfig | None = None) -> Outcome:
    """A run of two workers in which one is lost, and replaced, `CHANGES` times."""
    slow = Fault(worker=WorkerId(0), step=1, phase="data", kind="slow", seconds=PACE_S, every=True)
    plan = FaultPlan(faults=(slow,), folder=str(folder), listens=True)
    task, url = TrainFunction(loop), f"{folder}/run"
    job = make_job(url, task=task, microbatches=MICROBATCHES, steps=STEPS, engine=engine, faults=plan)
    listener = Killing(plan, CHANGES)
    limits = make_limits(job, 2, min_workers=1, max_worker_losses=CHANGES, join_wait_s=60.0)
    state = make_driver(job, limits, listener).run()
    outcome = Outcome(
        numbers=tuple(listener.numbers[step] for step in range(1, STEPS + 1)),
        fingerprint=state.result_fingerprint,
        entries=tuple(listener.entries),
    )
    assert len(outcome.of("worker_lost")) == CHANGES
    return outcome


def longest(folder: Path, name: str) -> list[str]:
    """Lines of the process that wrote the most of them."""
    return max((file.read_text().splitlines() for file in folder.glob(f"{name} of *")), key=len)


def test_fifty_changes_leave_a_survivor_as_it_was(tmp_path: Path) -> None:
    outcome = changing(tmp_path, Measuring(tmp_path))
    assert outcome.bits == train(1, microbatches=MICROBATCHES, steps=STEPS).bits
    assert set((tmp_path / "older").read_text().split()) == {"0"}
    assert set((tmp_path / "calls").read_text().split()) == {"0"}
    assert len(set(longest(tmp_path, "ids"))) == 1
    memory = {int(step): int(pages) for step, pages in map(str.split, longest(tmp_path, "pages"))}
    fifth = [fields["step"] for fields in outcome.of("generation")][2 * 5]
    assert memory[STEPS - 1] <= MOST_GROWTH * memory[fifth + 1]


def test_changes_compile_no_block_again(tmp_path: Path) -> None:
    changing(tmp_path, Measuring(tmp_path), rs.EngineConfig(compile=True))
    graphs = [int(count) for count in longest(tmp_path, "graphs")]
    assert len(graphs) >= STEPS - 1
    assert graphs[0] == graphs[-1] > 0
