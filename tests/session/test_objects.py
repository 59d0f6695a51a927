"""A session's objects are the same after every change of the workers, and nothing of an older generation stays."""

from __future__ import annotations

import gc
import os
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.actors.step.engine import Engine
from raysharded.driver.driver import Driver
from raysharded.task import TrainFunction
from tests.cases import tried_each_time
from tests.session.loops import Loop, by_task, run
from tests.session.test_replaced_objects import Acting, updates
from tests.training.harness import make_limits
from tests.training.test_leaving import Seen, a_job, drive
from tests.training.test_same_objects import count_older

pytestmark = pytest.mark.procs


def older(model: nn.Module) -> int:
    """The number of objects of generations before the one that the model computes with.

    The next one may be prepared meanwhile: it has no memory, and no engine.
    """
    gc.collect()
    mine = {id(param) for param in model.parameters()} | {id(param.grad) for param in model.parameters()}
    found = gc.get_objects()
    engines = sum(isinstance(one, Engine) for one in found)
    return engines - 1 + sum(isinstance(one, DTensor) and not one.is_meta and id(one) not in mine for one in found)


class Counting(Loop):
    """Writes down the identity of its objects, calls of its hooks, and what is alive of older generations."""

    def __init__(self, folder: Path, *, calls: int = 1) -> None:
        """`calls`: how often a block begins for each forward of the model, and the backward behind it."""
        super().__init__()
        self._folder, self._calls_wanted = folder, calls
        self._begun = self._calls = self._forwards = self._microbatches = 0

    def built(self, model: nn.Module) -> None:
        self._model = model

        def begin(*_: Any) -> None:
            self._begun += 1

        def count(*_: Any) -> None:
            self._calls += 1

        def forward(*_: Any) -> None:
            self._forwards += 1

        model.get_submodule("blocks.0").register_forward_pre_hook(begin)
        model.get_submodule("blocks.0").register_forward_hook(count)
        model.register_forward_hook(forward)

    def entered(self, session: Session, step: UserStep) -> None:
        self._begun = self._calls = self._forwards = self._microbatches = 0

    def tokens_of(self, step: UserStep, batch: Any) -> torch.Tensor:
        self._microbatches += 1
        if self._microbatches == 2:
            self._note("older in the second microbatch", older(self._model))
        return super().tokens_of(step, batch)

    def computed(self, session: Session, step: UserStep, model: nn.Module) -> None:
        self._note("older", older(model))
        self._note("calls", self._calls - self._forwards)  # torch ends a recomputation ahead of them
        self._note("calls", self._begun - self._calls_wanted * self._forwards)

    def left(self, session: Session, step: UserStep, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ids = [*(id(module) for module in model.modules()), id(optimizer), *map(id, optimizer.param_groups)]
        self._note(f"ids of {os.getpid()}", hash(tuple(ids)))

    def _note(self, name: str, value: object) -> None:
        with (self._folder / name).open("a") as file:
            file.write(f"{value}\n")


PHASES = ("forward", "backward", "agree", "apply", "snapshot")
PAIRS = [("backward", "apply"), ("forward", "backward"), ("agree", "apply"), ("snapshot", "forward")]


@pytest.mark.parametrize(
    ("first", "second"), tried_each_time(PAIRS[:1], [*PAIRS, *((phase, phase) for phase in PHASES)])
)
def test_after_a_loss_all_objects_are_the_same_and_none_of_the_generation_before_is_alive(
    tmp_path: Path, first: str, second: str
) -> None:
    kills = [(1, 2, first), (2, 3, second)]
    assert run(3, Counting(tmp_path), kills=kills, steps=4).bits == by_task(4).bits
    assert set((tmp_path / "older").read_text().split()) == {"0"}
    assert set((tmp_path / "older in the second microbatch").read_text().split()) == {"0"}
    assert set((tmp_path / "calls").read_text().split()) == {"0"}  # a hook is called once for each forward
    processes = [file.read_text().split() for file in tmp_path.glob("ids of *")]
    assert max(map(len, processes)) >= 4
    assert all(len(set(ids)) == 1 for ids in processes)


@pytest.mark.parametrize("phase", tried_each_time(["forward"], ["forward", "apply"]))
def test_an_aborted_generation_is_freed_before_the_next_one_of_a_loop_gets_its_memory(
    tmp_path: Path, phase: str
) -> None:
    """As that of a task: `tests/training/test_same_objects.py`. The loop has registered tensors, too."""
    file = tmp_path / "older"
    run(2, Acting(updates), steps=3, kills=[(1, 2, phase)], prepare=partial(count_older, file))
    assert len(file.read_text().split()) >= 3
    assert set(file.read_text().split()) == {"0"}


class Keeping(Counting):
    """Keeps the errors of its microbatches until step 4."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._kept: list[Exception] = []

    def entered(self, session: Session, step: UserStep) -> None:
        super().entered(session, step)
        if step.number == 4:
            self._kept.clear()

    def computing(self, step: UserStep, model: nn.Module, batch: Any) -> None:
        try:
            super().computing(step, model, batch)
        except Exception as error:  # noqa: BLE001 - as a loop that counts failed microbatches
            self._kept.append(error)

    def computed(self, session: Session, step: UserStep, model: nn.Module) -> None:
        self._note("older beside errors" if self._kept else "older", older(model))


@pytest.mark.parametrize("phase", tried_each_time(["backward"], ["forward", "backward"]))
def test_errors_that_a_loop_keeps_hold_objects_of_their_generation_until_it_drops_them(
    tmp_path: Path, phase: str
) -> None:
    assert run(2, Keeping(tmp_path), kills=[(1, 2, phase)], steps=4).bits == by_task(4).bits
    assert (tmp_path / "older beside errors").exists()
    assert set((tmp_path / "older").read_text().split()) == {"0"}


@pytest.mark.long  # two losses are tried each time, and a spare with the objects of a task
def test_survivors_keep_all_objects_when_a_spare_takes_the_lost_place(tmp_path: Path) -> None:
    """Their buffers, too: `test_survivors_keep_the_memory_of_their_buffers_when_a_spare_takes_the_lost_place`."""
    job, pids = replace(a_job(tmp_path), task=TrainFunction(Counting(tmp_path))), dict[int, int]()

    def act(driver: Driver, seen: Seen) -> None:
        seen.wait(lambda s: len(s.of("worker_ready")) == 3)
        pids.update({worker: driver.state.facts[worker].pid for worker in driver.state.members})
        os.kill(pids[driver.state.members[1]], signal.SIGKILL)
        seen.wait(lambda s: s.of("recovery"))

    _, seen = drive(job, make_limits(job, 2, min_workers=1, max_worker_losses=1, spares=1), act)
    first, second = seen.of("generation")
    kept = [now for now, before in zip(second["members"], first["members"], strict=True) if now == before]
    assert kept == [first["members"][0]]
    for worker in kept:
        ids = (tmp_path / f"ids of {pids[worker]}").read_text().split()
        assert len(ids) > second["step"], "steps of both generations"
        assert len(set(ids)) == 1
    assert set((tmp_path / "older").read_text().split()) == {"0"}
    assert set((tmp_path / "calls").read_text().split()) == {"0"}
