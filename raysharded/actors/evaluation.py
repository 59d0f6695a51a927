"""Evaluation on held-out data: microbatches dealt round-robin, so that the numbers are the same at any size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from raysharded.actors.compute import Computer, Results
from raysharded.actors.schedule import microbatch_of, num_rounds
from raysharded.data import Loader
from raysharded.task import Task

Share = tuple[int | None, list[Any]]
"""(microbatch, its samples); None: the worker only joins the collectives."""


def num_microbatches(num_samples: int, microbatch_size: int) -> int:
    """How many there are; the last may be smaller."""
    return -(-num_samples // microbatch_size)


def shares(
    loader: Loader, num_samples: int, microbatch_size: int, *, rank: int, world_size: int, padding: list[Any]
) -> Iterator[Share]:
    """What `rank` evaluates, round by round; every worker has as many rounds."""
    count = num_microbatches(num_samples, microbatch_size)
    for round_index in range(num_rounds(count, world_size)):
        index = microbatch_of("sharded", count, world_size, rank, round_index)
        if index is None:
            yield None, padding
        else:
            start = index * microbatch_size
            yield index, loader.load_range(start, min(start + microbatch_size, num_samples))


def evaluate(
    model: nn.Module, computer: Computer, task: Task, step: int, dealt: Iterator[Share], results: Results
) -> None:
    """Call the task's `evaluate` on every share, in eval mode, and collect what it gives."""
    model.eval()
    with torch.no_grad():
        for index, samples in dealt:
            loss = computer.loss("evaluate", step, index or 0, computer.batch(samples), len(samples))
            results.note_names(loss, task)
            if index is not None:
                results.add(index, loss)
    model.train()
