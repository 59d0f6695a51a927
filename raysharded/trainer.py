"""The public way in: `ElasticTrainer(...).fit()`, or `.start()` for a handle on the run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raysharded import plain_errors
from raysharded.config import BatchConfig, EngineConfig, EvalConfig, RunConfig, ScalingConfig, names_checked
from raysharded.errors import ConfigError
from raysharded.run import Listener, Result, Run
from raysharded.task import Task

if TYPE_CHECKING:
    from raysharded.driver.messages import Job
    from raysharded.driver.state import Limits


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

    def fit(self, listen: Listener | None = None, *, progress: bool | None = None) -> Result:
        """Train to the end and block meanwhile; resumes from the newest checkpoint if there is one. Ctrl-C ends it.

        `listen` is called with every journal entry; `progress` shows a live line (default: unless `listen` is given).
        """
        plain_errors.install()
        run: Run | None = None
        try:
            run = self._launch(listen, progress=listen is None if progress is None else progress)
            return run.drive()
        except KeyboardInterrupt:
            how_to_go_on = run.how_to_go_on() if run else f"Run {self.run.name!r} had not begun."
            raise KeyboardInterrupt(f"Interrupted. {how_to_go_on}") from None

    def start(self, listen: Listener | None = None) -> Run:
        """Train in the background; the handle's `wait()` gives the result."""
        run = self._launch(listen, progress=False)
        run.begin()
        return run

    def _launch(self, listen: Listener | None, *, progress: bool) -> Run:
        from raysharded.checkpoint import check_writable, open_storage

        storage = open_storage(self.url)
        check_writable(storage)
        return Run(self, storage, listen, progress=progress)

    @property
    def url(self) -> str:
        """The run's own folder on its storage."""
        return f"{self.run.storage_path.rstrip('/')}/{self.run.name}"

    def limits(self) -> Limits:
        """What the driver's state machine needs of the configuration."""
        from raysharded.driver.state import Limits

        failure = self.run.failure
        return Limits(
            min_workers=self.scaling.min_workers,
            max_workers=self.scaling.max_workers,
            max_steps=self.run.max_steps,
            exact=self.engine.reduction == "exact",
            mirrors=self.engine.mirrors,
            save_at_end=self.run.checkpoint.at_end,
            start_timeout_s=self.scaling.start_timeout_s,
            replacement_wait_s=self.scaling.replacement_wait_s,
            max_worker_losses=failure.max_worker_losses,
            task_error_retries=failure.task_error_retries,
            progress_timeout_s=failure.progress_timeout_s,
            form_timeout_s=failure.progress_timeout_s,
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
        )

    @property
    def _threads(self) -> int:
        return max(1, int(self.scaling.cpus_per_worker))

    def about(self) -> dict[str, Any]:
        """The run's settings that its journal and every checkpoint keep; a resume needs all but `max_steps` equal."""
        return {
            "batch": {
                "global_batch_size": self.batch.global_batch_size,
                "microbatch_size": self.batch.microbatch_size,
                "seed": self.batch.seed,
            },
            "reduction": self.engine.reduction,
            "param_dtype": self.engine.param_dtype,
            "reduce_dtype": self.engine.reduce_dtype,
            "compile": self.engine.compile,
            "threads": self._threads,
            "max_steps": self.run.max_steps,
        }
