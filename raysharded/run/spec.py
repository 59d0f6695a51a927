"""The specification of one run: what is trained, on which data, at what sizes and how. A value, made by the trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from raysharded.errors import ConfigError

if TYPE_CHECKING:
    from raysharded.checkpoint import Best
    from raysharded.config import BatchConfig, EngineConfig, EvalConfig, RunConfig, ScalingConfig
    from raysharded.protocol.job import InitialWeights
    from raysharded.task import Task

_SAME_WHEN_RESUMED = ("batch", "reduction", "param_dtype", "reduce_dtype", "cast_inputs", "compile", "threads")
_BEFORE_IT_WAS_RECORDED = {"cast_inputs": "all"}


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSpec:
    """The parts of a run. `ElasticTrainer.spec` makes one, whose parts have been checked."""

    task: Task
    data: Any
    """A map-style dataset."""
    batch: BatchConfig
    scaling: ScalingConfig
    run: RunConfig
    engine: EngineConfig
    evaluation: EvalConfig | None = None
    faults: Any = None
    """A `raysharded.testing.FaultPlan` for the workers, in tests."""
    initial_weights: InitialWeights | None = None
    """The checkpoint that `RunConfig.start_from` names, once it is found."""

    @property
    def url(self) -> str:
        """The run's own folder on its storage."""
        from raysharded.locations import join_url

        return join_url(str(self.run.storage_path), self.run.name)

    @property
    def threads_per_worker(self) -> int:
        """Threads that torch computes with in each worker."""
        return max(1, int(self.scaling.cpus_per_worker))

    @property
    def tokens_per_step(self) -> int | None:
        """Tokens in the global batch; None if the data has no `seq_len`."""
        seq_len = self._seq_len
        return None if seq_len is None else seq_len * self.batch.global_batch_size

    @property
    def _seq_len(self) -> int | None:
        found = getattr(self.data, "seq_len", None)
        return found if isinstance(found, int) else None

    @property
    def best(self) -> Best | None:
        """The rule of `CheckpointConfig.keep_best`."""
        from raysharded.checkpoint.retention.policy import Best

        if self.run.checkpoint.keep_best is None:
            return None
        metric, mode, count = self.run.checkpoint.keep_best
        return Best(metric=metric, mode=mode, count=count)

    def user_objects(self) -> list[object]:
        """The parts whose classes may be defined in the user's own modules."""
        task, data, evaluation, notices, metrics = self.named_objects().values()
        return [task, data, *([evaluation] if self.evaluation else []), *notices, *metrics]

    def named_objects(self) -> dict[str, Any]:
        """These parts under the names by which a user knows them."""
        return {**self.sent_objects(), "metrics": self.run.metrics}

    def sent_objects(self) -> dict[str, Any]:
        """Those of `named_objects` that workers get."""
        return sent_objects(self.task, self.data, self.evaluation, self.run.failure.preemption_notices)

    def require_local_files(self) -> None:
        """Raise DataError if token files with a path of this machine do not exist here.

        For runs whose workers are all on this machine: on a cluster, files may exist on the workers' nodes alone.
        """
        from raysharded.data import DatasetPart, Mixture, PackedDataset, TokenDataset

        for data in (self.data, self.evaluation.data if self.evaluation else None):
            if isinstance(data, TokenDataset | PackedDataset | Mixture | DatasetPart):
                data.require_local_files()

    def settings(self) -> dict[str, Any]:
        """The settings that the journal and every checkpoint record. A resumed run has the same, except for
        `max_steps`, `scaling` and `keep_best`."""
        from raysharded.checkpoint.retention.best import recorded

        weights = self.initial_weights
        started = {} if weights is None else {"start_from": dataclasses.asdict(weights)}
        best = self.best
        return {
            **started,
            **(recorded(best) if best is not None else {}),
            "batch": {
                "global_batch_size": self.batch.global_batch_size,
                "microbatch_size": self.batch.microbatch_size,
                "seed": self.batch.seed,
            },
            **({} if self._seq_len is None else {"seq_len": self._seq_len}),
            "reduction": self.engine.reduction,
            "param_dtype": self.engine.param_dtype,
            "reduce_dtype": self.engine.reduce_dtype,
            "cast_inputs": self.engine.cast_inputs,
            "compile": self.engine.compile,
            "threads": self.threads_per_worker,
            "max_steps": self.run.max_steps,
            "scaling": {
                "num_workers": [self.scaling.min_workers, self.scaling.max_workers],
                "shard_group_size": self.scaling.shard_group_size,
                "tensor_parallel_degree": self.scaling.tensor_parallel_degree,
            },
        }


def sent_objects(task: Task, data: Any, evaluation: EvalConfig | None, preemption_notices: Any) -> dict[str, Any]:
    """A user's objects that workers get, under the names by which a user knows them."""
    from raysharded.task import TrainFunction

    own = {"train_fn": task.function} if isinstance(task, TrainFunction) else {"task": task}
    return {
        **own,
        "data": data,
        "evaluation.data": evaluation.data if evaluation else None,
        "preemption_notices": preemption_notices,
    }


def require_same_settings(spec: RunSpec, starts: Sequence[Mapping[str, Any]]) -> None:
    """Raise ConfigError for another order of samples or another arithmetic than the run began with.

    `starts`: the journal's entries of the run's starts.
    """
    about = spec.settings()
    for key in _SAME_WHEN_RESUMED:
        before = starts[-1].get(key, _BEFORE_IT_WAS_RECORDED.get(key, about[key])) if starts else about[key]
        if before != about[key]:
            raise ConfigError(
                f"run {spec.run.name!r} was started with {key}={before!r} and is resumed with {about[key]!r}. Resume "
                "it with the same value, or give the run another name."
            )
