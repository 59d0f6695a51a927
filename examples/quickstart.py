"""Train a small model on three workers, kill one of them in the middle of a step, and end with the same weights.

    python examples/quickstart.py

No arguments, no data, no GPU: two cores and half a minute are enough.
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.ids import WorkerId
from raysharded.testing import Fault, FaultPlan

TEXT = b"Change the number of workers at any step, lose any of them at any moment. " * 20
STEPS = 60


class NextByte(rs.Task):
    """Predict a byte from the one before: the model, its optimizer, its loss."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(256, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=3e-3)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss:
        logits, targets = model(batch[:, :-1]), batch[:, 1:]
        return rs.Loss(
            F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum"), targets.numel()
        )


def train(name: str, folder: str, workers: int, kill: Fault | None = None) -> rs.Result:
    trainer = rs.ElasticTrainer(
        task=NextByte(),
        data=[torch.tensor(list(TEXT[i : i + 65])) for i in range(1024)],  # anything with a length and an index
        batch=rs.BatchConfig(global_batch_size=32, microbatch_size=4, seed=0),
        scaling=rs.ScalingConfig(num_workers=(1, workers), cpus_per_worker=0.5),
        run=rs.RunConfig(name=name, storage_path=folder, max_steps=STEPS),
    )
    trainer.faults = FaultPlan(faults=(kill,), folder=folder) if kill else None
    return trainer.fit()


if __name__ == "__main__":
    folder = tempfile.mkdtemp(prefix="quickstart-")
    kill = Fault(worker=WorkerId(1), step=STEPS // 2, phase="backward", kind="kill")
    disturbed = train("disturbed", folder, workers=3, kill=kill)
    undisturbed = train("undisturbed", folder, workers=1)
    print(f"3 workers, one killed by SIGKILL: {disturbed.fingerprint}")
    print(f"1 worker, undisturbed:            {undisturbed.fingerprint}")
    if disturbed.fingerprint != undisturbed.fingerprint:
        sys.exit("They differ: please report this.")
    print(f"The same bits. What happened:     raysharded report {disturbed.url}")
    print("Your own model and data:          examples/train_gpt.py, docs/tasks.md")
