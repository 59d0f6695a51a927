"""One run, driven to its end by this process; and its newest journal entries, for processes that follow it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from raysharded.clock import SystemClock
from raysharded.data.outlook import outlook
from raysharded.display import uncaught_errors
from raysharded.display.quantities import count
from raysharded.display.raylet_output import quiet_raylet
from raysharded.errors import CheckpointError, ConfigError, RayshardedError, StorageError
from raysharded.ownership.run_folder import run_storage
from raysharded.ownership.start_mark import StartMark
from raysharded.run.control import RunControl
from raysharded.run.group_planner import GroupPlanner
from raysharded.run.handle import Ask, Run
from raysharded.run.listeners import announce, file_limits, listening, measuring, untested_versions, versions
from raysharded.run.outcome import of_checkpoint, of_finished, of_stopped, with_best
from raysharded.run.process_hooks import on_notice
from raysharded.run.results import Entry, Listener, Result, RunStopped, Status, start_in_words
from raysharded.run.spec import RunSpec, require_same_settings
from raysharded.run.start_from import with_initial_weights
from raysharded.run.status import of_failed_start, with_driver
from raysharded.run.translation import files_of, job_of, limits_of
from raysharded.task import TrainFunction

if TYPE_CHECKING:
    from raysharded.checkpoint import Checkpoint, Storage
    from raysharded.driver.checkpoints.committer import RunFiles
    from raysharded.driver.state.state import State
    from raysharded.journal.verified import JournalReader
    from raysharded.protocol.job import Job
    from raysharded.protocol.worker_launcher import Launcher

_log = logging.getLogger("raysharded.driver")
ENTRIES_KEPT = 20_000
"""Number of entries that are kept; the journal has all of them."""
ENTRIES_AT_ONCE = 2_000
"""Largest number of entries in one answer."""
_TRIED_BYTES = 64 << 20
"""Bytes of each object that are pickled before Ray is started, to see whether it can be sent."""


class EntryBuffer:
    """Entries from this driver's first on, as far as they are kept."""

    def __init__(
        self,
        first: int = 1,
        *,
        limit: int = ENTRIES_KEPT,
        at_once: int = ENTRIES_AT_ONCE,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """`first`: number of the first entry; a later driver's is above all those of the one before."""
        self._kept: deque[Entry] = deque(maxlen=limit)
        self._next, self._at_once, self._wall = first, at_once, wall
        self._changed = threading.Condition()
        self._closed = False

    def add(self, kind: str, fields: dict[str, Any]) -> None:
        """Add an entry; its fields must not change any more."""
        at = self._wall()
        with self._changed:
            self._kept.append((self._next, kind, {"at": at, **fields}))
            self._next += 1
            self._changed.notify_all()

    def close(self) -> None:
        """End all waits: no entry follows."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def after(self, number: int, timeout_s: float) -> list[Entry]:
        """Entries with a higher number, oldest first; empty if there are none.

        If older ones are no longer kept, they begin with the oldest kept one. Waits up to `timeout_s` for the first.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._next - 1 > number, timeout_s)
            new = min(self._next - 1 - number, len(self._kept))
            newest = list(itertools.islice(reversed(self._kept), max(0, new)))
            return newest[::-1][: self._at_once]


def _newest(files: RunFiles) -> Checkpoint | None:
    from raysharded.driver.startup.resume_point import newest_of

    return newest_of(files).checkpoint


def _starts(spec: RunSpec, storage: Storage, journal: JournalReader) -> tuple[list[dict[str, Any]], bool]:
    """The first entries of earlier drivers, and whether a key that the run has signed them, or a user accepted them.

    Raises ConfigError if they had other settings; DamagedJournal, RefusedCheckpoint, StorageError.
    """
    from raysharded.journal.log import refusing_damage

    with refusing_damage(storage):
        found = journal.read()
        starts = [entry for entry in found.entries if entry["kind"] == "started"]
        require_same_settings(spec, starts)
    return starts, not found.is_unsigned


def _carry_user_code(spec: RunSpec) -> None:
    """Send the user's modules along. Raises ConfigError for an object that cannot be sent, before Ray is started."""
    from raysharded.actors.process.surroundings import importing_ray

    with importing_ray():
        import ray

        from raysharded.ray_backend import cluster

    cluster.carry_user_code(*spec.user_objects())
    if not ray.is_initialized():  # a reference to one of Ray's objects would keep that object as long as the process
        cluster.refuse_unsendable(spec.sent_objects(), _TRIED_BYTES)


def _connect(spec: RunSpec, *, shown: bool) -> bool:
    """Use a Ray that is there, or start one; returns whether one was started. Raises ClusterError."""
    from raysharded.ray_backend import cluster

    workers = count(spec.scaling.max_workers, "worker")
    return cluster.connect(lambda where: announce(f"{where} {workers}", shown=shown), spec.require_local_files)


