"""Data workers: samples are read, and batches made, during training; reads that hang or fail are done again."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.data.order import positions_of_step, sample_ids
from tests.training.harness import SmallTask, Tokens, train

pytestmark = pytest.mark.procs
DEADLINE_S = 60.0


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


class Awaiting(SmallTask):
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


class AwaitingHeldOut(SmallTask):
    """The first held-out batch waits until the third was read."""

    def __init__(self, files: list[Path]) -> None:
        self._awaiting = Awaiting(files)

    def evaluate(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        return self._awaiting.loss(model, batch)


def test_the_next_held_out_batches_are_read_while_one_is_computed(tmp_path: Path) -> None:
    held_out = rs.EvalConfig(data=Noted(tmp_path), every_steps=2, num_samples=6)
    task = AwaitingHeldOut([tmp_path / "4", tmp_path / "5"])
    train(1, task=task, evaluation=held_out, microbatches=1, steps=2)


class Troubled(Tokens):
    """Samples as in `Tokens`; some give trouble when they are first read: one hangs, one dies, one fails."""

    def __init__(self, folder: Path, troubles: tuple[int, ...]) -> None:
        super().__init__()
        self.folder, self.troubles = folder, troubles

    def __getitem__(self, index: int) -> Any:
        (self.folder / f"read by {os.getpid()}").touch()
        if index in self.troubles and not (self.folder / f"trouble {index}").exists():
            (self.folder / f"trouble {index}").touch()
            trouble = self.troubles.index(index)
            if trouble == 0:
                time.sleep(600)
            elif trouble == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ConnectionResetError("the server has closed the connection")
        return super().__getitem__(index)


class Masking(SmallTask):
    """Its collate draws from three generators, and notes the process that calls it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def collate(self, samples: list[Any]) -> Any:
        (self.folder / f"collated by {os.getpid()}").touch()
        tokens = torch.as_tensor(np.stack(samples))
        masked = torch.rand(tokens.shape) + np.random.random() + random.random() < 1.2
        return tokens.masked_fill(masked, 1)


def test_batches_of_several_processes_have_the_same_bits_whatever_happens_to_the_processes(tmp_path: Path) -> None:
    troubles = tuple(ids_of(2, 4, 301)[index] for index in (0, 3, 5))
    plain, beside = tmp_path / "plain", tmp_path / "beside"
    plain.mkdir()
    beside.mkdir()
    expected = train(1, task=Masking(plain), data=Tokens(), microbatches=4, engine=rs.EngineConfig(prefetch=False))
    engine = rs.EngineConfig(data_processes=2)
    data = Troubled(beside, troubles)
    found = train(2, task=Masking(beside), data=data, microbatches=4, engine=engine, read_patience_s=2.5)
    assert found.bits == expected.bits
    assert not found.of("worker_lost")
    for trouble in troubles:
        assert (beside / f"trouble {trouble}").exists()
    readers = {path.name.rpartition(" ")[2] for path in beside.glob("read by *")}
    collators = {path.name.rpartition(" ")[2] for path in beside.glob("collated by *")}
    assert len(readers) >= 5, "two of each worker, and another one in place of one that was killed"
    assert readers & collators, "batches are made where samples are read"
    assert len(collators - readers) == 2, "the workers make the first ones, too, to compare them"
