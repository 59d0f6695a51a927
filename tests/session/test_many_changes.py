"""Fifty changes of the workers in one process: a survivor's objects, hooks and memory stay as they were."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import raysharded as rs
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.ids import WorkerId
from raysharded.testing import Fault
from tests.session.loops import MICROBATCHES, run
from tests.session.test_objects import Counting
from tests.training.harness import train

pytestmark = [pytest.mark.procs, pytest.mark.long]
CHANGES = 50
PHASES = ("data", "forward", "backward", "agree", "apply", "snapshot")
APART, MOST_GROWTH = 4, 1.02


class Measuring(Counting):
    """Also notes memory, and compiled graphs, in the process of worker 0."""

    def left(self, session: Session, step: UserStep, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().left(session, step, model, optimizer)
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        self._note(f"pages of {os.getpid()}", f"{step.number} {pages}")
        self._note(f"graphs of {os.getpid()}", counters["stats"]["unique_graphs"])


def changes(count: int) -> list[Fault]:
    """A kill every few steps: of worker 1, then of the one that took its place, which worker 0 waits for."""
    kills = [
        Fault(worker=WorkerId(number + 1), step=APART * number + 2, phase=PHASES[number % len(PHASES)])
        for number in range(count)
    ]
    waits = [
        Fault(worker=WorkerId(0), step=APART * number, phase="data", kind="wait", until=WorkerId(number + 1))
        for number in range(1, count)
    ]
    return [*kills, *waits]


def longest(folder: Path, name: str) -> list[str]:
    """Lines of the process that wrote the most of them."""
    return max((file.read_text().splitlines() for file in folder.glob(f"{name} of *")), key=len)


def test_fifty_changes_leave_a_survivor_as_it_was(tmp_path: Path) -> None:
    steps = APART * CHANGES
    outcome = run(2, Measuring(tmp_path), faults=changes(CHANGES), steps=steps)
    assert outcome.bits == train(1, microbatches=MICROBATCHES, steps=steps).bits
    assert set((tmp_path / "older").read_text().split()) == {"0"}
    assert set((tmp_path / "calls").read_text().split()) == {"0"}
    assert len(set(longest(tmp_path, "ids"))) == 1
    memory = {int(step): int(pages) for step, pages in map(str.split, longest(tmp_path, "pages"))}
    assert memory[steps - 1] <= MOST_GROWTH * memory[5 * APART + 1]


def test_changes_compile_no_block_again(tmp_path: Path) -> None:
    steps, engine = APART * CHANGES, rs.EngineConfig(compile=True)
    run(2, Measuring(tmp_path), engine=engine, faults=changes(CHANGES), steps=steps)
    graphs = [int(count) for count in longest(tmp_path, "graphs")]
    assert len(graphs) >= steps - 1
    assert graphs[0] == graphs[-1] > 0
