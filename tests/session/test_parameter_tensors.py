"""Registered tensors: an average of the weights is sharded, goes back with the step, and is in every checkpoint."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.actors.session.user_session import Session
from raysharded.errors import CheckpointError, InexactError, RayshardedError, TaskError
from raysharded.task import TrainFunction
from tests.session.loops import compute, optimizer_of, run, schedule
from tests.training.harness import Small, samples
from tests.training.test_checkpoints import resume

pytestmark = pytest.mark.procs
DECAY = 0.75
HELD_OUT = samples()[:6]
FILE = re.escape(__file__)


def averaging(mean: torch.Tensor, weight: torch.Tensor) -> None:
    mean.lerp_(weight, 1 - DECAY)


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """The loop of the tests' GPT with an average of its weights, and what a test does with it in each step."""

    act: Callable[[Session, Any, nn.Module, rs.ParameterTensors], None]
    dtype: torch.dtype | None = None
    behind: Callable[[rs.ParameterTensors], None] | None = None
    """Called outside the `with`."""

    def __call__(self, session: Session) -> None:
        model = session.build(Small)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        weights = rs.ParameterTensors(dtype=self.dtype)
        session.shard(model, optimizer, scheduler=scheduler, weights=weights)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    compute(step, model, batch)
                step.clip_grad_norm_(0.7)
                optimizer.step()
                scheduler.step()
                self.act(session, step, model, weights)
            if self.behind is not None:
                self.behind(weights)


def nothing(*_: object) -> None: ...


def update(weights: rs.ParameterTensors) -> None:
    weights.update(averaging)


