"""Data workers: samples are read, and batches made, beside training; reads that hang or fail are done again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.data.order import positions_of_step, sample_ids
from tests.training.harness import GptTask, Tokens, train

pytestmark = pytest.mark.procs
DEADLINE_S = 20.0


def ids_of(step: int, microbatches: int, num_samples: int) -> list[int]:
    """The samples of a step, by the order of new runs in the harness."""
    ids: list[int] = sample_ids(5, positions_of_step(step, 2 * microbatches), num_samples).tolist()
    return ids


class Noted(Tokens):
    """Leaves a file for each sample that is read."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        (self.folder / str(index)).touch()
        return super().__getitem__(index)


class Awaiting(GptTask):
    """The loss of step 2 waits until another step's samples were read."""

    def __init__(self, files: list[Path]) -> None:
        self.files = files

    def lr_scale(self, step: int) -> float:
        return 1.0

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        deadline = time.monotonic() + DEADLINE_S
        while not all(file.exists() for file in self.files):
            assert time.monotonic() < deadline, "nothing is read while a loss is computed"
            time.sleep(0.01)
        return super().loss(model, batch)


def test_the_next_step_is_read_while_this_one_is_computed(tmp_path: Path) -> None:
    files = [tmp_path / str(index) for index in ids_of(2, 1, 301)]
    train(1, task=Awaiting(files), data=Noted(tmp_path), microbatches=1, steps=2)
