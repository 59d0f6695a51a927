"""A run with another run's task, data and settings, for a few steps on one or two workers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from raysharded.config import BatchConfig, CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from raysharded.display.quantities import count
from raysharded.task import Task, TrainFunction, has_tensor_parallelism
from raysharded.testing.faults import FaultPlan

if TYPE_CHECKING:
    from raysharded.run.spec import RunSpec

Device = Literal["cpu"]
_MICROBATCHES = (2, 4)
"""Least and most microbatches of a step: both of two workers compute, and sums have an order."""
_EVALUATED = 2
"""Microbatches of an evaluation."""
_HANG_TIMEOUT_S = 60.0


def _length(data: Any) -> int | None:
    """The length of the data; None if it raises an error, which the run reports in detail."""
    try:
        return len(data)
    except Exception:  # noqa: BLE001 - the boundary to the user's code
        return None


@dataclass(frozen=True, kw_only=True, slots=True)
class Small:
    """Specifies such runs, which write only to a separate folder."""

    spec: RunSpec
    """The run to check."""
    folder: str
    steps: int
    device: Device | None
    """The device; None: as in `spec`."""
    timeout_s: float

    @property
    def use_gpu(self) -> bool:
        return self.spec.scaling.use_gpu and self.device != "cpu"

    @property
    def threads(self) -> int:
        """Threads of each worker."""
        return self.spec.threads_per_worker

    @property
    def batch(self) -> BatchConfig:
        """The trainer's microbatches, but fewer in a step if the trainer has many.

        As many if the loop is a training function's, which may count on their number.
        """
        own = self.spec.batch
        fewest, most = _MICROBATCHES
        there_are = _length(self.spec.data)
        microbatches = max(own.num_microbatches, fewest)
        if not isinstance(self.spec.task, TrainFunction):
            microbatches = min(microbatches, most)
        if there_are is not None:
            microbatches = max(1, min(microbatches, there_are // own.microbatch_size))
        return replace(own, global_batch_size=own.microbatch_size * microbatches)

    @property
    def task(self) -> Task:
        """The trainer's task. A training function sees the trainer's own `max_steps`, to which it may be bound."""
        task, steps = self.spec.task, max(self.spec.run.max_steps, self.steps)
        return TrainFunction(task.function, steps) if isinstance(task, TrainFunction) else task

    def made(self, workers: int, *, audited: bool = False, faults: FaultPlan | None = None) -> RunSpec:
        """The specification of one run. `audited`: every step is computed twice. Each of `faults` may cost a worker."""
        own = self.spec
        lost = 0 if faults is None else len(faults.faults)
        evaluation = own.evaluation
        if evaluation is not None:
            samples = min(evaluation.num_samples, _EVALUATED * own.batch.microbatch_size)
            evaluation = replace(evaluation, every_steps=self.steps, num_samples=samples)
        return replace(
            own,
            task=self.task,
            batch=self.batch,
            faults=faults,
            evaluation=evaluation,
            scaling=ScalingConfig(
                num_workers=workers,
                use_gpu=self.use_gpu,
                cpus_per_worker=own.scaling.cpus_per_worker,
                start_timeout_s=self.timeout_s,
            ),
            run=RunConfig(
                name=f"workers-{workers}{'-audited' if audited else ''}{'-killed' if lost else ''}",
                storage_path=f"{self.folder}/runs",
                max_steps=self.steps,
                checkpoint=CheckpointConfig(at_end=False, grace_s=0),
                failure=FailureConfig(
                    max_worker_losses=lost,
                    task_error_retries=0,
                    hang_timeout_s=max(own.run.failure.hang_timeout_s, _HANG_TIMEOUT_S),
                    progress_timeout_s=self.timeout_s,
                    on_non_finite="skip" if own.run.failure.on_non_finite == "skip" else "stop",
                    max_skipped_steps=own.run.failure.max_skipped_steps,
                ),
            ),
            engine=replace(
                own.engine, reduction="exact", prove_first_step=True, audit_every_steps=1 if audited else None
            ),
        )

    def untried(self) -> Iterator[str]:
        """Features of the trainer that these runs do not test, in sentences."""
        own = self.spec
        before, now = own.batch.num_microbatches, self.batch.num_microbatches
        if now != before:
            yield f"steps of {count(before, 'microbatch', 'microbatches')}: the check's have {now}"
        if own.engine.reduction != "exact":
            yield f"reduction={own.engine.reduction!r}, whose bits depend on the workers: the check's is 'exact'"
        if own.scaling.use_gpu and not self.use_gpu:
            yield "the arithmetic of GPUs: the check computes on CPUs"
        degree = own.scaling.tensor_parallel_degree
        if degree > 1:
            yield f"tensor parallelism of degree {degree}: the check cuts no module"
        elif has_tensor_parallelism(own.task):
            yield "tensor parallelism, which the task allows: the check cuts no module"
        if own.scaling.shard_group_size is not None:
            yield f"shard groups of {own.scaling.shard_group_size}: the check has one of all workers"
        if own.engine.redundancy is not None:
            yield "parity, which needs more workers: the check has mirrors"
        if now == 1:
            yield "steps in which both workers compute: the data have one microbatch"
        if isinstance(own.task, TrainFunction) and self.steps < own.run.max_steps:
            yield f"code behind a loop that counts its steps itself: the check ends it after {self.steps}"
        yield "checkpoints, resumption and the run's storage: nothing is written there"
