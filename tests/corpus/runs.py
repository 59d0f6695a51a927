"""A program of the corpus, trained by the real driver and real workers: at some size, with a kill or without."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

import raysharded as rs
from raysharded import checkpoint
from raysharded.checkpoint import open_storage
from raysharded.clock import SystemClock
from raysharded.driver.driver import Driver
from raysharded.ids import WorkerId
from raysharded.ownership.leadership import LeaseTerms
from raysharded.protocol.job import Job
from raysharded.testing import Fault, FaultPlan
from raysharded.testing.processes import ProcessLauncher
from tests.corpus.program import SEED, Program
from tests.training.harness import Collector, files_of, grouped, make_job, make_limits

_WEIGHTS, _KEPT = ("model.", "buffer."), ("optim.", "number.")


class SeparateLauncher(ProcessLauncher):
    """Workers that share nothing, as on separate machines: each imports all itself, with another hash seed."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._context: Any = multiprocessing.get_context("spawn")

    def start(self, worker: WorkerId, avoid: tuple[str, ...] = ()) -> None:
        before = os.environ.get("PYTHONHASHSEED")
        os.environ["PYTHONHASHSEED"] = str(1 + worker)  # each another one, and the same ones each time
        try:
            super().start(worker, avoid)
        finally:
            del os.environ["PYTHONHASHSEED"]
            if before is not None:
                os.environ["PYTHONHASHSEED"] = before


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The number of a run's workers, and their layout."""

    workers: int
    is_killed: bool = False
    """True if worker 1 is killed in a backward, and another one takes its place."""
    then: int | None = None
    """Number of workers of the second part of the run, if it has two."""
    tensor: int = 1
    stops_after: int | None = None
    """The run is stopped after so many steps, and another driver resumes it with `then` workers."""
    forks: bool = False
    """True if the second part is a fork, in a separate folder."""

    def __str__(self) -> str:
        text = "1 worker" if self.workers == 1 else f"{self.workers} workers"
        return f"{text} with a kill" if self.is_killed else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Ran:
    """The results of a run."""

    numbers: tuple[Mapping[str, Any], ...]
    fingerprint: str | None
    weights: Mapping[str, torch.Tensor]
    """Parameters and persistent buffers by name, as the last checkpoint has them."""
    kept: Mapping[str, torch.Tensor]
    """The optimizer's state: by the parameter's name and its own."""

    @property
    def bits(self) -> tuple[str, ...]:
        """All that must be equal at every size, with NaN equal to NaN."""
        return (*map(repr, self.numbers), str(self.fingerprint))


def run(program: Program, size: Size, *, separate: bool = False) -> Ran:
    """Train the program from its start to its end. Raises the run's error."""
    with tempfile.TemporaryDirectory() as folder:
        kill = Fault(worker=WorkerId(1), step=2, phase="backward")
        plan = FaultPlan(faults=(kill,), folder=folder) if size.is_killed else None
        part = _Part(program=program, size=size, url=f"{folder}/run", separate=separate)
        state = part.driver(program.task, size.stops_after or program.steps, size.workers, plan).run()
        assert plan is None or plan.fired(kill)
        if program.then is not None or size.stops_after is not None:
            if size.forks:
                part = dataclasses.replace(part, url=f"{folder}/fork")
                storage = open_storage(f"{folder}/run")
                checkpoint.fork(storage, checkpoint.list_checkpoints(storage)[-1], open_storage(part.url))
            steps = program.steps + (2 if program.then else 0)
            driver = part.driver(program.then or program.task, steps, size.then or size.workers, None)
            driver.restore()
            state = driver.run()
        numbers = part.listener.numbers
        return Ran(
            numbers=tuple(numbers[step] for step in sorted(numbers)),
            fingerprint=state.result_fingerprint,
            weights=_read(part.url, _WEIGHTS),
            kept=_read(part.url, _KEPT),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """A run, or its second part."""

    program: Program
    size: Size
    url: str
    separate: bool
    listener: Collector = field(default_factory=Collector)

    def driver(self, task: rs.Task, steps: int, workers: int, faults: FaultPlan | None) -> Driver:
        """A driver that trains up to so many steps."""
        job = self._job(task, steps, faults)
        limits = make_limits(
            job,
            workers,
            min_workers=1 if faults else workers,
            max_worker_losses=len(faults.faults) if faults else 0,
            grouping=grouped(job, None, tensor=self.size.tensor),
            join_wait_s=60.0,  # all begin together, on a busy machine too: the fault's worker is to be there
            start_timeout_s=180.0 if self.separate else 60.0,
        )
        files = files_of(job)
        launcher = SeparateLauncher(job) if self.separate else ProcessLauncher(job)
        return Driver(limits, launcher, files, SystemClock(), self.listener, LeaseTerms())

    def _job(self, task: rs.Task, steps: int, faults: FaultPlan | None) -> Job:
        program, size = self.program, self.program.microbatch_size
        job = make_job(
            self.url,
            task=task,
            microbatches=program.microbatches,
            steps=steps,
            engine=program.engine,
            evaluation=program.evaluation,
            data=program.data,
            faults=faults,
        )
        batch = rs.BatchConfig(global_batch_size=size * program.microbatches, microbatch_size=size, seed=SEED)
        return dataclasses.replace(job, batch=batch)


def _read(url: str, prefixes: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The contents of the newest checkpoint under names with these prefixes."""
    found = checkpoint.open(url)
    return {name.partition(".")[2]: found.read(name) for name in found.tensors if name.startswith(prefixes)}
