"""`fit()` in a submitted Ray job: the run has a separate host, which this process follows to its end.

Ray stops a job with SIGTERM, and with SIGKILL 3 s later; neither reaches a detached actor. So the driver is such an
actor, and the job's process only requests that it stops. The last checkpoint is then written within `grace_s`, even if
the job has ended. A job that is submitted again meanwhile waits for that. If the job's process was lost and the driver
continues, the next job follows it.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from raysharded.display.raylet_output import quiet_raylet
from raysharded.errors import RayshardedError, RunFailed, RunOwnedElsewhere
from raysharded.ray_backend.cluster import find_cluster
from raysharded.run.handle import Run
from raysharded.run.hosted import launch, registry, submission
from raysharded.run.hosted.remote import AttachedRun
from raysharded.run.listeners import listening
from raysharded.run.process_hooks import on_notice
from raysharded.run.results import Entry, Listener, Result

if TYPE_CHECKING:
    from raysharded.run.spec import RunSpec

_log = logging.getLogger("raysharded.job")
_LOOK_UP_S = 1.0
_PACKAGES = "/runtime_resources/"
"""Folder where Ray unpacks a job's working directory, and deletes it at some time."""


def fit_in_job(
    spec: RunSpec,
    listen: Listener | None,
    *,
    progress: bool,
    take_over: bool,
    context: Callable[[Run], AbstractContextManager[object]] | None,
) -> Result:
    """Run as `ElasticTrainer.fit` does, with a host."""
    find_cluster()  # from then on Ray's own signal handlers are set
    notice, clock = _Notice(spec.run.checkpoint.grace_s), _Then()
    with notice.heard(), quiet_raylet():
        run = _started_or_followed(spec, notice, take_over=take_over)
        notice.tell(run)
        if _PACKAGES in run.url:
            _log.warning(
                "run %s is stored in %s, the job's own folder, which Ray deletes: give an absolute path or a URL",
                run.name,
                run.url,
            )
        with (
            listening(spec.run.max_steps, spec.tokens_per_step, progress, listen, clock) as told,
            contextlib.nullcontext() if context is None else context(run),
        ):
            for batch in _followed(run):
                for _, kind, fields in batch:
                    clock.at = float(fields["at"])
                    told(kind, {name: value for name, value in fields.items() if name != "at"})
        return run.wait()


class _Then:
    """Implements `Clock` for past entries: it shows the time of the newest."""

    at = 0.0

    def monotonic(self) -> float:
        return self.at

    def wall(self) -> float:
        return self.at


class _Notice:
    """SIGTERM, SIGHUP or Ctrl-C to the job, forwarded to its run's driver as a stop request.

    With a grace period the run ends after one more checkpoint. Ctrl-C, or a second SIGTERM, does not wait for that.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._noticed, self._told = threading.Event(), threading.Event()
        self._run: Run | None = None

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Handle signals within this context."""
        try:
            with on_notice(self._noticed.set, max(self._grace_s, _LOOK_UP_S)):
                yield
        except KeyboardInterrupt:
            self._noticed.set()
            if self._run is None:
                raise KeyboardInterrupt("Interrupted. The run had not begun.") from None
            self._told.wait()
            checkpoint = f", with a checkpoint within {self._grace_s:g} s" if self._grace_s > 0 else ""
            raise KeyboardInterrupt(
                f"Interrupted. The driver of run {self._run.name!r} is stopping{checkpoint}; the next fit() resumes "
                "from there."
            ) from None

    def check(self, name: str) -> None:
        """Raise RunFailed if the job is to end before its run has begun."""
        if self._noticed.is_set():
            raise RunFailed(f"Stopped. Run {name!r} had not begun in this job.")

    def tell(self, run: Run) -> None:
        """Forward signals to this run's driver, in a thread: a signal handler must not call Ray."""
        self._run = run
        threading.Thread(target=self._tell, args=(run,), name="stop", daemon=True).start()

    def _tell(self, run: Run) -> None:
        self._noticed.wait()
        with contextlib.suppress(RayshardedError):  # the run is over, or cannot be reached
            run.stop(checkpoint=self._grace_s > 0, within_s=self._grace_s)
        self._told.set()


def _started_or_followed(spec: RunSpec, notice: _Notice, *, take_over: bool) -> AttachedRun:
    waited = False
    while True:
        notice.check(spec.run.name)
        try:
            return launch.start_hosted(spec, take_over=take_over)
        except RunOwnedElsewhere:
            order = submission.make_order(submission.absolute(spec), take_over=False)
            if registry.of_another_version(order.name, order.url):
                raise
            host = registry.host_of(registry.host_name(order.name, order.url))
            found = registry.about(host) if host is not None else None
            if found is None or found.is_over:
                continue
            if found.is_stopping:
                if not waited:
                    _log.warning("run %s: waiting for its previous driver, which is stopping (%s)", order.name, found)
                waited = True
                with contextlib.suppress(RayshardedError, TimeoutError):  # its final error does not matter
                    AttachedRun(order.name, order.url).wait(_LOOK_UP_S)
            elif found.identity == order.identity:
                _log.warning("run %s: its driver is still running; following it (%s)", order.name, found)
                return AttachedRun(order.name, order.url)
            else:
                raise


def _followed(run: Run) -> Iterator[list[Entry]]:
    """The batches of `run.follow`, with the calling thread free to handle signals at once."""
    found: queue.SimpleQueue[list[Entry] | BaseException | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            for batch in run.follow():
                found.put(batch)
            found.put(None)
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            found.put(error)

    threading.Thread(target=read, name="follow", daemon=True).start()
    while True:
        try:
            batch = found.get(timeout=_LOOK_UP_S)
        except queue.Empty:
            continue
        if isinstance(batch, BaseException):
            raise batch
        if batch is None:
            return
        yield batch
