"""A program: a training on each of some folders, which may be below a fake network file system.

Arguments: the folders. Prints the results as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

import raysharded as rs
from raysharded.testing import processes

STEPS, EVERY = 8, 2


class Squares(rs.Task):
    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(batch).square().mean()
        return loss


class Ramps:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.linspace(0.0, 1 + index / 64, 4)


def train(folder: str, workers: int = 2) -> dict[str, Any]:
    kinds: list[str] = []
    trainer = rs.ElasticTrainer(
        task=Squares(),
        data=[Ramps()[index] for index in range(64)],
        batch=rs.BatchConfig(global_batch_size=4, microbatch_size=1),
        scaling=rs.ScalingConfig(num_workers=workers),
        run=rs.RunConfig(
            name="run", storage_path=folder, max_steps=STEPS, checkpoint=rs.CheckpointConfig(every_steps=EVERY)
        ),
    )
    result = processes.fit(trainer, lambda kind, _: kinds.append(kind))
    return {"fingerprint": result.fingerprint, "kinds": kinds}


if __name__ == "__main__":
    sys.stdout.write(json.dumps([train(folder) for folder in sys.argv[1:]]) + "\n")
