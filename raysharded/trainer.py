"""The public entry point: `ElasticTrainer(...).fit()`, or `.start()` for a handle on the run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from raysharded.config import BatchConfig, EngineConfig, EvalConfig, RunConfig, ScalingConfig
from raysharded.deprecation import warn_of_old_name
from raysharded.display import uncaught_errors
from raysharded.display.quantities import count
from raysharded.errors import ConfigError, RayshardedError
from raysharded.run import translation
from raysharded.run.group_planner import GroupPlanner
from raysharded.run.handle import Run
from raysharded.run.local import LocalRun
from raysharded.run.process_hooks import in_submitted_job
from raysharded.run.results import Listener, Result
from raysharded.run.spec import RunSpec
from raysharded.task import Task, TrainFunction, overrides, require_tensor_parallelism
from raysharded.validation import names_checked, require_norm

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from raysharded.checkpoint import Storage
    from raysharded.driver.checkpoints.committer import RunFiles
    from raysharded.driver.state.driver_config import DriverConfig
    from raysharded.driver.state.mesh_choice import Grouping
    from raysharded.preflight import Check, Needs, Report
    from raysharded.protocol.job import Job
    from raysharded.protocol.worker_launcher import Launcher


@names_checked
class ElasticTrainer:
    """Trains a task on a changing number of workers. Nothing starts before `fit` or `start`.

    Raises ConfigError, with the values and the remedy, for errors that are visible without the data, the model and the
    cluster. Those three are checked when the workers start.
    """

    _SET_LATER: ClassVar = {"faults": ", and an attribute that is set afterwards: trainer.faults = FaultPlan(...)"}

    def __init__(
        self,
        *,
        task: Task | None = None,
        train_fn: Callable[[Any], None] | None = None,
        data: Any = None,
        batch: BatchConfig,
        scaling: ScalingConfig,
        run: RunConfig,
        engine: EngineConfig | None = None,
        evaluation: EvalConfig | None = None,
    ) -> None:
        """Give a `task`; or a `train_fn`, which owns its training loop. It is called with a session, in each worker.

        Leave `data` out for a `train_fn` that reads its own microbatches: `session.streams` or `session.reads`.
        """
        self.task = _task_of(task, train_fn)
        if data is None:
            data = _no_data(self.task)
        self.data, self.batch, self.scaling, self.run = data, batch, scaling, run
        self.engine = engine or EngineConfig()
        self.evaluation = evaluation
        self.faults: Any = None
        """A `raysharded.testing.FaultPlan` for the workers; set it in tests."""
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
        if isinstance(self.task, TrainFunction):
            _check_function(self.scaling, self.evaluation)
        else:
            _check_methods(self.task)
        require_tensor_parallelism(self.task, self.scaling.tensor_parallel_degree)
        if self.task.max_grad_norm is not None:
            require_norm(type(self.task).__name__, "max_grad_norm", self.task.max_grad_norm)
        if self.evaluation is not None and not isinstance(self.evaluation, EvalConfig):
            raise ConfigError(f"ElasticTrainer: evaluation={self.evaluation!r} must be a raysharded.EvalConfig.")
        named = [("data", self.data)] + ([("evaluation.data", self.evaluation.data)] if self.evaluation else [])
        for name, data in named:
            if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
                lacks = " and ".join(method for method in ("__len__", "__getitem__") if not hasattr(data, method))
                inside = ", such as its `dataset`" if hasattr(data, "dataset") else ""
                raise ConfigError(
                    f"ElasticTrainer: {name} is a {type(data).__name__} without {lacks}. Give a map-style "
                    f"dataset{inside}: raysharded.TokenDataset(...) or a custom object with both. BatchConfig makes "
                    "the batches."
                )
            if isinstance(data, Sequence) and len(data) == 0:
                raise ConfigError(f"ElasticTrainer: {name} has no samples. Give data with at least 1.")
        if self.evaluation is not None:
            self._check_evaluation(self.evaluation)
        self._check_keep_best()

    def _check_evaluation(self, evaluation: EvalConfig) -> None:
        data, wanted = evaluation.data, evaluation.num_samples
        if isinstance(data, Sequence) and wanted > len(data):
            raise ConfigError(
                f"EvalConfig.num_samples={wanted}: evaluation.data has {count(len(data), 'sample')}. Take "
                f"num_samples={len(data)} or less."
            )

    def _check_keep_best(self) -> None:
        best = self.run.checkpoint.keep_best
        if best is not None and best[0].startswith("evaluation.") and self.evaluation is None:
            raise ConfigError(
                f"CheckpointConfig.keep_best={best!r}: the trainer has no evaluation. Give ElasticTrainer an "
                'evaluation=raysharded.EvalConfig(...), or keep by "loss" or a metric of the task.'
            )

    # -- running --

    def fit(
        self,
        listen: Listener | None = None,
        *,
        progress: bool | None = None,
        take_over: bool = False,
        context: Callable[[Run], AbstractContextManager[object]] | None = None,
        beside: Callable[[Run], AbstractContextManager[object]] | None = None,
    ) -> Result:
        """Train to the end and block meanwhile; resumes from the newest checkpoint if there is one. Ctrl-C ends it.

        SIGTERM or SIGHUP ends it after one more checkpoint, within `CheckpointConfig.grace_s`; RunStopped then states
        where the next `fit()` resumes. A second SIGTERM ends it at once. `listen` is called with every journal entry;
        `progress` shows a live line (default: unless `listen` is given).

        RunOwnedElsewhere is raised, with the driver's name, if another living driver leads the run. This driver takes
        over once the other one has been silent for `RunConfig.lease_s`. With `take_over` it does not wait, and the
        other driver ends with an error.

        `context` makes a context manager of the run's handle, which is open while the run trains: for example
        `raysharded.testing.chaos_for`. `beside` is its deprecated name.

        In a submitted Ray job the run has a separate driver, as with `start`, which this call follows. If the job is
        stopped, that driver writes a last checkpoint, however soon Ray kills the job.
        """
        if beside is not None:
            warn_of_old_name("ElasticTrainer.fit(beside=)", "ElasticTrainer.fit(context=)")
            if context is not None:
                raise ConfigError("ElasticTrainer.fit: give context= alone; beside= is its deprecated name.")
            context = beside
        uncaught_errors.install(RayshardedError)
        progress = listen is None if progress is None else progress
        if in_submitted_job():
            from raysharded.run.hosted.ray_job import fit_in_job

            return fit_in_job(self.spec(), listen, progress=progress, take_over=take_over, context=context)
        run: LocalRun | None = None
        try:
            run = LocalRun(self.spec(), listen, progress=progress, take_over=take_over)
            with nullcontext() if context is None else context(run):
                return run.drive()
        except KeyboardInterrupt:
            how_to_go_on = run.how_to_go_on() if run else f"Run {self.run.name!r} had not begun."
            raise KeyboardInterrupt(f"Interrupted. {how_to_go_on}") from None

    def start(self, *, take_over: bool = False) -> Run:
        """Train in the background, and return a handle at once; its `wait()` returns the result.

        The run's driver is a separate actor on the Ray cluster that `fit` would use. It does not need this process, and
        `raysharded.attach(name)` returns the handle anywhere on the cluster. If no cluster is found, one is started
        here; then everything ends with this process.

        The driver may still refuse the start, for another batch size for example: see `Run.wait_until_begun`.

        Raises RunOwnedElsewhere if such a driver already leads the run. With `take_over` that driver is ended instead,
        and the run continues from its workers' memory. Raises ConfigError for a trainer that cannot be pickled.
        """
        from raysharded.run.hosted.launch import start_hosted

        uncaught_errors.install(RayshardedError)
        return start_hosted(self.spec(), take_over=take_over)

    def start_local(self, listen: Listener | None = None, *, take_over: bool = False) -> Run:
        """Train in a thread of this process and end with it; `listen` and `take_over` as for `fit`."""
        run = LocalRun(self.spec(), listen, take_over=take_over)
        run.begin()
        return run

    def start_with(self, launcher: Callable[[Job], Launcher], listen: Listener | None = None) -> Run:
        """As `start_local`, with workers of a launcher other than Ray's: `raysharded.testing.ProcessLauncher`."""
        run = LocalRun(self.spec(), listen, launch=launcher)
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
        """Test the task, its data and these settings over a few steps; takes a minute for a small model.

        Two fresh processes build the model. Then it is trained on one worker, on two with every step computed twice,
        and on two of which one is killed. Workers are plain processes of this machine. Neither Ray nor the run's
        storage is touched, and everything written is deleted. `device="cpu"` tests a trainer for GPUs on CPUs. Checks
        that are not done within `timeout_s` are omitted. `listen` is called with the check's needs, then with every
        check.

        Raises ConfigError if the check does not fit into the available memory or the time.
        """
        from raysharded.preflight import check

        uncaught_errors.install(RayshardedError)
        return check(self.spec(), steps=steps, device=device, timeout_s=timeout_s, listen=listen)

    # -- the specification --

    def spec(self) -> RunSpec:
        """The run's current specification: everything below the trainer takes this value."""
        return RunSpec(
            task=self.task,
            data=self.data,
            batch=self.batch,
            scaling=self.scaling,
            run=self.run,
            engine=self.engine,
            evaluation=self.evaluation,
            faults=self.faults,
        )

    @property
    def url(self) -> str:
        """The run's folder on its storage."""
        return self.spec().url

    # -- names of before 0.2 --

    def about(self) -> dict[str, Any]:
        """Deprecated: `ElasticTrainer.spec().settings()`."""
        warn_of_old_name("ElasticTrainer.about", "ElasticTrainer.spec().settings")
        return self.spec().settings()

    def user_objects(self) -> list[object]:
        """Deprecated: `ElasticTrainer.spec().user_objects()`."""
        warn_of_old_name("ElasticTrainer.user_objects", "ElasticTrainer.spec().user_objects")
        return self.spec().user_objects()

    def limits(self) -> DriverConfig:
        """Deprecated: `raysharded.run.translation.limits_of`."""
        warn_of_old_name("ElasticTrainer.limits", "raysharded.run.translation.limits_of")
        return translation.limits_of(self.spec(), GroupPlanner(self.spec()).grouping())

    def files(self, storage: Storage, versions: Mapping[str, str]) -> RunFiles:
        """Deprecated: `raysharded.run.translation.files_of`."""
        warn_of_old_name("ElasticTrainer.files", "raysharded.run.translation.files_of")
        return translation.files_of(self.spec(), storage, versions)

    def job(self) -> Job:
        """Deprecated: `raysharded.run.translation.job_of`."""
        warn_of_old_name("ElasticTrainer.job", "raysharded.run.translation.job_of")
        return translation.job_of(self.spec())

    def grouping(self, scaling: ScalingConfig) -> Grouping | None:
        """Deprecated: `raysharded.run.group_planner.GroupPlanner.grouping`."""
        warn_of_old_name("ElasticTrainer.grouping", "raysharded.run.group_planner.GroupPlanner.grouping")
        return GroupPlanner(self.spec()).grouping(scaling)

    def check_memory(self) -> None:
        """Deprecated: `raysharded.run.group_planner.GroupPlanner.check_memory`."""
        warn_of_old_name("ElasticTrainer.check_memory", "raysharded.run.group_planner.GroupPlanner.check_memory")
        GroupPlanner(self.spec()).check_memory()

    def start_here(self, listen: Listener | None = None, *, take_over: bool = False) -> Run:
        """Deprecated: `ElasticTrainer.start_local`."""
        warn_of_old_name("ElasticTrainer.start_here", "ElasticTrainer.start_local")
        return self.start_local(listen, take_over=take_over)


