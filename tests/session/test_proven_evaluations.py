"""Evaluations of a loop whose numbers depend on the worker or on the past: found by a microbatch computed again."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.actors.session.held_out import outputs_of
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import UserStep
from raysharded.errors import InexactError, RayshardedError
from tests.cases import tried_each_time
from tests.session.loops import Average, Loop, by_task, run
from tests.training.harness import GptTask, Tokens, samples, train

pytestmark = pytest.mark.procs
HELD_OUT = samples()[:11]


class Drawing(Tokens):
    """Held-out data that draw from a global generator."""

    def __getitem__(self, index: int) -> Any:
        return np.roll(super().__getitem__(index), int(torch.randint(1, 8, ())))


class Counting(Tokens):
    """Held-out data whose samples change with each reading."""

    def __init__(self) -> None:
        super().__init__(11)
        self._num_reads = itertools.count()

    def __getitem__(self, index: int) -> Any:
        return np.roll(super().__getitem__(index), next(self._num_reads))


class Longer(Tokens):
    """Held-out data with another length on each worker."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def __len__(self) -> int:
        return 8 + 4 * self._rank


def held_out(session: Session) -> list[Any]:
    return HELD_OUT


def drawing(session: Session) -> Tokens:
    return Drawing(11)


def counting(session: Session) -> Tokens:
    return Counting()


def longer(session: Session) -> Tokens:
    return Longer(session.rank)


def one(session: Session, step: UserStep) -> float:
    return 1.0


class Evaluates(Loop):
    """Evaluates behind each update, with a loss and data that may depend on what they must not."""

    def __init__(
        self,
        data: Callable[[Session], Any] = held_out,
        factor: Callable[[Session, UserStep], float] = one,
    ) -> None:
        super().__init__()
        self._data, self._factor = data, factor
        self._held_out: Any = None
        self._model: nn.Module | None = None

    def computed(self, session: Session, step: UserStep, model: nn.Module) -> None:
        self._model = model

    def applied(self, session: Session, step: UserStep, average: Average) -> None:
        self._held_out = self._data(session) if self._held_out is None else self._held_out
        session.evaluate(lambda batch: self.loss(session, step, batch), self._held_out, num_samples=len(self._held_out))

    def loss(self, session: Session, step: UserStep, batch: torch.Tensor) -> rs.Loss:
        assert self._model is not None
        loss = GptTask().loss(self._model, batch)
        assert isinstance(loss, rs.Loss)
        return rs.Loss(loss.total * self._factor(session, step), loss.weight)


def by_rank(session: Session, step: UserStep) -> float:
    return 1.0 + session.rank


def by_rank_since_step_4(session: Session, step: UserStep) -> float:
    return 1.0 + session.rank * (step.number >= 4)


class ByCalls:
    """A factor that depends on the number of calls."""

    def __init__(self) -> None:
        self._calls = itertools.count()

    def __call__(self, session: Session, step: UserStep) -> float:
        return 1.0 + next(self._calls) / 1024


@pytest.mark.parametrize(
    ("workers", "loop", "told"),
    [
        pytest.param(
            2,
            Evaluates(factor=by_rank),
            r"evaluate.* in step 1: microbatches 0, 1 have other results when another worker",
            marks=pytest.mark.long,
        ),
        (2, Evaluates(factor=by_rank_since_step_4), r"in step 4: microbatches 0, 1 have other results when another"),
        pytest.param(
            3,
            Evaluates(factor=ByCalls()),
            r"in step 1: microbatches 0, 1, 2 have other results",
            marks=pytest.mark.long,
        ),
        (1, Evaluates(factor=ByCalls()), r"in step 1: microbatches 0 have other results when they are computed again"),
        pytest.param(
            2,
            Evaluates(drawing),
            r"Drawing\.__getitem__ draws from torch's global generator",
            marks=pytest.mark.long,
        ),
        (1, Evaluates(drawing), r"Drawing\.__getitem__ draws from torch's global generator"),
        (2, Evaluates(counting), r"Counting\[\d+\] gave other values when it was read a second time"),
        (2, Evaluates(longer), r"step 1: the workers call session\.evaluate with data of"),
    ],
)
def test_an_evaluation_that_depends_on_the_worker_or_the_past_is_refused(
    workers: int, loop: Evaluates, told: str
) -> None:
    with pytest.raises(InexactError, match=told):
        run(workers, loop)


