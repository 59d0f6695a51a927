"""Cases that break the promise, or cannot work, end the run with an error and a remedy; it never hangs."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.errors import InexactError, NonFiniteLoss, TaskError
from tests.cases import tried_each_time
from tests.training.harness import VOCABULARY, Gpt, GptTask, SmallTask, Tokens, TwoBlocksTask, samples, train

pytestmark = pytest.mark.procs
ID_OF_STEP_2 = 285
"""Index of a sample that is read in step 2, as one of the fourth microbatch."""


def assert_same_bits(**settings: Any) -> None:
    settings |= {"steps": 2, "microbatches": 5}
    assert train(2, **settings).bits == train(1, **settings).bits


class Skipping(Gpt):
    """Leaves out its first or its last block, for some inputs or for all."""

    def __init__(self, skipped: int, always: bool) -> None:
        super().__init__(layers=3)
        self._skipped, self._always = skipped, always

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        skips = self._always or int(tokens.sum()) % 2
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = x if skips and index == self._skipped else block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


class SkippingTask(GptTask):
    def __init__(self, skipped: int, always: bool = False) -> None:
        self._skipped, self._always = skipped, always

    def build_model(self) -> nn.Module:
        return Skipping(self._skipped, self._always)


@pytest.mark.parametrize(
    ("workers", "accumulation", "skipped"),
    tried_each_time(
        [(1, "sharded", 0), (2, "local", 0)],
        [(1, "sharded", 0), (2, "sharded", 0), (3, "sharded", 2), (2, "local", 0), (3, "local", 0)],
    ),
)
def test_a_block_that_some_microbatches_skip_is_refused(workers: int, accumulation: Any, skipped: int) -> None:
    with pytest.raises(
        InexactError, match=rf"the forward of step 1, microbatch \d comes to .*unit blocks\.{skipped}\b"
    ):
        train(workers, task=SkippingTask(skipped), engine=rs.EngineConfig(accumulation=accumulation))


def test_a_block_that_no_microbatch_uses_is_refused() -> None:
    with pytest.raises(InexactError, match=r"unit blocks\.2 took no part"):
        train(1, task=SkippingTask(2, always=True))


class TwicePerhaps(SmallTask):
    """Some microbatches use the model twice: the first time without gradients."""

    def __init__(self, where: str) -> None:
        self._where = where

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        return self._loss(model, batch, again=self._where == "loss")

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        return self._loss(model, batch, again=self._where == "evaluate")

    def _loss(self, model: nn.Module, batch: torch.Tensor, *, again: bool) -> rs.Loss | torch.Tensor:
        if again and int(batch.sum()) % 2:
            with torch.no_grad():
                model(batch[:, :-1])
        return super().loss(model, batch)


@pytest.mark.parametrize(
    ("calls", "where", "workers"),
    tried_each_time(
        [("loss", "step 1", 2), ("evaluate", "the evaluation after step 1", 1)],
        [
            (calls, where, workers)
            for calls, where in (("loss", "step 1"), ("evaluate", "the evaluation after step 1"))
            for workers in (1, 2, 3)
        ],
    ),
)
def test_a_model_that_some_microbatches_call_more_often_is_refused(calls: str, where: str, workers: int) -> None:
    evaluation = rs.EvalConfig(data=samples()[:16], every_steps=1, num_samples=16)
    with pytest.raises(
        InexactError, match=rf"the forward of {where}, .* comes to (its end|unit the root) where another"
    ):
        train(workers, task=TwicePerhaps(calls), evaluation=evaluation, hang_timeout_s=20.0)


class Repeating(TwoBlocksTask):
    """Every microbatch uses the model twice, and evaluation leaves a block out."""

    def build_model(self) -> nn.Module:
        class Early(Gpt):
            def __init__(self) -> None:
                super().__init__(2)

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                x = self.embedding(tokens)
                for block in self.blocks if self.training else self.blocks[:1]:
                    x = block(x)
                logits: torch.Tensor = self.head(self.norm(x))
                return logits

        return Early()

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        with torch.no_grad():
            model(batch[:, :-1])
        return super().loss(model, batch)


def test_what_all_microbatches_of_a_kind_do_alike_trains_exactly() -> None:
    evaluation = rs.EvalConfig(data=samples()[:10], every_steps=1, num_samples=10)
    assert_same_bits(task=Repeating(), evaluation=evaluation)


class Chosen(SkippingTask):
    """The block that is skipped now and then belongs to the root."""

    def wrap(self, model: nn.Module) -> list[nn.Module]:
        return [model.get_submodule("blocks.0"), model.get_submodule("blocks.1")]


def test_a_block_that_is_skipped_trains_exactly_where_its_parent_holds_it() -> None:
    assert_same_bits(task=Chosen(2))


class Spare(Gpt):
    """Has parameters in the root that some microbatches do not use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.bonus, self.never = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(tokens)
        return logits * self.bonus.mean() if int(tokens.sum()) % 2 else logits


