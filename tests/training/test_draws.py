"""Draws of stock code, from torch's, NumPy's and Python's own generators, are the same at every size: in a dataset, in
a forward, in a loss, in an evaluation, and where activations are computed again."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import raysharded as rs
from raysharded.errors import InexactError, TaskError
from tests.cases import tried_each_time
from tests.training.harness import Outcome, train

pytestmark = pytest.mark.procs

WIDTH = 6
STEPS, MICROBATCHES = 2, 5
KILLED = (1, 2, "backward")
Library = Literal["torch", "numpy", "random"]
LIBRARIES: tuple[Library, ...] = ("torch", "numpy", "random")


def draw(library: str, number: int) -> torch.Tensor:
    """A tensor of `number` values from one generator of the process."""
    if library == "torch":
        return torch.rand(number)
    if library == "numpy":
        return torch.from_numpy(np.random.standard_normal(number)).float()
    return torch.tensor([random.random() for _ in range(number)])


class Samples:
    """Samples that differ from each other."""

    def __len__(self) -> int:
        return 37

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(-1.0, 1.0, WIDTH) * (1 + index % 7)


class Reseeding(Samples):
    """The idiom: each of the process's generators is seeded with the index, and then drawn from."""

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.manual_seed(index)
        np.random.seed(index)
        random.seed(index)
        return sum((draw(library, WIDTH) for library in LIBRARIES), super().__getitem__(index))


class Block(nn.Module):
    """Drops out by torch's generator, and masks by NumPy's and `random`'s, as a speech model masks its time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        masked = torch.from_numpy(np.random.random(WIDTH) < 0.3) | (draw("random", WIDTH) < 0.2)
        y: torch.Tensor = x + self.dropout(self.linear(x)).tanh().masked_fill(masked, 0.0)
        return y


Kind = Literal["none", "reentrant", "not reentrant"]


class Net(nn.Module):
    """Two blocks; `recomputes`: the model itself computes their activations again, with one of torch's two kinds."""

    def __init__(self, recomputes: Kind) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.recomputes = recomputes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.recomputes == "none":
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.recomputes == "reentrant")
        return x


class Masks(rs.Task):
    """Mixes samples in the loss by NumPy's generator."""

    def __init__(self, recomputes: Kind = "none") -> None:
        self.recomputes: Kind = recomputes

    def build_model(self) -> nn.Module:
        return Net(self.recomputes)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def wrap(self, model: nn.Module) -> list[nn.Module] | None:
        return [] if self.recomputes == "reentrant" else None  # its second forward is not that of a unit

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        share, batch = float(np.random.beta(0.4, 0.4)), batch.float()
        mixed = share * batch + (1 - share) * batch[np.random.permutation(len(batch))]
        loss: torch.Tensor = (model(mixed) ** 2).mean() * (1 + random.gauss(0.0, 0.1) ** 2)
        return loss


SAMPLES = [Samples()[index] for index in range(len(Samples()))]
"""Those samples as a list, which a thread of the worker reads."""


def trained(workers: int, **settings: Any) -> Outcome:
    return train(
        workers, **{"steps": STEPS, "microbatches": MICROBATCHES, "task": Masks(), "data": SAMPLES, **settings}
    )


def assert_equal_at_all_sizes(**settings: Any) -> Outcome:
    """Compare one worker that reads nothing ahead with two of which one is killed."""
    one = trained(1, engine=rs.EngineConfig(prefetch=False), **settings)
    assert trained(2, kills=[KILLED], **settings).bits == one.bits
    return one


def test_what_a_forward_a_loss_and_an_evaluation_draw_is_the_same_at_every_size() -> None:
    evaluation = rs.EvalConfig(data=SAMPLES, every_steps=1, num_samples=5)
    one = assert_equal_at_all_sizes(evaluation=evaluation)
    first, second = (numbers["evaluation"]["loss"] for numbers in one.numbers)
    assert first != second


