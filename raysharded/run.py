"""One run, driven to its end: the handle that `ElasticTrainer.start()` gives, and what comes out."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import math
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import EllipsisType
from typing import TYPE_CHECKING, Any

from raysharded.clock import SystemClock
from raysharded.errors import ConfigError, RunFailed
from raysharded.signals import on_notice
from raysharded.task import require_tensor_parallelism

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
    nodes: Mapping[int, str] = field(default_factory=dict)
    """Worker -> the host name of its node."""
    mesh: str = ""
    """Replicas x data shards of the current generation, and x the tensor parallel degree if that is above 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenCheckpoint:
    """A checkpoint that is committed."""

    step: int
    url: str
    """Its folder."""


_SAME_WHEN_RESUMED = ("batch", "reduction", "param_dtype", "reduce_dtype", "compile", "threads")


class Run:
    """A handle on a run of this process."""

    def __init__(
        self,
        trainer: ElasticTrainer,
        storage: Storage,
        listen: Listener | None,
        *,
        progress: bool,
        take_over: bool = False,
    ) -> None:
        self._trainer, self._storage, self._take_over = trainer, storage, take_over
        self._files = trainer.files(storage, versions())
        self._outside_listener = listen
        self._progress = progress
        self._driver: Driver | None = None
        self._driving: int | None = None
        """The thread that drives the run."""
        self._begun = threading.Event()
        """Set when there is a driver, or never will be one."""
        self._thread: threading.Thread | None = None
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._scaling = trainer.scaling
        """As was asked for last."""

    def begin(self, launcher: Callable[[], Launcher] | None = None) -> None:
        """Drive the run in a thread of its own; with Ray, unless a launcher is given."""
        self._thread = threading.Thread(
            target=self._drive_quietly, args=(launcher,), name=f"raysharded {self._trainer.run.name}"
        )
        self._thread.start()

    def _drive_quietly(self, launcher: Callable[[], Launcher] | None) -> None:
        try:
            self._result = self.drive(launcher)
        except BaseException as error:  # noqa: BLE001 - kept for `wait`
            self._error = error
        finally:
            self._begun.set()

    def drive(self, launcher: Callable[[], Launcher] | None = None) -> Result:
        """Drive the run to its end in the calling thread; with Ray, unless a launcher is given."""
        self._check_same_run()
        finished = self._finished_before()
        if finished is not None:
            return finished
        self._trainer.check_memory()
        return self._drive_with_ray() if launcher is None else self.drive_with(launcher())

    def _drive_with_ray(self) -> Result:
        from raysharded.driver import ray_launcher

        owns_cluster = ray_launcher.connect()
        evaluation = self._trainer.evaluation
        notices = self._trainer.run.failure.preemption_notices
        ray_launcher.carry_user_code(self._trainer.task, self._trainer.data, evaluation and evaluation.data, *notices)
        try:
            with ray_launcher.quiet_raylet() if owns_cluster else contextlib.nullcontext():
                job = self._trainer.job()
                return self.drive_with(ray_launcher.RayLauncher(job, self._trainer.scaling, owns_cluster=owns_cluster))
        finally:
            if owns_cluster:
                import ray

                ray.shutdown()

    def drive_with(self, launcher: Launcher) -> Result:
        """Drive the run with any launcher; closes it."""
        from raysharded.driver.loop import Driver
        from raysharded.driver.ownership import LeaseTerms

        trainer = self._trainer
        self._driving = threading.get_ident()
        with (
            _listening(trainer, self._progress, self._outside_listener) as told,
            _measuring(trainer, self._storage.url, told) as listen,
        ):
            try:
                lease = LeaseTerms(lease_s=trainer.run.lease_s, take_over=self._take_over, given_up=self._stop.is_set)
                orphan_wait_s = trainer.run.failure.orphan_wait_s
                driver = Driver(
                    trainer.limits(),
                    launcher,
                    self._files,
                    SystemClock(),
                    listen,
                    lease,
                    orphan_wait_s,
                    record_events=trainer.run.record_events,
                )
                driver.resume()
                self._ask_again(driver)
                self._driver = driver
                self._begun.set()
                if self._stop.is_set():
                    driver.stop()
                with self._on_notice():
                    state = driver.run()
            finally:
                launcher.close()
        return self._result_of(state)

    def _ask_again(self, driver: Driver) -> None:
        """For the mesh that was asked for last, unless the run is configured otherwise than it was then."""
        asked = driver.asked_last(self._trainer.about()["scaling"])
        if asked is not None:
            size, degree = asked
            self._scaling = dataclasses.replace(
                self._trainer.scaling, shard_group_size=size, tensor_parallel_degree=degree
            )
            driver.begin_with(self._trainer.grouping(self._scaling))

    def _on_notice(self) -> AbstractContextManager[None]:
        """Within it, SIGTERM ends the run after one more checkpoint."""
        grace_s = self._trainer.run.checkpoint.grace_s
        return on_notice(lambda: self.stop(checkpoint=True, within_s=grace_s), grace_s)

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

        newest = newest_complete(self._storage, skip_damaged=True, key=self._files.key).checkpoint
        if newest is None or newest.step < self._trainer.run.max_steps:
            return None
        fingerprint = str(newest.manifest.metadata.get("fingerprint", ""))
        return Result(
            name=self._trainer.run.name,
            url=self._trainer.url,
            steps=newest.step,
            fingerprint=fingerprint,
            checkpoint=self._url_of(newest.prefix, newest.storage.url),
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
            checkpoint=self._url_of(state.checkpoint.prefix, state.checkpoint.url) if state.checkpoint else "",
        )

    def _url_of(self, prefix: str, storage_url: str = "") -> str:
        """A folder of the run's own storage, or of another that a fork began with."""
        from raysharded.checkpoint.storage.urls import join_url

        elsewhere = storage_url not in ("", self._storage.url)
        return join_url(storage_url if elsewhere else self._trainer.url, prefix)

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
        ready = {int(worker): facts for worker, facts in state.facts.items() if worker in state.ready}
        return Status(
            phase=state.phase.value,
            step=state.step,
            max_steps=limit,
            workers=tuple(map(int, state.members)),
            pids={worker: facts.pid for worker, facts in ready.items()},
            nodes={worker: facts.node for worker, facts in ready.items()},
            mesh=str(state.mesh) if state.members else "",
        )

    def remark(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Write an entry to the run's journal, while it goes on. Any thread; lost if the run is over."""
        if self._driver is not None:
            self._driver.remark(kind, fields)

    def checkpoint(self, timeout_s: float | None = None) -> WrittenCheckpoint:
        """Have a checkpoint written of the next step, and return when it is committed. Any thread but the listener's.

        One that is being written comes first. Raises CheckpointError if it cannot be written, RunFailed if the run
        ends before, TimeoutError after `timeout_s`: it may be committed all the same.
        """
        if threading.get_ident() == self._driving:
            raise ConfigError(
                "Run.checkpoint() would wait for itself: call it from another thread than the listener's."
            )
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._begun.wait(timeout_s):
            raise TimeoutError(f"run {self._trainer.run.name!r} has not begun after {timeout_s} s")
        if self._driver is None:
            raise RunFailed(f"Run {self._trainer.run.name!r} is over.")
        promise = self._driver.checkpoint()
        try:
            step, prefix = promise.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except concurrent.futures.TimeoutError:
            raise TimeoutError(
                f"no checkpoint of run {self._trainer.run.name!r} is committed after {timeout_s} s; it goes on"
            ) from None
        return WrittenCheckpoint(step=step, url=self._url_of(prefix))

    def reshard(
        self, shard_group_size: int | EllipsisType | None = ..., *, tensor_parallel_degree: int | None = None
    ) -> None:
        """Have the workers form shard groups of this size, or one flat group (None), and tensor parallel groups of this
        degree, from the next step boundary on: by the choice that is made after a loss, too. What is not given stays as
        it was asked for last. Any thread. It is on record before it takes effect.

        Raises ConfigError for a size or a degree that the run's number of workers cannot have, or for a degree in which
        its state cannot be cut, or its task does not say how; RunFailed if the run is over.
        """
        from raysharded.driver.resharding import refusal

        given: dict[str, Any] = {}
        if shard_group_size is not ...:
            given["shard_group_size"] = shard_group_size
        if tensor_parallel_degree is not None:
            given["tensor_parallel_degree"] = tensor_parallel_degree
        scaling = dataclasses.replace(self._scaling, **given)
        require_tensor_parallelism(self._trainer.task, scaling.tensor_parallel_degree)
        self._begun.wait()
        if self._driver is None or self._result is not None or self._error is not None:
            raise RunFailed(f"Run {self._trainer.run.name!r} is over.")
        grouping = self._trainer.grouping(scaling)
        reason = refusal(self._driver.state, grouping)
        if reason:
            raise ConfigError(f"Run.reshard: {reason}")
        self._scaling = scaling
        self._driver.reshard(grouping)

    def stop(self, *, checkpoint: bool = False, within_s: float | None = None) -> None:
        """End the run; `wait` then raises RunFailed. A later `fit()` resumes it.

        It ends now, without a checkpoint; or with `checkpoint=True` after one more, and after `within_s` (by default
        as long as it takes) without. Said again, it ends at once.
        """
        driver = self._driver
        if driver is None:
            self._stop.set()
            driver, checkpoint = self._driver, False  # it may have begun just now, and looked before
        if driver is not None:
            within = None if not checkpoint else within_s if within_s is not None else math.inf
            driver.stop(checkpoint_within_s=within)

    def wait(self, timeout_s: float | None = None) -> Result:
        """The result, when the run is over; raises what it failed with, or TimeoutError."""
        assert self._thread is not None
        try:
            with self._on_notice():
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

    from raysharded.driver.loop import EVENTS_LOG
    from raysharded.obs.live import LiveView

    view = LiveView(Console(stderr=True), trainer.run.max_steps, SystemClock(), _tokens_per_step(trainer))
    events_log, shown = logging.getLogger(EVENTS_LOG), logging.NullHandler()
    events_log.addHandler(shown)  # without any handler Python would print them a second time

    def listen(kind: str, fields: dict[str, Any]) -> None:
        view.on_entry(kind, fields)
        if outside is not None:
            outside(kind, fields)

    try:
        yield listen
    finally:
        events_log.removeHandler(shown)
        view.close()


@contextlib.contextmanager
def _measuring(trainer: ElasticTrainer, url: str, listen: Listener) -> Iterator[Listener]:
    """As `listen`, with the configured writers of metrics told before."""
    if not trainer.run.metrics:
        yield listen
        return
    from raysharded.metrics.feed import Feed, close
    from raysharded.metrics.translating import Translator

    samples, tokens = trainer.batch.global_batch_size, _tokens_per_step(trainer)
    feeds = [Feed(writer, Translator(url, samples, tokens), SystemClock()) for writer in trainer.run.metrics]

    def tell(kind: str, fields: dict[str, Any]) -> None:
        for feed in feeds:
            feed.put(kind, fields)
        listen(kind, fields)

    try:
        yield tell
    finally:
        close(feeds)


def _tokens_per_step(trainer: ElasticTrainer) -> int | None:
    """None if the data does not say how long its sequences are."""
    seq_len = getattr(trainer.data, "seq_len", None)
    return seq_len * trainer.batch.global_batch_size if isinstance(seq_len, int) else None


def versions() -> dict[str, str]:
    """Of Python and of the packages that matter for a run's record."""
    from importlib.metadata import version

    return {"python": platform.python_version(), **{name: version(name) for name in ("torch", "ray")}}