@pytest.mark.long  # two evaluations leave them alone each time
def test_an_evaluation_that_is_proven_leaves_the_bits_alone() -> None:
    evaluated = run(1, Evaluates())
    assert all("evaluation" in numbers for numbers in evaluated.numbers)
    assert run(2, Evaluates(), kills=[(1, 4, "apply")]).bits == evaluated.bits
    assert evaluated.fingerprint == by_task().fingerprint


class EvaluatesByRank(GptTask):
    """A task whose held-out loss depends on the worker's process."""

    def evaluate(self, model: nn.Module, batch: Any) -> rs.Loss:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        return rs.Loss(loss.total * os.getpid(), loss.weight)


def test_a_tasks_evaluation_is_proven_by_newcomers() -> None:
    config = rs.EvalConfig(data=HELD_OUT, every_steps=2, num_samples=7)
    with pytest.raises(RayshardedError, match=r"EvaluatesByRank\.evaluate in step 2: microbatches 0, 1 have other"):
        train(2, task=EvaluatesByRank(), evaluation=config)


class Outputs(Evaluates):
    """Computes outputs for held-out data, as adapters of frameworks do."""

    def applied(self, session: Session, step: UserStep, average: Average) -> None:
        def compute(batch: torch.Tensor) -> dict[str, torch.Tensor]:
            assert self._model is not None
            return {"logits": self._model(batch[:, :-1]) * self._factor(session, step)}

        outputs_of(session, HELD_OUT, 3, compute)


@pytest.mark.parametrize("workers", tried_each_time([1], [1, 2]))
def test_outputs_that_depend_on_the_worker_or_the_past_are_refused(workers: int) -> None:
    with pytest.raises(InexactError, match=r"the outputs for held-out data in step 1: microbatches 0(, 1)? have other"):
        run(workers, Outputs(factor=ByCalls()))


class Twice(Evaluates):
    """Two evaluations, whose losses call the model once and twice."""

    def applied(self, session: Session, step: UserStep, average: Average) -> None:
        super().applied(session, step, average)
        session.evaluate(lambda batch: self.twice(session, step, batch), HELD_OUT, num_samples=8, name="twice")

    def twice(self, session: Session, step: UserStep, batch: torch.Tensor) -> rs.Loss:
        self.loss(session, step, batch)
        return self.loss(session, step, batch)


def test_two_evaluations_may_call_the_model_differently_often() -> None:
    plain = run(1, Twice(), steps=3)
    assert plain.bits == run(2, Twice(), kills=[(1, 2, "apply")], steps=3).bits
    assert plain.fingerprint == by_task(3).fingerprint
    for numbers in plain.numbers:
        assert numbers["evaluation"]["twice.loss"] != numbers["evaluation"]["loss"]


class Noisy:
    """A factor with noise of the session's generators: one is made ahead of the evaluations, one in the first loss."""

    def __call__(self, session: Session, step: UserStep) -> float:
        early = torch.rand((), generator=session.generator("early")).item()
        return 1.0 + early + torch.rand((), generator=session.generator("late")).item()


class MakesEarly(Evaluates):
    def entered(self, session: Session, step: UserStep) -> None:
        session.generator("early")


def test_a_sessions_generators_draw_the_same_in_a_held_out_loss_at_every_size() -> None:
    alone, several = (run(workers, MakesEarly(factor=Noisy()), steps=3) for workers in (1, 2))
    evaluations = [[numbers["evaluation"]["loss"] for numbers in one.numbers] for one in (alone, several)]
    assert evaluations[0] == evaluations[1]
    assert several.bits == alone.bits
    assert alone.fingerprint == by_task(3).fingerprint
    without = [numbers["evaluation"]["loss"] for numbers in run(1, Evaluates(), steps=3).numbers]
    factors = [noisy / plain for noisy, plain in zip(evaluations[0], without, strict=True)]
    assert all(1 < factor < 3 for factor in factors)
    assert len({round(factor, 6) for factor in factors}) == len(factors), "each step has other numbers"