def held_out_loss(model: nn.Module, batch: torch.Tensor) -> rs.Loss:
    logits, targets = model(batch[:, :-1]), batch[:, 1:]
    return rs.Loss(F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"), targets.numel())


def average_and_evaluate(session: Session, step: Any, model: nn.Module, weights: rs.ParameterTensors) -> None:
    weights.update(averaging)
    with weights.as_parameters():
        session.evaluate(lambda batch: held_out_loss(model, batch), HELD_OUT, name="average")
    session.evaluate(lambda batch: held_out_loss(model, batch), HELD_OUT, name="weights")


@pytest.mark.long  # a loss while the parameters are the averages is tried each time
def test_an_average_has_the_same_bits_at_every_size_and_after_every_loss() -> None:
    loop = Averaged(act=average_and_evaluate)
    one = run(1, loop, steps=5)
    kills = [(1, 2, "apply"), (3, 4, "snapshot")]
    assert (
        run(3, loop, kills=kills, steps=5, replacement_wait_s=60.0).bits == one.bits
    )  # worker 3 replaces the first one


@dataclass(frozen=True)
class KilledAsAveraged:
    """In step 2 a worker is killed while the parameters have the averages' values."""

    folder: str

    def __call__(self, session: Session, step: Any, model: nn.Module, weights: rs.ParameterTensors) -> None:
        def loss(batch: torch.Tensor) -> rs.Loss:
            strikes = step.number == 2 and session.rank == 1
            if strikes and len(list(Path(self.folder).iterdir())) < 1:
                Path(self.folder, "killed").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return held_out_loss(model, batch)

        weights.update(averaging)
        with weights.as_parameters():
            session.evaluate(loss, HELD_OUT, name="average")
        session.evaluate(lambda batch: held_out_loss(model, batch), HELD_OUT, name="weights")


def test_a_loss_while_the_parameters_are_the_averages_changes_no_bit(tmp_path: Path) -> None:
    """Its worker is replaced: a worker that joins gets its part of the averages."""
    one = run(1, Averaged(act=average_and_evaluate), steps=3)
    killed = Averaged(act=KilledAsAveraged(str(tmp_path)))
    found = run(2, killed, losses=1, steps=3, replacement_wait_s=60.0)
    assert (tmp_path / "killed").exists()
    assert found.of("worker_lost")
    assert sorted(found.of("generation")[-1]["members"]) == [0, 2]
    assert found.bits == one.bits
    without = run(1, Averaged(act=nothing), steps=3)
    assert [numbers["digest"] for numbers in one.numbers] == [numbers["digest"] for numbers in without.numbers]
    assert one.fingerprint != without.fingerprint  # the tensors are part of it


@dataclass(frozen=True)
class Compared:
    """Compares the average with one of the same weights in plain torch; on one worker, whose parts are whole."""

    folder: str

    def __call__(self, session: Session, step: Any, model: nn.Module, weights: rs.ParameterTensors) -> None:
        from torch.distributed.tensor import DTensor

        def now() -> dict[str, torch.Tensor]:
            named = model.named_parameters()
            return {
                n: (p.to_local() if isinstance(p, DTensor) else p).detach().to(torch.float64, copy=True)
                for n, p in named
            }

        path = Path(self.folder, "plain.pt")
        if step.number == 1:
            with weights.as_parameters():  # still the first weights
                torch.save(now(), path)
        plain = {name: mean.lerp_(now()[name], 1 - DECAY) for name, mean in torch.load(path).items()}
        torch.save(plain, path)
        weights.update(averaging)
        before = now()
        with weights.as_parameters():
            for name, mean in now().items():
                torch.testing.assert_close(mean, plain[name], rtol=1e-5, atol=1e-7)
        assert all(torch.equal(before[name], one) for name, one in now().items())


def test_an_average_is_that_of_plain_torch_and_leaves_the_parameters_as_they_were(tmp_path: Path) -> None:
    run(1, Averaged(act=Compared(str(tmp_path))), steps=3)
    assert len(torch.load(tmp_path / "plain.pt")) == len(list(Small().parameters()))


def with_a_norm(session: Session, step: Any, model: nn.Module, weights: rs.ParameterTensors) -> None:
    weights.update(lambda mean, weight: mean.copy_(weight / weight.norm()))


def with_draws(session: Session, step: Any, model: nn.Module, weights: rs.ParameterTensors) -> None:
    weights.update(lambda mean, weight: mean.copy_(weight + torch.randn_like(weight)))


def with_the_parameter_changed(session: Session, step: Any, model: nn.Module, weights: rs.ParameterTensors) -> None:
    weights.update(lambda mean, weight: weight.copy_(mean))


@pytest.mark.parametrize(
    ("loop", "kind", "told"),
    [
        (Averaged(act=with_a_norm), InexactError, rf"{FILE}:\d+: the rule .* gives other values when .* is cut"),
        pytest.param(
            Averaged(act=with_draws),
            InexactError,
            r"gives other values when the parameter is cut",
            marks=pytest.mark.long,
        ),
        (Averaged(act=with_the_parameter_changed), TaskError, r"the rule changed the parameter 'gains'"),
        (
            Averaged(act=nothing, behind=update),
            TaskError,
            rf"{FILE}:\d+: update\(\) of registered tensors belongs into `with step:`",
        ),
    ],
    ids=["norm", "draws", "parameter", "outside"],
)
def test_a_rule_that_depends_on_the_cut_or_comes_elsewhere_is_refused(
    loop: Averaged, kind: type[RayshardedError], told: str
) -> None:
    with pytest.raises(kind, match=told):
        run(1, loop, steps=2)


def test_tensors_that_are_not_registered_are_refused_by_the_remedy() -> None:
    with pytest.raises(TaskError, match=r"Register them: session\.shard\(model, optimizer, name=tensors\)"):
        rs.ParameterTensors().update(averaging)


def returning(session: Session, step: Any, model: nn.Module, weights: rs.ParameterTensors) -> None:
    weights.update(lambda mean, weight: DECAY * mean + (1 - DECAY) * weight)


def holds_the_weights_of_step_2(session: Session, step: Any, model: nn.Module, weights: rs.ParameterTensors) -> None:
    """In step 3 an update of the optimizer lies between the tensors and the parameters."""
    changed = []
    weights.update(lambda mean, weight: changed.append(bool((mean != weight).any())))
    assert step.number == 3
    assert any(changed)


@dataclass(frozen=True)
class Plain:
    """The loop of the tests' GPT without registered tensors, or with some of another name."""

    average: bool = False

    def __call__(self, session: Session) -> None:
        model = session.build(Small)
        optimizer = optimizer_of(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        session.shard(model, optimizer, scheduler=scheduler, average=rs.ParameterTensors() if self.average else None)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    compute(step, model, batch)
                optimizer.step()
                scheduler.step()


def test_a_run_resumes_with_its_tensors_and_refuses_to_lose_them(tmp_path: Path) -> None:
    loop = TrainFunction(Averaged(act=returning, dtype=torch.float64))
    whole, _ = resume(str(tmp_path / "whole"), 1, steps=2, task=loop)
    resume(str(tmp_path / "run"), 2, steps=1, task=loop)
    with pytest.raises(CheckpointError, match="registered as 'weights', and this program registers none of that name"):
        resume(str(tmp_path / "run"), 1, steps=2, task=TrainFunction(Plain()))
    resumed, _ = resume(str(tmp_path / "run"), 1, steps=2, task=loop)
    assert resumed.result_fingerprint == whole.result_fingerprint is not None


@pytest.mark.long  # a run that loses its tensors is refused each time, with this sentence
def test_tensors_of_another_name_are_refused(tmp_path: Path) -> None:
    resume(str(tmp_path), 1, steps=2, task=TrainFunction(Averaged(act=nothing)))
    with pytest.raises(CheckpointError, match="registered as 'weights', and this program registers none of that name"):
        resume(str(tmp_path), 1, steps=3, task=TrainFunction(Plain(average=True)))


def test_tensors_that_a_program_adds_begin_with_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    found = []
    resume(str(tmp_path / "1"), 1, steps=2, task=TrainFunction(Plain()))
    shutil.copytree(tmp_path / "1", tmp_path / "2")
    for workers in (1, 2):
        url = str(tmp_path / f"{workers}")
        state, _ = resume(url, workers, steps=3, task=TrainFunction(Averaged(act=holds_the_weights_of_step_2)))
        found.append(state.result_fingerprint)
    assert found[0] == found[1] is not None
