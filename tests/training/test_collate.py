"""The task's own `collate`: samples of several lengths, custom draws, collators that take keys out of samples."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import raysharded as rs
from raysharded.errors import InexactError, TaskError
from tests.cases import tried_each_time
from tests.training.harness import Outcome, train

pytestmark = pytest.mark.procs

VOCABULARY, WIDTH = 19, 6
SAMPLES = [{"tokens": torch.arange(3 + index % 4) * (index + 1) % VOCABULARY, "weight": 1.0} for index in range(23)]


class Ragged(rs.Task):
    """Pads, masks tokens by three generators, and takes a key out of each sample, as stock collators do."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def collate(self, samples: list[Any]) -> Any:
        weights = torch.tensor([sample.pop("weight") for sample in samples])
        tokens = nn.utils.rnn.pad_sequence([sample["tokens"] for sample in samples], batch_first=True)
        drawn = torch.rand(tokens.shape) + np.random.random() + random.random()
        return {"tokens": tokens, "masked": drawn < 1.5, "weights": weights}

    def loss(self, model: nn.Module, batch: Any) -> rs.Loss:
        tokens = batch["tokens"].masked_fill(batch["masked"], 0)
        each = nn.functional.cross_entropy(model(tokens).flatten(0, 1), batch["tokens"].flatten(), reduction="none")
        share = batch["masked"].sum()
        return rs.Loss(each.sum(), each.numel(), {"masked": (share, each.numel())})


def trained(workers: int, **settings: Any) -> Outcome:
    held_out = rs.EvalConfig(data=SAMPLES, every_steps=2, num_samples=5)
    return train(
        workers,
        task=Ragged(),
        data=SAMPLES,
        microbatches=5,
        steps=2,
        evaluation=held_out,
        engine=rs.EngineConfig(audit_every_steps=1),
        **settings,
    )


KILLED = (3, ((1, 2, "backward"),))


@pytest.mark.parametrize(("workers", "kills"), tried_each_time([KILLED], [(2, ()), (3, ()), KILLED]))
def test_what_collate_draws_is_the_same_at_every_size(workers: int, kills: tuple[Any, ...]) -> None:
    alone = trained(1)
    assert trained(workers, kills=kills).bits == alone.bits
    first, second = (numbers["metrics"]["masked"] for numbers in alone.numbers)
    assert 0 < first < 1
    assert first != second  # another draw in each step
    assert all("weight" in sample for sample in SAMPLES)


class Raising(Ragged):
    """Fails on one sample."""

    def collate(self, samples: list[Any]) -> Any:
        raise ValueError(f"cannot pad {len(samples)} samples")


def test_an_error_in_collate_names_the_method_and_the_samples() -> None:
    with pytest.raises(TaskError, match=r"Raising\.collate of microbatch \d of step 1, of samples .*cannot pad 2") as e:
        train(1, task=Raising(), data=SAMPLES, microbatches=2, steps=1)
    assert Path(__file__).name in e.value.user_traceback


class InPlace(Ragged):
    """Masks the tokens of its samples themselves."""

    def collate(self, samples: list[Any]) -> Any:
        for sample in samples:
            sample["tokens"][torch.rand(len(sample["tokens"])) < 0.5] = 0
        return super().collate(samples)


class Copies:
    """The samples of `SAMPLES`, made for each read."""

    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, index: int) -> Any:
        return {**SAMPLES[index], "tokens": torch.as_tensor(SAMPLES[index]["tokens"]).clone()}


def test_a_collate_that_masks_the_datasets_own_memory_ends_the_run_by_name() -> None:
    with pytest.raises(InexactError, match=r"InPlace\.collate changes its samples in place, and the dataset has them"):
        train(1, task=InPlace(), data=SAMPLES, microbatches=2, steps=1)


def test_a_collate_may_mask_samples_that_are_made_for_each_read() -> None:
    outcomes = [
        train(1, task=InPlace(), data=Copies(), microbatches=2, steps=2, engine=rs.EngineConfig(prefetch=prefetch))
        for prefetch in (True, False)
    ]
    assert outcomes[0].bits == outcomes[1].bits
