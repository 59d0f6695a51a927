"""Lines behind the `with`, for steps that are complete and for steps that are undone; draws at all places of a loop."""

from __future__ import annotations

import random
import re
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.errors import InexactError, TaskError
from tests.cases import tried_each_time
from tests.session import loops
from tests.session.loops import Loop, by_small_task, optimizer_of, run
from tests.session.test_in_a_step import HELD_OUT, Evaluating
from tests.training.harness import Outcome, Small

pytestmark = pytest.mark.procs
STEPS = 4
LOOP = re.escape(loops.__file__)


class Printing(Loop):
    """Reads the step behind the `with`, as a log does."""

    def __init__(self, notes: Path) -> None:
        super().__init__(Small)
        self._notes = notes

    def left(self, session: Session, step: UserStep, *_: object) -> None:
        with (self._notes / f"{step.number} {step.done}").open("a") as file:
            file.write(f"{step.loss!r} {sorted(step.metrics)}\n")


@pytest.mark.parametrize(
    ("workers", "kills"),
    tried_each_time(
        [(2, [(1, 3, "forward")])], [(2, [(1, 3, "forward")]), (3, [(1, 2, "snapshot"), (2, 3, "forward")])]
    ),
)
def test_lines_behind_the_with_can_read_a_step_that_was_undone(
    tmp_path: Path, workers: int, kills: list[tuple[int, int, str]]
) -> None:
    outcome = run(workers, Printing(tmp_path), kills=kills, steps=3)
    assert outcome.bits == by_small_task(3).bits
    for number, loss in enumerate(outcome.losses, 1):
        lines = (tmp_path / f"{number} True").read_text().splitlines()
        assert set(lines) == {f"{loss!r} ['accuracy', 'logit']"}
    assert set((tmp_path / "3 False").read_text().splitlines()) == {"nan []"}


class Unbound(Loop):
    """Behind the `with` it reads a metric of the step, which one that was undone does not have."""

    def left(self, session: Session, step: UserStep, *_: object) -> None:
        assert step.metrics["accuracy"] <= 1


def test_an_error_behind_a_step_that_was_undone_names_the_line_and_the_way_out() -> None:
    sentence = (
        LOOP + r":\d+: a line behind the step's `with`.* raised an error.*step [23] is done again.*if step\.done:"
    )
    with pytest.raises(TaskError, match=sentence):
        run(2, Unbound(Small), kills=[(1, 3, "forward")], steps=STEPS)


class DiffersOnce(Loop):
    """Worker 1 makes one step at another rate, the first time only."""

    def __init__(self) -> None:
        super().__init__(Small)
        self._groups: list[dict[str, Any]] = []
        self._has_differed = False

    def computed(self, session: Session, step: UserStep, _: nn.Module) -> None:
        if step.number == 3 and session.rank == 1 and not self._has_differed:
            self._has_differed = True
            for group in self._groups:
                group["lr"] *= 2

    def left(self, session: Session, step: UserStep, _: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._groups = optimizer.param_groups


@pytest.mark.parametrize("phase", tried_each_time(["agree"], ["data", "backward", "agree"]))
def test_no_run_continues_from_a_step_whose_settings_were_not_compared(phase: str) -> None:
    """Settings of step 3 are compared while step 4 computes; a loss there may leave nobody with the result."""
    with pytest.raises(InexactError, match=r"step 3 is computed again.*with other settings|step 3:.* differ between"):
        run(3, DiffersOnce(), kills=[(2, 4, phase)], steps=STEPS + 1)


def numbers() -> list[float]:
    """A draw of each generator of the process."""
    return [torch.rand(()).item(), random.random(), float(np.random.rand())]


class Drawing(Evaluating):
    """Draws at all places of the loop, without generators of the session's."""

    def built(self, model: nn.Module) -> None:
        super().built(model)
        self.first = numbers()

    def entered(self, session: Session, step: UserStep) -> None:
        self.early = numbers()

    def applied(self, session: Session, step: UserStep, *_: object) -> None:
        drawn = {"first": self.first, "early": self.early, "rest": numbers()}
        for count in range(2):
            session.evaluate(self.loss, HELD_OUT)
            drawn[f"evaluated{count}"] = numbers()
        session.log(**{f"{name}{place}": one for name, each in drawn.items() for place, one in enumerate(each)})


@cache
def drawn_alone() -> Outcome:
    return run(1, Drawing(), steps=3)


@pytest.mark.parametrize("kills", tried_each_time([[(1, 2, "backward")]], [[], [(1, 2, "backward")]]))
def test_draws_of_the_process_outside_microbatches_do_not_depend_on_the_worker(
    kills: list[tuple[int, int, str]],
) -> None:
    assert run(2, Drawing(), kills=kills, steps=3).bits == drawn_alone().bits


def test_draws_of_the_process_are_others_at_every_place() -> None:
    metrics = [numbers["metrics"] for numbers in drawn_alone().numbers]
    places = [f"{name}{place}" for name in ("early", "rest", "evaluated0", "evaluated1") for place in range(3)]
    assert len({each[place] for each in metrics for place in places}) == 3 * len(places)


class Carrying(Loop):
    """Draws behind the `with`, and logs the numbers in the next step."""

    def __init__(self) -> None:
        super().__init__(Small)
        self._drawn = [0.0] * 3

    def applied(self, session: Session, *_: object) -> None:
        session.log(**{f"drawn{place}": one for place, one in enumerate(self._drawn)})

    def left(self, session: Session, *_: object) -> None:
        self._drawn = numbers()


def test_draws_behind_a_step_do_not_depend_on_the_worker() -> None:
    assert run(2, Carrying(), steps=2).bits == run(1, Carrying(), steps=2).bits


class Autocast:
    """Forwards in bfloat16, by autocast around each microbatch or around the whole step."""

    def __init__(self, *, is_around: bool) -> None:
        self._is_around = is_around

    def __call__(self, session: Session) -> None:
        model = session.build(Small)
        optimizer = optimizer_of(model)
        session.shard(model, optimizer)

        def loss_of(batch: torch.Tensor) -> Any:
            return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1).float(), batch[:, 1:].flatten())

        for step in session.steps():
            with cast() if self._is_around else nullcontext(), step:
                for batch in step.microbatches():
                    with cast():
                        loss = loss_of(batch)
                    step.backward(loss)
                optimizer.step()
                with cast() if not self._is_around else nullcontext():
                    session.evaluate(loss_of, HELD_OUT)


def cast() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


@cache
def cast_in_the_body() -> Outcome:
    return run(1, Autocast(is_around=False), steps=2)


@pytest.mark.parametrize(
    ("workers", "kills"),
    tried_each_time([(1, [])], [(1, []), (2, [(1, 2, "backward")]), (3, [(1, 2, "backward")])]),
)
def test_autocast_around_a_step_has_the_bits_of_autocast_in_its_microbatches(
    workers: int, kills: list[tuple[int, int, str]]
) -> None:
    assert run(workers, Autocast(is_around=True), steps=2, kills=kills).bits == cast_in_the_body().bits
