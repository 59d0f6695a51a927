"""The description of a run that every worker is started with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from raysharded.config import BatchConfig, EngineConfig, EvalConfig, OnNonFinite
from raysharded.task import Task

COMPILED_FOLDER = "compiled"
"""Folder of a run in which workers record the calls of compiled units, for workers that join later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialWeights:
    """The checkpoint whose weights a run begins with."""

    uri: str
    """URI as the user gave it; for error messages."""
    url: str
    """URL of the checkpoint's storage."""
    prefix: str
    digest: str
    """Digest of the manifest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The specification that every worker of a run is started with."""

    run_name: str
    run_url: str
    """The run's own folder on its storage."""
    task: Task
    data: Any
    batch: BatchConfig
    engine: EngineConfig
    evaluation: EvalConfig | None
    max_steps: int
    save_every_steps: int | None
    save_at_end: bool
    use_gpu: bool
    num_threads: int
    collective_timeout_s: float
    read_patience_s: float = 2.5
    """A read of samples that takes longer, and 5 times the longest so far, hangs: it is done again by a new process."""
    grace_s: float = 25.0
    """Longest time that a worker stays after SIGTERM."""
    preemption_notices: tuple[Any, ...] = ()
    """Notices, as in `FailureConfig.preemption_notices`."""
    on_non_finite: OnNonFinite = "stop"
    """Response to a step whose loss or gradient is not finite."""
    records_microbatches: bool = False
    """Whether the workers exchange and report the losses and weights of each step's microbatches."""
    faults: Any = None
    """A `raysharded.testing.FaultPlan`, or None."""
    initial_weights: InitialWeights | None = None
    """Weights at the start of the run; None: those that the task draws."""

    def saves_at(self, step: int) -> bool:
        """Whether a checkpoint of `step` is due."""
        if step == self.max_steps:
            return self.save_at_end
        return self.save_every_steps is not None and step % self.save_every_steps == 0

    def without_data(self) -> Job:
        """The job without data, which another process holds: here they would take the same memory again."""
        evaluation = None if self.evaluation is None else replace(self.evaluation, data=None)
        return replace(self, data=None, evaluation=evaluation)