def test_a_dataset_that_seeds_the_generators_with_its_index_is_the_same_at_every_size() -> None:
    assert_equal_at_all_sizes(
        data=Reseeding(), evaluation=rs.EvalConfig(data=Reseeding(), every_steps=1, num_samples=3)
    )


# -- computed again --


@cache
def alone() -> Outcome:
    return trained(1)


@pytest.mark.parametrize("kind", tried_each_time(["ours", "reentrant"], ["ours", "reentrant", "not reentrant"]))
def test_what_is_computed_again_draws_what_it_drew(kind: str) -> None:
    if kind == "ours":
        settings: dict[str, Any] = {"engine": rs.EngineConfig(activation_checkpointing=True)}
    else:
        settings = {"task": Masks("reentrant" if kind == "reentrant" else "not reentrant")}
    assert trained(2, **settings).bits == alone().bits


# -- what shows in samples is refused --


class Augmenting(Samples):
    """Adds a number that nobody has seeded, to one sample."""

    def __init__(self, library: Library, index: int) -> None:
        self.library, self.index = library, index

    def __getitem__(self, index: int) -> torch.Tensor:
        sample = super().__getitem__(index)
        return sample + draw(self.library, 1) if index == self.index else sample


READ_IN_STEP_2 = 30
"""The index of a sample that is not read at the start."""


@pytest.mark.parametrize(
    ("library", "prefetch"),
    tried_each_time(
        [("numpy", True), ("torch", False)],
        [(library, prefetch) for library in LIBRARIES for prefetch in (True, False)],
    ),
)
def test_a_sample_that_shows_an_unseeded_draw_is_refused_where_it_is_read(library: Library, prefetch: bool) -> None:
    data, engine = Augmenting(library, READ_IN_STEP_2), rs.EngineConfig(prefetch=prefetch)
    words = (
        rf"Augmenting.__getitem__ draws from {library}'s global generator, for sample {READ_IN_STEP_2} in step \d, mic"
    )
    with pytest.raises(InexactError, match=words):
        trained(1, data=data, engine=engine, steps=4)


class Unsteady(Samples):
    """Gives another sample each time."""

    def __init__(self, by: str) -> None:
        self.by, self.generator = by, np.random.default_rng(3)

    def __getitem__(self, index: int) -> torch.Tensor:
        number = time.perf_counter() if self.by == "clock" else float(self.generator.random())
        return super().__getitem__(index).double() + number


@pytest.mark.parametrize("by", ["clock", "own generator"])
def test_a_dataset_that_gives_another_sample_for_the_same_index_is_refused_at_the_start(by: str) -> None:
    with pytest.raises(InexactError, match=r"Unsteady\[\d+\] gave other values when it was read a second time"):
        trained(1, data=Unsteady(by))


# -- the process that reads --


class Dying(Samples):
    """The process that reads sample `READ_IN_STEP_2` dies: once, or each time."""

    def __init__(self, folder: Path, *, once: bool) -> None:
        self.folder, self.once = str(folder), once

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == READ_IN_STEP_2 and not (self.once and os.path.exists(f"{self.folder}/died")):
            open(f"{self.folder}/died", "x" if self.once else "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def test_a_process_of_the_data_that_is_killed_is_started_again_and_the_bits_are_the_same(tmp_path: Path) -> None:
    outcome = trained(1, data=Dying(tmp_path, once=True))
    assert (tmp_path / "died").exists()
    assert outcome.bits == alone().bits
    assert len(outcome.of("generation")) == 1, "the worker went on"


def test_a_process_of_the_data_that_dies_again_ends_the_run_with_words(tmp_path: Path) -> None:
    words = (
        r"the process that reads the data was ended by SIGKILL \(out of memory\?\); it was started again, and was ended"
    )
    with pytest.raises(TaskError, match=words):
        trained(1, steps=4, data=Dying(tmp_path, once=False))
