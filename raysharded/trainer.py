"""The public way in: `ElasticTrainer(...).fit()`, or `.start()` for a handle on the run."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Literal

from raysharded import plain_errors
from raysharded.checking import names_checked, require_norm
from raysharded.config import BatchConfig, EngineConfig, EvalConfig, RunConfig, ScalingConfig
from raysharded.errors import ConfigError
from raysharded.run.driven import DrivenRun
from raysharded.run.handle import Run
from raysharded.run.results import Listener, Result
from raysharded.run.submitted import in_submitted_job
from raysharded.task import Task, require_tensor_parallelism

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from raysharded.checkpoint import Storage
    from raysharded.driver.committing import RunFiles
    from raysharded.driver.launching import Launcher
    from raysharded.driver.meshes import Grouping
    from raysharded.driver.messages import Job
    from raysharded.driver.state import Limits
    from raysharded.planning.memory import Setting
    from raysharded.preflight import Check, Needs, Report

PREPARE_WITHIN_S = 30.0
"""How long a planned change may be prepared beside training before it is made all the same."""


@names_checked
class ElasticTrainer:
    """Trains a task on a changing number of workers. Nothing is started before `fit` or `start`.

    Raises ConfigError, with the values and the remedy, for what can be seen not to work without the data, the model
    and the cluster; these are checked when the workers start.
    """

    def __init__(
        self,
        *,
        task: Task,
        data: Any,
        batch: BatchConfig,
        scaling: ScalingConfig,
        run: RunConfig,
        engine: EngineConfig | None = None,
        evaluation: EvalConfig | None = None,
    ) -> None:
        self.task, self.data, self.batch, self.scaling, self.run = task, data, batch, scaling, run
        self.engine = engine or EngineConfig()
        self.evaluation = evaluation
        self.faults: Any = None
        """A `raysharded.testing.FaultPlan` for the workers; set it in tests."""
        self._measured: dict[int, Setting] = {}
        self._check()

    def _check(self) -> None:
        expected: tuple[tuple[str, type], ...] = (
            ("task", Task),
            ("batch", BatchConfig),
            ("scaling", ScalingConfig),
            ("run", RunConfig),
            ("engine", EngineConfig),
        )
        for name, kind in expected:
            value = getattr(self, name)
            if not isinstance(value, kind):
                hint = " (an instance, not the class)" if value is kind or isinstance(value, type) else ""
                raise ConfigError(f"ElasticTrainer: {name}={value!r} must be a raysharded.{kind.__name__}{hint}.")
        require_tensor_parallelism(self.task, self.scaling.tensor_parallel_degree)
        if self.task.max_grad_norm is not None:
            require_norm(type(self.task).__name__, "max_grad_norm", self.task.max_grad_norm)
        if self.evaluation is not None and not isinstance(self.evaluation, EvalConfig):
            raise ConfigError(f"ElasticTrainer: evaluation={self.evaluation!r} must be a raysharded.EvalConfig.")
        named = [("data", self.data)] + ([("evaluation.data", self.evaluation.data)] if self.evaluation else [])
        for name, data in named:
            if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
                raise ConfigError(
                    f"ElasticTrainer: {name} is a {type(data).__name__} without __len__ and __getitem__. Give a "
                    "map-style dataset: raysharded.TokenDataset(...) or an object of your own with both."
                )

    # -- running --

    def fit(
        self,
        listen: Listener | None = None,
        *,
        progress: bool | None = None,
        take_over: bool = False,
        beside: Callable[[Run], AbstractContextManager[object]] | None = None,
    ) -> Result:
        """Train to the end and block meanwhile; resumes from the newest checkpoint if there is one. Ctrl-C ends it.

        SIGTERM ends it after one more checkpoint, within `CheckpointConfig.grace_s`: RunFailed says where the next
        `fit()` goes on. A second one ends it at once. `listen` is called with every journal entry; `progress` shows a
        live line (default: unless `listen` is given).

        A run that another driver holds is refused with RunOwnedElsewhere, which says who it is, unless that one shows
        no sign of life for `RunConfig.lease_s`; `take_over` follows it without waiting, and it then ends with an error.

        `beside` makes a context manager of the run's handle, entered while the run goes on: say
        `raysharded.testing.chaos_for`.

        In a submitted Ray job the run has a driver of its own, as with `start`, which this call follows: if the job is
        stopped that driver writes a last checkpoint, however soon Ray kills the job.
        """
        plain_errors.install()
        progress = listen is None if progress is None else progress
        if in_submitted_job():
            from raysharded.run.job import fit_in_job

            return fit_in_job(self, listen, progress=progress, take_over=take_over, beside=beside)
        run: DrivenRun | None = None
        try:
            run = DrivenRun(self, listen, progress=progress, take_over=take_over)
            with nullcontext() if beside is None else beside(run):
                return run.drive()
        except KeyboardInterrupt:
            how_to_go_on = run.how_to_go_on() if run else f"Run {self.run.name!r} had not begun."
            raise KeyboardInterrupt(f"Interrupted. {how_to_go_on}") from None

    def start(self, *, take_over: bool = False) -> Run:
        """Train in the background, and return a handle at once; its `wait()` gives the result.

        The run's driver is an actor of its own on the Ray cluster that `fit` would use: it does not need this process,
        and `raysharded.attach(name)` gives the handle anywhere on the cluster. Where no cluster is found one is started
        here, and it all ends with this process.

        Raises RunOwnedElsewhere if such a driver has the run already, unless `take_over`, which ends that one and goes
        on from its workers' memory; ConfigError for a trainer that cannot be pickled.
        """
        from raysharded.run.hosting import start_hosted

        plain_errors.install()
        return start_hosted(self, take_over=take_over)

    def start_here(self, listen: Listener | None = None, *, take_over: bool = False) -> Run:
        """Train in a thread of this process, with which the run ends; `listen` and `take_over` as for `fit`."""
        run = DrivenRun(self, listen, take_over=take_over)
        run.begin()
        return run

    def start_with(self, launcher: Callable[[Job], Launcher], listen: Listener | None = None) -> Run:
        """As `start_here`, with workers of another launcher than Ray's: `raysharded.testing.ProcessLauncher`."""
        run = DrivenRun(self, listen, launch=launcher)
        run.begin()
        return run

    def check(
        self,
        *,
        steps: int = 3,
        device: Literal["cpu"] | None = None,
        timeout_s: float = 600.0,
        listen: Callable[[Needs | Check], None] | None = None,
    ) -> Report:
        """Try the task, its data and these settings for a few steps, and compare: in a minute, for a small model.

        Two fresh processes build the model; then it is trained on one worker, on two with every step computed twice,
        and on two of which one is killed. Workers are plain processes of this machine; neither Ray nor the run's
        storage is touched, and what is written is deleted. `device="cpu"` tries a trainer for GPUs on CPUs. What is
        not done within `timeout_s` is not tried. `listen` is called with what the check needs, then with every check.

        Raises ConfigError if the check does not fit the memory that is available, or the time.
        """
        from raysharded.preflight import check

        plain_errors.install()
        return check(self, steps=steps, device=device, timeout_s=timeout_s, listen=listen)

    def user_objects(self) -> list[object]:
        """What the user's own modules define of this trainer."""
        evaluation = [self.evaluation.data] if self.evaluation else []
        return [self.task, self.data, *evaluation, *self.run.failure.preemption_notices, *self.run.metrics]

    @property
    def url(self) -> str:
        """The run's own folder on its storage."""
        from raysharded.checkpoint.storage.urls import join_url

        return join_url(self.run.storage_path, self.run.name)

    def limits(self) -> Limits:
        """What the driver's state machine needs of the configuration."""
        from raysharded.driver.state import Limits
        from raysharded.layout import parity_of

        failure, wanted = self.run.failure, self.engine.prepare_changes
        prepares = not self.scaling.use_gpu if wanted is None else wanted
        return Limits(
            min_workers=self.scaling.min_workers,
            max_workers=self.scaling.max_workers,
            max_steps=self.run.max_steps,
            exact=self.engine.reduction == "exact",
            mirrors=self.engine.mirrors,
            parity=parity_of(self.engine.redundancy),
            save_at_end=self.run.checkpoint.at_end,
            start_timeout_s=self.scaling.start_timeout_s,
            replacement_wait_s=self.scaling.replacement_wait_s,
            spares=self.scaling.spares,
            grouping=self.grouping(self.scaling),
            max_worker_losses=failure.max_worker_losses,
            max_node_failures=failure.max_node_failures,
            task_error_retries=failure.task_error_retries,
            evict_slower_than=failure.evict_slower_than,
            hang_timeout_s=failure.hang_timeout_s,
            compiles=self.engine.compile,
            prepare_within_s=PREPARE_WITHIN_S if prepares else 0.0,
            progress_timeout_s=failure.progress_timeout_s,
            form_timeout_s=failure.progress_timeout_s,
            max_failed_saves=self.run.checkpoint.max_failed_saves,
            stop_on_failed_saves=self.run.checkpoint.on_failed_saves == "stop",
            rewind=failure.on_non_finite == "rewind",
            max_skipped_steps=failure.max_skipped_steps,
            global_batch_size=self.batch.global_batch_size,
            accept_arithmetic=self.run.accept_arithmetic,
            proves_first_step=self.engine.prove_first_step and self.engine.reduction == "exact",
        )

    def grouping(self, scaling: ScalingConfig) -> Grouping | None:
        """How workers would form shard groups and tensor parallel groups with this configuration; None: there are no
        groups. The state fits as many workers as a group has, and as the run may have; it is not spread over fewer than
        the smaller number of these."""
        from raysharded.driver.meshes import Grouping

        shards, tensor = scaling.shard_group_size, scaling.tensor_parallel_degree
        if shards is None and tensor == 1:
            return None
        grouping = Grouping(
            shards=shards,
            tensor=tensor,
            least_shards=scaling.min_workers if shards is None else min(shards, scaling.min_workers),
            least_workers=scaling.min_workers,
            num_microbatches=self.batch.num_microbatches,
        )
        if scaling.memory_per_worker is None or shards is None:
            return grouping
        from raysharded.planning.policy import with_plan

        return with_plan(grouping, self._setting(tensor), scaling)

    def check_memory(self) -> None:
        """Raise ConfigError if no mesh that the run may begin in fits `ScalingConfig.memory_per_worker`."""
        scaling = self.scaling
        if scaling.memory_per_worker is None:
            return
        from raysharded.planning.policy import refuse_what_fits_nowhere

        shards = scaling.shard_group_size
        least = None if shards is None else min(shards, scaling.min_workers)
        refuse_what_fits_nowhere(self._setting(scaling.tensor_parallel_degree), scaling, least)

    def _setting(self, degree: int) -> Setting:
        """The task as it is planned with a tensor parallel degree. Measured once for each, which takes seconds."""
        if degree not in self._measured:
            from raysharded.planning.plans import setting_of_task

            checkpoints = self.run.checkpoint.every_steps is not None
            self._measured[degree] = setting_of_task(
                self.task,
                self.data,
                self.batch,
                self.engine,
                on_gpu=self.scaling.use_gpu,
                checkpoints=checkpoints,
                degree=degree,
            )
        return self._measured[degree]

    def files(self, storage: Storage, versions: Mapping[str, str]) -> RunFiles:
        """The run on its storage. Raises CheckpointError if the key that signs its checkpoints cannot be read."""
        from raysharded.checkpoint import SigningKey, signing_key_from_environment
        from raysharded.checkpoint.keeping.policy import Best, Keep
        from raysharded.driver.committing import RunFiles

        config = self.run.checkpoint
        best = None
        if config.keep_best is not None:
            metric, mode, count = config.keep_best
            best = Best(metric=metric, mode=mode, count=count)
        path = config.signing_key_file
        return RunFiles(
            name=self.run.name,
            storage=storage,
            keep=Keep(last=config.keep_last, every_steps=config.keep_every, best=best),
            metadata={**self.about(), "versions": dict(versions)},
            global_batch_size=self.batch.global_batch_size,
            key=SigningKey.from_file(path) if path is not None else signing_key_from_environment(),
        )

    def job(self) -> Job:
        """What every worker is started with."""
        from raysharded.checkpoint import open_storage
        from raysharded.driver.messages import Job

        return Job(
            run_name=self.run.name,
            run_url=open_storage(self.url).url,  # absolute: workers have working directories of their own
            task=self.task,
            data=self.data,
            batch=self.batch,
            engine=self.engine,
            evaluation=self.evaluation,
            max_steps=self.run.max_steps,
            save_every_steps=self.run.checkpoint.every_steps,
            save_at_end=self.run.checkpoint.at_end,
            use_gpu=self.scaling.use_gpu,
            num_threads=self._threads,
            collective_timeout_s=max(60.0, 2 * self.run.failure.progress_timeout_s),
            grace_s=self.run.checkpoint.grace_s,
            on_non_finite=self.run.failure.on_non_finite,
            preemption_notices=self.run.failure.preemption_notices,
            faults=self.faults,
        )

    @property
    def _threads(self) -> int:
        return max(1, int(self.scaling.cpus_per_worker))

    def about(self) -> dict[str, Any]:
        """The run's settings that its journal and every checkpoint keep; a resume needs all equal but `max_steps` and
        `scaling`."""
        return {
            "batch": {
                "global_batch_size": self.batch.global_batch_size,
                "microbatch_size": self.batch.microbatch_size,
                "seed": self.batch.seed,
            },
            "reduction": self.engine.reduction,
            "param_dtype": self.engine.param_dtype,
            "reduce_dtype": self.engine.reduce_dtype,
            "cast_inputs": self.engine.cast_inputs,
            "compile": self.engine.compile,
            "threads": self._threads,
            "max_steps": self.run.max_steps,
            "scaling": {
                "num_workers": [self.scaling.min_workers, self.scaling.max_workers],
                "shard_group_size": self.scaling.shard_group_size,
                "tensor_parallel_degree": self.scaling.tensor_parallel_degree,
            },
        }