def _task_of(task: Task | None, train_fn: Callable[[Any], None] | None) -> Task:
    if train_fn is None and task is not None:
        return task
    if task is not None or not callable(train_fn) or isinstance(train_fn, type):
        raise ConfigError(
            f"ElasticTrainer: task={task!r:.80}, train_fn={train_fn!r:.80}: give exactly one "
            "of them, a raysharded.Task or a function that is called with the session."
        )
    return TrainFunction(train_fn)


def _no_data(task: Task) -> Any:
    """The data of a run whose function reads its own microbatches."""
    if not isinstance(task, TrainFunction):
        raise ConfigError(
            "ElasticTrainer: data= is missing: give a map-style dataset, as raysharded.TokenDataset(...)."
        )
    from raysharded.data.streams.numbered_microbatches import MicrobatchNumbers

    return MicrobatchNumbers()


def _check_methods(task: Task) -> None:
    for method in ("build_model", "build_optimizer", "loss"):
        if not overrides(task, method):
            raise ConfigError(
                f"ElasticTrainer: task={type(task).__name__}() has no {method}. Define it in a subclass of "
                "raysharded.Task: a task has build_model, build_optimizer and loss."
            )


def _check_function(scaling: ScalingConfig, evaluation: EvalConfig | None) -> None:
    if evaluation is not None:
        raise ConfigError(
            "ElasticTrainer: evaluation= needs a raysharded.Task, whose evaluate it calls. Leave it out, and call "
            "session.evaluate(loss_of, data) in the loop."
        )
    if scaling.tensor_parallel_degree > 1:
        raise ConfigError(
            f"ScalingConfig.tensor_parallel_degree={scaling.tensor_parallel_degree}: torch's parallel styles cannot be "
            "undone in place, so a train_fn has no tensor parallelism. Leave the degree at 1, or train with a "
            "raysharded.Task."
        )
