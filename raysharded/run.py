"""One run, driven to its end: the handle that `ElasticTrainer.start()` gives, and what comes out."""

from __future__ import annotations

import contextlib
import platform
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raysharded.clock import SystemClock
from raysharded.errors import ConfigError, RunFailed

if TYPE_CHECKING:
    from raysharded.checkpoint import Storage
    from raysharded.driver.launching import Launcher
    from raysharded.driver.loop import Driver
    from raysharded.driver.state import State
    from raysharded.report import RunReport
    from raysharded.trainer import ElasticTrainer

Listener = Callable[[str, dict[str, Any]], None]
"""Called with every journal entry: (kind, fields)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """A finished run."""

    name: str
    url: str
    """The run's folder: its checkpoints and its journal."""
    steps: int
    fingerprint: str
    """Of parameters, buffers and optimizer state; the same for every number of workers and every history of losses."""
    checkpoint: str
    """The folder of the newest checkpoint: the final one, unless `at_end` is False; empty if there is none."""

    def report(self) -> RunReport:
        """Everything the journal knows: losses, recoveries, the ledger of samples."""
        from raysharded.report import load

        return load(self.url)


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """Where a run stands."""

    phase: str
    step: int
    max_steps: int
    workers: tuple[int, ...]
    """Members of the current generation, by rank."""
    pids: Mapping[int, int] = field(default_factory=dict)
    """Worker -> process id on its node."""


_SAME_WHEN_RESUMED = ("batch", "reduction", "param_dtype", "reduce_dtype", "compile", "threads")