class SpareTask(GptTask):
    def build_model(self) -> nn.Module:
        return Spare()


@pytest.mark.long  # `test_unused_parameters.py` has them
def test_single_parameters_that_not_every_microbatch_uses_train_exactly() -> None:
    assert_same_bits(task=SpareTask())


class Looping(GptTask):
    """Uses one of its blocks several times."""

    def build_model(self) -> nn.Module:
        class Looped(Gpt):
            def __init__(self) -> None:
                super().__init__(2)

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                x = self.embedding(tokens)
                for _ in range(3):
                    x = self.blocks[0](x)
                logits: torch.Tensor = self.head(self.norm(self.blocks[1](x)))
                return logits

        return Looped()


@pytest.mark.parametrize("workers", tried_each_time([1], [1, 2]))
def test_a_unit_that_a_forward_uses_several_times_is_refused_with_the_way_out(workers: int) -> None:
    with pytest.raises(InexactError, match=r"unit blocks\.0: its gradients came twice .*Task\.wrap"):
        train(workers, task=Looping())


class Counter(GptTask):
    """A buffer that forward changes, from some step on."""

    def __init__(self, name: str) -> None:
        self._name = name

    def build_model(self) -> nn.Module:
        name = self._name

        class Counted(Gpt):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("calls", torch.zeros(1), persistent=name == "persistent")

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                self.get_buffer("calls").add_(1)
                logits: torch.Tensor = super().forward(tokens)
                return logits

        return Counted()


@pytest.mark.parametrize("kind", tried_each_time(["persistent"], ["persistent", "not persistent"]))
def test_a_buffer_that_forward_changes_is_refused_by_name(kind: str) -> None:
    with pytest.raises(InexactError, match=r"buffer 'calls' changed during forward"):
        train(1, task=Counter(kind), steps=1)


class Averaging(GptTask):
    """Keeps a running average in a buffer, in one of the ways that torch does not count, in training or in evaluation
    only."""

    def __init__(self, how: str) -> None:
        self._how = how

    def build_model(self) -> nn.Module:
        how = self._how

        class Averaged(Gpt):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("mean", torch.zeros(VOCABULARY))
                self.register_buffer("variance", torch.ones(VOCABULARY))

            def forward(self, tokens: torch.Tensor) -> torch.Tensor:
                logits: torch.Tensor = super().forward(tokens)
                mean, variance = self.get_buffer("mean"), self.get_buffer("variance")
                if how == "through .data" and self.training:
                    mean.data.mul_(0.9).add_(logits.detach().mean((0, 1)), alpha=0.1)
                elif how == "batch-norm" and self.training:
                    flat = logits.detach().flatten(0, 1)
                    torch.nn.functional.batch_norm(flat, mean, variance, training=True)
                elif how == "in evaluation" and not self.training:
                    mean.add_(1)
                return logits

        return Averaged()


@pytest.mark.parametrize(
    "how", tried_each_time(["through .data", "in evaluation"], ["through .data", "batch-norm", "in evaluation"])
)
def test_a_buffer_that_is_changed_behind_torchs_back_is_refused_by_name(how: str) -> None:
    held_out = rs.EvalConfig(data=samples(), every_steps=2, num_samples=4) if how == "in evaluation" else None
    with pytest.raises(InexactError, match=r"buffer 'mean' changed during forward"):
        train(2 if how == "batch-norm" else 1, task=Averaging(how), evaluation=held_out)


class Diverging(SmallTask):
    """The loss is NaN in the microbatch that has a certain sample, of step 2."""

    def __init__(self, in_gradient: bool) -> None:
        self._in_gradient = in_gradient

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        if not (batch == Tokens()[ID_OF_STEP_2]).all(-1).any():
            return loss
        bad = (loss.total - loss.total.detach()).sqrt() if self._in_gradient else loss.total * math.nan
        return rs.Loss(loss.total + bad if self._in_gradient else bad, loss.weight, loss.metrics)


@pytest.mark.parametrize(("in_gradient", "what"), [(False, "the loss is nan"), (True, "the gradient is not finite")])
def test_a_loss_or_gradient_that_is_not_finite_names_the_step_and_the_microbatch(in_gradient: bool, what: str) -> None:
    with pytest.raises(NonFiniteLoss, match=rf"^step 2: {what} \(microbatch 3\)"):
        train(1, task=Diverging(in_gradient), steps=2)


