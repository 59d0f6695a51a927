"""Trainers for the checks: one that keeps the promise, and some that break it, each where one check finds it."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

import raysharded as rs
from raysharded.actors.session.user_session import Session
from tests.session.loops import Average, optimizer_of
from tests.training.harness import GptTask, Small, SmallTask, Tokens, samples

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")


def trainer_of(task: rs.Task, storage: str, data: Any = None, **engine: Any) -> rs.ElasticTrainer:
    """A trainer for six workers that would write to `storage`. Threads read its own data; a custom dataset is read by
    processes, each of which takes longer to start than a run."""
    return rs.ElasticTrainer(
        task=task,
        data=data or samples(),
        batch=rs.BatchConfig(global_batch_size=32, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=(1, 6)),
        run=rs.RunConfig(name="whole", storage_path=storage, max_steps=1000),
        engine=rs.EngineConfig(**engine),
        evaluation=rs.EvalConfig(data=samples()[:9], every_steps=50, num_samples=9),
    )


def trainer_of_loop(function: Any, storage: str) -> rs.ElasticTrainer:
    """A trainer of a training function for six workers."""
    return rs.ElasticTrainer(
        train_fn=function,
        data=samples(),
        batch=rs.BatchConfig(global_batch_size=12, microbatch_size=2, seed=5),
        scaling=rs.ScalingConfig(num_workers=(1, 6)),
        run=rs.RunConfig(name="whole", storage_path=storage, max_steps=1000),
    )


class Counted:
    """A loop that wants all steps of its program, as a framework's, and counts them itself."""

    def __call__(self, session: Session) -> None:
        if (session.max_steps, session.batch.num_microbatches) != (1000, 6):
            raise ValueError(f"{session.max_steps} steps of {session.batch.num_microbatches} microbatches")
        task, average = SmallTask(), Average()
        model = session.build(Small)
        optimizer = optimizer_of(model)
        session.shard(model, optimizer, average=average)
        while average.count < session.max_steps:
            average.add(session.gradient(lambda batch: task.loss(model, batch)).loss)
            optimizer.step()
        raise ValueError("1000 steps are done")


class Rescaled:
    """A loop with another loss at every number of workers."""

    def __call__(self, session: Session) -> None:
        model = session.build(Small)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        session.shard(model, optimizer)
        for step in session.steps():
            with step:
                for batch in step.microbatches():
                    group = distributed_c10d._world.default_pg  # dist.get_world_size() is refused by name
                    world_size = 1 if group is None else group.size()
                    step.backward(model(batch[:, :-1]).logsumexp(-1).mean() / world_size)
                optimizer.step()


class Loud(GptTask):
    """Keeps the promise, and prints."""

    def build_model(self) -> nn.Module:
        print("building")  # noqa: T201 - as users do
        return super().build_model()


class OfASet(Small):
    """Its parameters are in the order of a set."""

    def __init__(self) -> None:
        super().__init__()
        names = list(set(NAMES))
        random.Random(os.environ.get("PYTHONHASHSEED", "")).shuffle(names)  # forks of one server share the set's order
        self.more = nn.ModuleDict({name: nn.Linear(1, 1) for name in names})

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = super().forward(tokens) + sum(module(torch.ones(1)) for module in self.more.values())
        return logits


class Broken(SmallTask):
    """Another order of parameters in every process, another loss at every number of workers, and another optimizer in a
    worker that joins."""

    lr = 0.01
    _num_started: ClassVar = 0
    """Number of workers that this process has started for the present run."""

    def __getstate__(self) -> dict[str, Any]:
        """The state for one more worker; of three in a run the third one joins."""
        Broken._num_started = 1 + (self._num_started if multiprocessing.active_children() else 0)
        return {"lr": 0.02 if self._num_started > 2 else 0.01}

    def build_model(self) -> nn.Module:
        return OfASet()

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=self.lr)

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        found = super().loss(model, batch)
        assert isinstance(found, rs.Loss)
        return rs.Loss(found.total / (dist.get_world_size() if dist.is_initialized() else 1), found.weight)


class Clock(Tokens):
    """Gives other samples every time."""

    def __getitem__(self, index: int) -> Any:
        sample = super().__getitem__(index)
        sample[0] = time.monotonic_ns() % 67
        return sample


class Raises(SmallTask):
    """Its loss raises."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        raise LookupError("no such target")


class Interrupts(SmallTask):
    """Does what Ctrl-C does to a process, in the first step."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def loss(self, model: nn.Module, batch: torch.Tensor) -> rs.Loss | torch.Tensor:
        if dist.is_initialized():
            os.kill(self.pid, signal.SIGINT)
            time.sleep(60)  # until it is killed
        return super().loss(model, batch)


class Sleeps(SmallTask):
    """Never has a model."""

    def build_model(self) -> nn.Module:
        time.sleep(600)  # until it is killed
        raise AssertionError


def loud(storage: str) -> rs.ElasticTrainer:
    """A trainer for the command line."""
    return trainer_of(Loud(), storage)


def raising(storage: str) -> rs.ElasticTrainer:
    """A trainer for the command line, whose loss raises."""
    return trainer_of(Raises(), storage)