class Run:
    """A handle on a run of this process."""

    def __init__(self, trainer: ElasticTrainer, storage: Storage, listen: Listener | None, *, progress: bool) -> None:
        self._trainer, self._storage = trainer, storage
        self._outside_listener = listen
        self._progress = progress
        self._driver: Driver | None = None
        self._thread: threading.Thread | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._stop = threading.Event()

    def begin(self) -> None:
        """Drive the run in a thread of its own."""
        self._thread = threading.Thread(target=self._drive_quietly, name=f"raysharded {self._trainer.run.name}")
        self._thread.start()

    def _drive_quietly(self) -> None:
        try:
            self._result = self.drive()
        except BaseException as error:  # noqa: BLE001 - kept for `wait`
            self._error = error

    def drive(self) -> Result:
        """Drive the run to its end in the calling thread."""
        from raysharded.driver import ray_launcher

        self._check_same_run()
        finished = self._finished_before()
        if finished is not None:
            return finished
        owns_cluster = ray_launcher.connect()
        evaluation = self._trainer.evaluation
        ray_launcher.carry_user_code(self._trainer.task, self._trainer.data, evaluation and evaluation.data)
        try:
            with ray_launcher.quiet_raylet() if owns_cluster else contextlib.nullcontext():
                launcher = ray_launcher.RayLauncher(
                    self._trainer.job(), self._trainer.scaling, owns_cluster=owns_cluster
                )
                return self.drive_with(launcher)
        finally:
            if owns_cluster:
                import ray

                ray.shutdown()

    def drive_with(self, launcher: Launcher) -> Result:
        """Drive the run with any launcher; closes it."""
        from raysharded.driver.loop import Driver, RunFiles

        trainer = self._trainer
        files = RunFiles(
            name=trainer.run.name,
            storage=self._storage,
            keep_last=trainer.run.checkpoint.keep_last,
            metadata={**trainer.about(), "versions": versions()},
        )
        with _listening(trainer, self._progress, self._outside_listener) as listen:
            try:
                driver = self._driver = Driver(trainer.limits(), launcher, files, SystemClock(), listen)
                driver.resume()
                if self._stop.is_set():
                    driver.stop()
                state = driver.run()
            finally:
                launcher.close()
        return self._result_of(state)

    def _check_same_run(self) -> None:
        """Going on with another order of samples or another arithmetic would break the promise."""
        from raysharded.driver.journal import read

        starts = [entry for entry in read(self._storage) if entry["kind"] == "started"]
        about = self._trainer.about()
        for key in _SAME_WHEN_RESUMED:
            before = starts[-1].get(key, about[key]) if starts else about[key]
            if before != about[key]:
                raise ConfigError(
                    f"run {self._trainer.run.name!r} was started with {key}={before!r} and is resumed with "
                    f"{about[key]!r}. Resume it with the same value, or give the run another name."
                )

    def _finished_before(self) -> Result | None:
        """The result of a run whose final checkpoint exists already."""
        from raysharded.checkpoint import newest_complete

        newest = newest_complete(self._storage, skip_damaged=True).checkpoint
        if newest is None or newest.step < self._trainer.run.max_steps:
            return None
        fingerprint = str(newest.manifest.metadata.get("fingerprint", ""))
        return Result(
            name=self._trainer.run.name,
            url=self._trainer.url,
            steps=newest.step,
            fingerprint=fingerprint,
            checkpoint=f"{self._trainer.url}/{newest.prefix}",
        )

    def _result_of(self, state: State) -> Result:
        trainer = self._trainer
        if state.result_fingerprint is None:
            raise RunFailed(f"Stopped. {self.how_to_go_on()}")
        return Result(
            name=trainer.run.name,
            url=trainer.url,
            steps=state.step,
            fingerprint=state.result_fingerprint,
            checkpoint=f"{trainer.url}/{state.checkpoint.prefix}" if state.checkpoint else "",
        )

    def how_to_go_on(self) -> str:
        """What a person should know about a run that ended before its last step."""
        name, limit = self._trainer.run.name, self._trainer.run.max_steps
        state = self._driver.state if self._driver else None
        if state is None:
            return f"Run {name!r} had not begun."
        start = (
            f"from its checkpoint of step {state.checkpoint.step}"
            if state.checkpoint
            else "from the start: it has no checkpoint"
        )
        return f"Run {name!r} was at step {state.step} of {limit}; the next fit() goes on {start}."

    # -- for the user --

    def status(self) -> Status:
        """Where the run stands now."""
        limit = self._trainer.run.max_steps
        if self._driver is None:
            return Status(phase="starting", step=0, max_steps=limit, workers=())
        state = self._driver.state
        pids = {int(worker): facts.pid for worker, facts in state.facts.items() if worker in state.ready}
        return Status(
            phase=state.phase.value, step=state.step, max_steps=limit, workers=tuple(map(int, state.members)), pids=pids
        )

    def stop(self) -> None:
        """End the run now, without a checkpoint; `wait` then raises RunFailed. A later `fit()` resumes it."""
        self._stop.set()
        if self._driver is not None:
            self._driver.stop()

    def wait(self, timeout_s: float | None = None) -> Result:
        """The result, when the run is over; raises what it failed with, or TimeoutError."""
        assert self._thread is not None
        try:
            self._thread.join(timeout_s)
        except KeyboardInterrupt:
            self.stop()
            self._thread.join()
            raise KeyboardInterrupt(f"Interrupted. {self.how_to_go_on()}") from None
        if self._thread.is_alive():
            raise TimeoutError(f"run {self._trainer.run.name!r} is still {self.status().phase} after {timeout_s} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


def _ignore(kind: str, fields: dict[str, Any]) -> None:
    """Nobody listens."""


@contextlib.contextmanager
def _listening(trainer: ElasticTrainer, progress: bool, outside: Listener | None) -> Iterator[Listener]:
    """A listener that feeds the live line and the caller's own."""
    if not progress:
        yield outside or _ignore
        return
    from rich.console import Console

    from raysharded.obs.live import LiveView

    seq_len = getattr(trainer.data, "seq_len", None)
    tokens_per_step = seq_len * trainer.batch.global_batch_size if isinstance(seq_len, int) else None
    view = LiveView(Console(stderr=True), trainer.run.max_steps, SystemClock(), tokens_per_step)

    def listen(kind: str, fields: dict[str, Any]) -> None:
        view.on_entry(kind, fields)
        if outside is not None:
            outside(kind, fields)

    try:
        yield listen
    finally:
        view.close()


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter for a run's record."""
    from importlib.metadata import version

    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "ray")}}