class Raising(SmallTask):
    """The task's own code has a bug that one microbatch meets."""

    def __init__(self, where: str) -> None:
        self._where = where

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        if (batch == Tokens()[ID_OF_STEP_2]).all(-1).any():
            return self._stumble(loss)
        return loss

    def _stumble(self, loss: rs.Loss) -> rs.Loss | torch.Tensor:
        match self._where:
            case "loss":
                raise LookupError("no such token")
            case "exit":
                sys.exit("the loss is bad")
            case "interrupt":
                raise KeyboardInterrupt
            case "metrics":
                return rs.Loss(loss.total, loss.weight, {"other": (1.0, 1.0)})
            case "kind":
                return cast(rs.Loss, "three")
            case "shape":
                return torch.ones(2, 3)
            case "weight":
                return rs.Loss(loss.total, -1.0, loss.metrics)
            case "weight on the device":
                return rs.Loss(loss.total, torch.tensor(-1.0), loss.metrics)
            case _:
                return rs.Loss(loss.total.detach(), loss.weight, loss.metrics)


BUGS = {
    "loss": r"Raising\.loss in step 2, microbatch \d raised LookupError: .*no such token",
    "exit": r"Raising\.loss in step 2, microbatch \d raised SystemExit: the loss is bad",
    "interrupt": r"Raising\.loss in step 2, microbatch \d raised KeyboardInterrupt",
    "metrics": r"different metric names|other metrics",
    "kind": r"Raising\.loss in step 2, microbatch \d returned a str",
    "shape": r"returned a tensor of shape \(2, 3\)",
    "weight": r"returned a Loss whose weight is -1\.0",
    "weight on the device": r"Raising\.loss in step 2, microbatch \d returned a Loss whose weight is -1\.0",
    "detached": r"the backward of Raising\.loss in step 2",
}


@pytest.mark.parametrize(
    "where", tried_each_time([bug for bug in BUGS if bug not in ("shape", "weight", "interrupt")], BUGS)
)
def test_a_bug_in_the_task_ends_the_run_with_what_it_did(where: str) -> None:
    with pytest.raises(TaskError, match=BUGS[where]) as caught:
        train(2 if where in ("loss", "metrics") else 1, task=Raising(where), steps=2)
    if where == "loss":
        assert "_stumble" in caught.value.user_traceback
        assert 'raise LookupError("no such token")' in caught.value.user_traceback


class ExitingAt(SmallTask):
    """Ends its process where no other function is called around it."""

    def __init__(self, where: str) -> None:
        self._where = where

    def build_model(self) -> nn.Module:
        if self._where == "build_model":
            sys.exit("no model")
        return super().build_model()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self._where == "build_optimizer":
            sys.exit("no optimizer")
        return super().build_optimizer(model)


@pytest.mark.parametrize("where", tried_each_time(["build_model"], ["build_model", "build_optimizer"]))
def test_a_task_that_exits_while_it_is_built_ends_the_run_with_its_output(where: str) -> None:
    with pytest.raises(TaskError, match="SystemExit: no "):
        train(1, task=ExitingAt(where))


class OwnMetrics(SmallTask):
    """The names of the metrics depend on the microbatch; at two workers each sees one kind alone."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        loss = super().loss(model, batch)
        assert isinstance(loss, rs.Loss)
        names = ["a"] if int(batch[0, 0]) % 2 else ["a", "b"]
        return rs.Loss(loss.total, loss.weight, dict.fromkeys(names, (1.0, 1.0)))


@pytest.mark.parametrize("workers", tried_each_time([1, 2], [1, 2, 3]))
def test_metrics_that_differ_between_workers_are_refused(workers: int) -> None:
    with pytest.raises(TaskError, match=r"other metrics on this worker|different metric names"):
        train(workers, task=OwnMetrics(), microbatches=2)


class Empty(SmallTask):
    """Every token is masked."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        return rs.Loss(model(batch[:, :-1]).sum(), 0.0)


def test_no_item_to_average_over_is_refused() -> None:
    with pytest.raises(TaskError, match="step 1: the weights of all microbatches add up to 0"):
        train(1, task=Empty())


class DrawingTokens(Tokens):
    """Augments its samples with numbers from a global generator."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self._library = library

    def __getitem__(self, index: int) -> Any:
        draws: dict[str, Callable[[], float]] = {
            "torch": lambda: torch.rand(1).item(),
            "numpy": np.random.standard_normal,
            "random": random.random,
        }
        draws[self._library]()
        return super().__getitem__(index)


@pytest.mark.parametrize("library", tried_each_time(["numpy"], ["torch", "numpy", "random"]))
def test_a_dataset_that_draws_from_a_global_generator_is_refused(library: str) -> None:
    with pytest.raises(InexactError, match=rf"DrawingTokens.__getitem__ draws from {library}'s global generator"):
        train(1, task=SmallTask(), data=DrawingTokens(library))
