"""The growth of a worker's C heap, by the allocator's own count (`mallinfo2`), beside other commands of this folder.

    python -m tests.run.heap_growth [--steps 3000] [--workers 2] [--variant mirrors|none|parity|fast]

A tiny model is trained by worker processes, each of which notes the bytes in use every 50 steps. The slope is that of
a regression over the last half, in bytes per step of each worker.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from torch import nn

import raysharded as rs
from raysharded.actors.step import pending_reports
from raysharded.testing.processes import fit

_EVERY = 50
VARIANTS = ("mirrors", "none", "parity", "fast")


class _Info(ctypes.Structure):  # mallinfo(3)
    _fields_ = [(name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks")]
    _fields_ += [(name, ctypes.c_size_t) for name in ("fsmblks", "uordblks", "fordblks", "keepcost")]


def in_use() -> int:
    """Bytes that this process has allocated with malloc and not freed, large ones included."""
    info = ctypes.CDLL(None).mallinfo2
    info.restype = _Info
    found = info()
    return int(found.uordblks + found.hblkhd)


class Tiny(rs.Task):
    """A linear layer, whose loss notes the bytes in use."""

    def __init__(self, folder: str) -> None:
        self.folder, self.calls = folder, 0

    def __setstate__(self, state: dict[str, Any]) -> None:
        """In a worker: its reports of steps are as many as they will ever be from the beginning on."""
        self.__dict__.update(state)
        pending_reports.REPORTS_KEPT = 256

    def build_model(self) -> nn.Module:
        return nn.Linear(8, 8)

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % _EVERY == 0:
            with Path(self.folder, f"{os.getpid()}").open("a", encoding="ascii") as file:
                file.write(f"{self.calls} {in_use()}\n")
        return F.mse_loss(model(batch), batch)


class Rows:
    """Rows of one number each."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.full((8,), index / 64)


def slopes(steps: int, workers: int, variant: str) -> list[float]:
    """Bytes per step by which each worker's heap grows in the last half of so many steps."""
    engine = {
        "mirrors": rs.EngineConfig(),
        "none": rs.EngineConfig(mirrors=False),
        "parity": rs.EngineConfig(redundancy=rs.Redundancy(parity=(workers - 1, 1))),
        "fast": rs.EngineConfig(reduction="fast"),
    }[variant]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "notes").mkdir()
        rows = Rows()
        trainer = rs.ElasticTrainer(
            task=Tiny(f"{folder}/notes"),
            data=[rows[index] for index in range(len(rows))],
            batch=rs.BatchConfig(global_batch_size=workers, microbatch_size=1),
            scaling=rs.ScalingConfig(num_workers=workers),
            run=rs.RunConfig(
                name="heap",
                storage_path=folder,
                max_steps=steps,
                checkpoint=rs.CheckpointConfig(every_s=None, at_end=False),
            ),
            engine=engine,
        )
        fit(trainer)
        found = []
        for notes in sorted(Path(folder, "notes").iterdir()):
            points = np.loadtxt(notes)
            last = points[len(points) // 2 :]
            found.append(float(np.polyfit(last[:, 0], last[:, 1], 1)[0]))
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--variant", choices=VARIANTS, default="mirrors")
    asked = parser.parse_args()
    found = slopes(asked.steps, asked.workers, asked.variant)
    print(f"{asked.variant}, {asked.workers} workers: {', '.join(f'{one:.1f}' for one in found)} bytes per step")


if __name__ == "__main__":
    main()
