"""`session.build(make)`: how often `make` is called, and models that differ between workers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.errors import InexactError
from raysharded.ids import WorkerId
from raysharded.testing import Fault
from tests.session.loops import Loop, by_task, run
from tests.training.harness import A_CHANGE, Gpt

pytestmark = pytest.mark.procs
DEEPER = "TESTS_MAKE_ANOTHER_MODEL"


class Made:
    """Makes the tests' model, and writes a line for each call into a file of the process."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self) -> nn.Module:
        with (self._folder / str(os.getpid())).open("a") as file:
            file.write("made\n")
        return Gpt()


def make_by_surroundings() -> nn.Module:
    return Gpt(layers=3 if DEEPER in os.environ else 2)


def surround() -> None:
    os.environ[DEEPER] = "1"


def test_a_model_that_differs_on_one_worker_ends_with_a_sentence() -> None:
    with pytest.raises(InexactError, match="differ"):
        run(2, Loop(make_by_surroundings), prepare={WorkerId(1): surround}, steps=2)


class Changing(Loop):
    """Hangs hooks on the model and the optimizer in mid-run, in the process that is there from the start."""

    def left(self, session: Session, step: UserStep, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if session.first_step == step.number == 1:
            model.register_forward_hook(look)
            model.get_submodule("blocks.0").register_forward_pre_hook(look)
            optimizer.register_step_post_hook(look)


def look(*_: Any) -> None: ...


def test_a_model_is_made_twice_in_a_process_that_begins_and_once_in_one_that_joins_and_these_are_compared(
    tmp_path: Path,
) -> None:
    """The second time for the values of the first weights. A worker that joins is compared with what was built, and not
    with what became of it. The rates have changed, too: by the schedule."""
    faults = [Fault(worker=WorkerId(0), step=4, phase="data", kind="wait", until=A_CHANGE)]
    outcome = run(2, Changing(Made(tmp_path)), kills=[(1, 2, "forward")], faults=faults)
    assert outcome.of("generation")[-1]["members"] == [0, 2]
    assert outcome.bits == by_task().bits
    calls = sorted(len(file.read_text().split()) for file in tmp_path.iterdir())
    assert calls == [1, 2, 2]
