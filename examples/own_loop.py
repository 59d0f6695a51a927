"""Train with your own loop on two workers; each kind of line is explained in docs/own-loop.md.

    python examples/own_loop.py

No arguments, no data, no GPU: two cores and half a minute are enough. Run again, it finds its run finished.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import raysharded as rs

P = 31


class Sums:
    """Every a + b modulo 31. A dataset is anything with a length and items."""

    def __len__(self) -> int:
        return P * P

    def __getitem__(self, index: int) -> torch.Tensor:
        a, b = divmod(index, P)
        return torch.tensor([a, b, (a + b) % P])


class Adder(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.numbers = nn.Embedding(P, width)
        self.hidden, self.head = nn.Linear(2 * width, 2 * width), nn.Linear(2 * width, P)

    def forward(self, terms: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(F.gelu(self.hidden(self.numbers(terms).flatten(1))))
        return logits


def train(session: Any) -> None:
    model = session.build(Adder)  # parameters without memory; the first weights come from the run's seed
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = CosineAnnealingLR(optimizer, session.max_steps)
    session.shard(model, optimizer, scheduler=scheduler)  # in place: the same objects for the whole run
    for step in session.steps():
        with step:  # all of it happened, or it is done again
            for batch in step.microbatches():
                logits = model(batch[:, :2])
                right = (logits.argmax(-1) == batch[:, 2]).sum()
                loss = F.cross_entropy(logits, batch[:, 2], reduction="sum")
                step.backward(loss, weight=len(batch), metrics={"right": (right, len(batch))})
            step.clip_grad_norm_(1.0)
            optimizer.step()
            scheduler.step()
        if step.done and session.rank == 0 and step.number % 20 == 0:
            print(f"step {step.number}: loss {step.loss:.4f}", flush=True)  # into the worker's log


def trainer(storage_path: str = "runs", steps: int = 100) -> rs.ElasticTrainer:
    return rs.ElasticTrainer(
        train_fn=train,
        data=Sums(),
        batch=rs.BatchConfig(global_batch_size=128, microbatch_size=32, seed=0),
        scaling=rs.ScalingConfig(num_workers=(1, 2), cpus_per_worker=0.5),
        run=rs.RunConfig(name="own-loop", storage_path=storage_path, max_steps=steps),
    )


if __name__ == "__main__":
    result = trainer().fit()
    print(f"step {result.steps}: loss {result.loss:.4f}, {result.metrics['right']:.0%} right")
    print(f"What happened: raysharded report {result.url}")