def _ray_launcher(spec: RunSpec, *, owns_cluster: bool) -> Launcher:
    """Raises ConfigError with the attribute that cannot be sent to workers, if there is one."""
    from raysharded.ray_backend import cluster, ray_launcher

    try:
        return ray_launcher.RayLauncher(job_of(spec), spec.scaling, owns_cluster=owns_cluster)
    except RayshardedError:
        raise
    except Exception:
        cluster.refuse_unsendable(spec.sent_objects())
        raise


class LocalRun(Run):
    """A run of this process, with which it ends."""

    def __init__(
        self,
        spec: RunSpec,
        listen: Listener | None = None,
        *,
        progress: bool = False,
        take_over: bool = False,
        launch: Callable[[Job], Launcher] | None = None,
        first_entry: int = 1,
        start: Callable[[RunSpec], Run] | None = None,
    ) -> None:
        """With Ray, unless `launch` makes another launcher; `start` starts a fork (None: in this process)."""
        from raysharded.checkpoint import check_writable
        from raysharded.checkpoint.removal_mark import refuse_removed

        storage = run_storage(spec.url)
        refuse_removed(storage, ConfigError)
        check_writable(storage)
        self.name, self.url = spec.run.name, storage.url
        self._spec, self._storage, self._take_over, self._launch = spec, storage, take_over, launch
        self._groups, self._files = GroupPlanner(spec), files_of(spec, storage, versions())
        self._outside_listener, self._progress = listen, progress
        self._entries, self._began_at = EntryBuffer(first_entry), time.time()
        self._steering = RunControl(spec, self._groups, storage, start or self._start_beside)
        self._evaluation: Mapping[str, float] = {}
        """The newest evaluation."""
        self._thread: threading.Thread | None = None
        self._mark = StartMark(storage)
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._ended = threading.Event()

    def _start_beside(self, spec: RunSpec) -> Run:
        run = LocalRun(spec, launch=self._launch)
        run.begin()
        return run

    # -- driving --

    def begin(self) -> None:
        """Drive the run in a separate thread."""
        self._thread = threading.Thread(target=self._drive_quietly, name=f"raysharded {self.name}")
        self._thread.start()

    def _drive_quietly(self) -> None:
        with contextlib.suppress(BaseException):  # kept for `wait`
            self.drive()

    def drive(self) -> Result:
        """Drive the run to its end in the calling thread."""
        self._mark.put(driver_is_here=True)
        try:
            self._result = self._drive()
            return self._result
        except BaseException as error:
            self._error = error
            raise
        finally:
            if self._steering.driver is None:
                self._mark.end(None if self._steering.is_stopped() else self._error)
            self._steering.end()
            self._ended.set()
            self._entries.close()

    def _drive(self) -> Result:
        self._journal: JournalReader | None = self._files.journal()  # the driver reads what is written from here on
        starts, vouched = _starts(self._spec, self._storage, self._journal)
        finished = self._finished_before()
        if finished is not None:
            return finished
        self._spec = with_initial_weights(self._spec, self._storage, starts, self._files.key, vouched=vouched)
        if self._spec.initial_weights is not None:
            self._files = files_of(self._spec, self._storage, versions())
        spec = self._spec
        repeated = outlook(spec.data, spec.batch, spec.run.max_steps)
        for sentence in (*untested_versions(), *file_limits(spec.scaling.max_workers), *repeated):
            _log.warning("%s", sentence)
        self._groups.check_memory()
        if self._launch is None:
            return self._drive_with_ray()
        return self._drive_with(self._launch(job_of(self._spec)))

    def _drive_with_ray(self) -> Result:
        _carry_user_code(self._spec)
        owns_cluster = _connect(self._spec, shown=self._progress)
        uncaught_errors.install(RayshardedError)  # Ray has set its own since `fit` did
        with quiet_raylet() if owns_cluster else contextlib.nullcontext():
            try:
                return self._drive_with(_ray_launcher(self._spec, owns_cluster=owns_cluster))
            finally:
                if owns_cluster:
                    import ray

                    ray.shutdown()

    def _drive_with(self, launcher: Launcher) -> Result:
        """Drive the run with any launcher; closes it."""
        from raysharded.driver.driver import Driver
        from raysharded.driver.last_words import FUNCTION_S
        from raysharded.ownership.leadership import LeaseTerms

        spec = self._spec
        with (
            listening(spec.run.max_steps, spec.tokens_per_step, self._progress, self._outside_listener) as told,
            measuring(spec, self._storage.url, told) as measured,
        ):

            def listen(kind: str, fields: dict[str, Any]) -> None:
                self._entries.add(kind, fields)
                self._evaluation = fields.get("evaluation") or self._evaluation
                measured(kind, fields)

            try:
                lease = LeaseTerms(
                    lease_s=spec.run.lease_s, take_over=self._take_over, given_up=self._steering.is_stopped
                )
                driver = Driver(
                    limits_of(spec, self._groups.grouping()),
                    launcher,
                    self._files,
                    SystemClock(),
                    listen,
                    lease,
                    spec.run.failure.orphan_wait_s,
                    record_events=spec.run.record_events,
                    function_s=FUNCTION_S if isinstance(spec.task, TrainFunction) else 0.0,
                )
                driver.restore(self._journal)
                self._journal = None
                self._mark.remove()
                self._steering.begin(driver)
                with self._on_notice():
                    state = driver.run()
            finally:
                launcher.close()
        return self._result_of(state)

    def _on_notice(self) -> AbstractContextManager[None]:
        """Within this context, SIGTERM or SIGHUP ends the run after one more checkpoint."""
        grace_s = self._spec.run.checkpoint.grace_s
        return on_notice(lambda: self.stop(checkpoint=True, within_s=grace_s), grace_s)

    def _finished_before(self) -> Result | None:
        """The result of a run whose final checkpoint exists already."""
        newest = _newest(self._files)
        if newest is None or newest.step < self._spec.run.max_steps:
            return None
        _log.warning(
            "run %r is finished with step %d, and max_steps is %d: nothing is trained; a larger max_steps continues it",
            *(self.name, newest.step, self._spec.run.max_steps),
        )
        return self._with_best(of_checkpoint(newest, self._storage, self.name, self._spec.url))

    def _result_of(self, state: State) -> Result:
        place = (self._storage, self.name, self._spec.url)
        if state.result_fingerprint is not None:
            return self._now(of_finished(state, *place))
        newest = None
        with contextlib.suppress(CheckpointError, StorageError):
            newest = _newest(self._files)
        said = " However, ".join((self.how_to_go_on(), *self._steering.warnings()))
        raise RunStopped(f"Stopped. {said}", self._now(of_stopped(newest, state, *place)))

    def _now(self, result: Result) -> Result:
        evaluation, wall_s = result.evaluation or self._evaluation, time.time() - self._began_at
        return self._with_best(replace(result, evaluation=evaluation, wall_s=wall_s))

    def _with_best(self, result: Result) -> Result:
        return with_best(result, self._storage, self._spec.best, key=self._files.key) if self._spec.best else result

    def how_to_go_on(self) -> str:
        """Message for a person about a run that ended before its last step."""
        limit, driver = self._spec.run.max_steps, self._steering.driver
        if driver is None:
            return f"Run {self.name!r} had not begun."
        state = driver.state
        start = start_in_words(state.checkpoint.step if state.checkpoint else None)
        return f"Run {self.name!r} was at step {state.step} of {limit}; the next fit() resumes {start}."

    # -- for the user --

    def status(self) -> Status:
        driver, is_over = self._steering.driver, self._ended.is_set()
        found = Status(
            phase="over" if is_over else "starting",
            state=self._state(),
            step=self._result.steps if self._result else 0,
            max_steps=self._spec.run.max_steps,
            workers=(),
            name=self.name,
            url=self.url,
        )
        error = str(self._error) if self._error is not None and self._state() == "failed" else ""
        if driver is None:
            return of_failed_start(replace(found, error=error), self.url) if is_over and self._error else found
        return with_driver(found, driver, is_over=is_over, started_at=self._began_at, error=error)

    def _state(self) -> str:
        """The state that `raysharded status` shows."""
        driver = self._steering.driver
        if not self._ended.is_set():
            return "new" if driver is None else "paused" if driver.state.phase.value == "paused" else "running"
        if self._result is not None:
            return "finished"
        stopped = self._steering.is_stopped() or (driver is not None and driver.state.stop_requested)
        return "stopped" if stopped or isinstance(self._error, KeyboardInterrupt) else "failed"

    def entries(self, after: int = 0, timeout_s: float = 0.0) -> list[Entry]:
        return self._entries.after(after, timeout_s)

    def is_over(self) -> bool:
        return self._ended.is_set()

    def wait_until_begun(self, timeout_s: float | None = None) -> None:
        if not self._steering.wait_until_begun(timeout_s):
            raise TimeoutError(f"run {self.name!r} has not begun after {timeout_s} s")
        if self._steering.driver is None and self._error is not None:
            raise self._error

    def answer(self, what: Ask, arguments: Mapping[str, Any]) -> Any:
        """Carry out a request from a handle in another process."""
        return self._ask(what, **arguments)

    def outcome(self) -> tuple[Result | None, BaseException | None]:
        """The result, or the error that the run failed with; neither before its end."""
        return self._result, self._error

    def wait(self, timeout_s: float | None = None) -> Result:
        assert self._thread is not None
        try:
            with self._on_notice():
                self._ended.wait(timeout_s)  # Python 3.11 takes a thread for ended whose `join` was interrupted
        except KeyboardInterrupt:
            self.stop()
            self._ended.wait()
            raise KeyboardInterrupt(f"Interrupted. {self.how_to_go_on()}") from None
        if not self._ended.is_set():
            raise TimeoutError(f"run {self.name!r} is still {self.status().phase} after {timeout_s} s")
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def _ask(self, what: Ask, **arguments: Any) -> Any:
        return getattr(self._steering, what)(**arguments)
