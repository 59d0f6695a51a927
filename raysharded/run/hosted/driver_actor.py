"""The driver actor, or host: it drives a run, apart from the process that started it. Knows Ray.

It is detached, named and on the head node; Ray restarts it when its process is lost. It finds its order in the
cluster's memory, and takes over the run's workers as any driver does that follows another. After the run it stays for a
while, so that waiting handles receive the result, or the original error; then it exits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from raysharded.display.quantities import duration
from raysharded.errors import ConfigError, RayshardedError, RunFailed, StorageError
from raysharded.ownership.start_mark import StartMark
from raysharded.ray_backend.adoption import num_restarts
from raysharded.run.handle import ENTRIES_OF_ONE, Ask, Run
from raysharded.run.hosted import submission
from raysharded.run.hosted.driver_key import take_environment
from raysharded.run.hosted.registry import About
from raysharded.run.listeners import shown_elsewhere
from raysharded.run.local import LocalRun
from raysharded.run.results import Entry, Result, Status
from raysharded.run.status import of_failed_start

if TYPE_CHECKING:
    from raysharded.run.spec import RunSpec

_log = logging.getLogger("raysharded.host")
LINGER_S = 60.0
_STORAGE_EVERY_S = 5.0
"""Interval at which a restarted host tries storage that cannot be written to."""
_ANSWERS = 256
"""Answers that are kept, for requests that are repeated because the answer was lost."""


class DriverActor:
    """Drives one run. `raysharded.run.hosted.remote.AttachedRun` calls its methods."""

    def __init__(self, order_key: str, start: Callable[[RunSpec], Run]) -> None:
        """`start` starts a fork, in another host."""
        self._start = start
        self._key = order_key
        self._order: submission.RunSubmission | None = None
        self._unreadable: RunFailed | None = None
        try:
            self._order = submission.read_order(order_key)
        except RunFailed as error:  # of another protocol: the run is left alone
            self._unreadable = error
        self._restarts = num_restarts()
        self._self = ray.get_runtime_context().current_actor
        submission.put_greeting(self._self._actor_id.hex())
        self._run: LocalRun | None = None
        self._made, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._waits_for = ""
        """A sentence about what the start waits for; empty: nothing."""
        self._answers: OrderedDict[str, Future[Any]] = OrderedDict()
        self._answering = threading.Lock()
        threading.Thread(target=self._live, name="raysharded host").start()

    # -- lifecycle --

    def _live(self) -> None:
        try:
            if self._unreadable is not None:
                raise self._unreadable
            if self._order is not None:
                self._drive(self._order)
        except BaseException as error:  # noqa: BLE001 - thread boundary: waiting handles get it
            self._error = _portable(error)
            if not isinstance(error, RayshardedError):
                _log.exception("the run ended with an error that is not raysharded's own")
        finally:
            if self._unreadable is None:
                with contextlib.suppress(Exception):  # without Ray's memory there is nothing to forget
                    submission.forget(self._key)
            self._made.set()
            self._ended.set()
        if self._order is not None or self._unreadable is not None:
            time.sleep(LINGER_S)
        self.leave()

    def _drive(self, order: submission.RunSubmission) -> None:
        with contextlib.suppress(OSError):  # another machine may not have it
            os.chdir(order.folder)
        self._run = self._made_run(order)
        self._made.set()
        stop = submission.read_stop(self._key)
        if stop is not None:
            threading.Thread(target=self._stop_when_begun, args=(self._run, stop), daemon=True).start()
        with shown_elsewhere():
            self._run.drive()

    def _made_run(self, order: submission.RunSubmission) -> LocalRun:
        """The order's run. If it cannot be made, the mark that the starter put gets the reason."""
        try:
            take_environment(order)
            spec = submission.spec_of(order)
            if self._restarts:
                self._wait_for_storage(spec)
            return LocalRun(
                spec,
                take_over=order.take_over and self._restarts == 0,
                first_entry=self._restarts * ENTRIES_OF_ONE + 1,
                start=partial(self._start_fork, order),
            )
        except Exception as error:
            from raysharded.checkpoint import open_storage

            with contextlib.suppress(RayshardedError):  # the error itself matters more
                StartMark(open_storage(order.url)).end(error)
            raise

    def _wait_for_storage(self, spec: RunSpec) -> None:
        """Return when the run's storage can be written to, or after the run's patience, or a stop request.

        The run has begun already, and its workers wait for this host. Raises ConfigError if it is being removed.
        """
        from raysharded.checkpoint import check_writable, open_storage
        from raysharded.checkpoint.removal_mark import refuse_removed
        from raysharded.report.loader import open_run

        patience_s, since = spec.run.failure.storage_patience_s, time.monotonic()
        while (waited_s := time.monotonic() - since) < patience_s and submission.read_stop(self._key) is None:
            try:
                refuse_removed(open_storage(spec.url), ConfigError)  # no patience brings it back
                open_run(spec.url)  # an unmounted share has no run: it is not to be begun anew
                check_writable(open_storage(spec.url))
                break
            except StorageError as error:
                left = duration(patience_s - waited_s)
                self._waits_for = f"its restarted driver cannot begin, and retries for {left}: {error}"
                _log.warning("run %s: %s", spec.run.name, self._waits_for)
            time.sleep(_STORAGE_EVERY_S)
        self._waits_for = ""

    def _start_fork(self, order: submission.RunSubmission, spec: RunSpec) -> Run:
        """Start a fork with the order's own objects: those of the live run may hold open files and threads by now."""
        own = submission.spec_of(order)
        run = replace(own.run, name=spec.run.name, storage_path=spec.run.storage_path)
        return self._start(replace(own, run=run))

    def _stop_when_begun(self, run: LocalRun, stop: dict[str, Any]) -> None:
        """Repeat a stop request that the host before had received but not carried out."""
        with contextlib.suppress(Exception):  # a start that failed has nothing to stop
            run.wait_until_begun()
            run.stop(**stop)

    def leave(self) -> None:
        """End the process permanently."""
        with contextlib.suppress(Exception):  # without Ray's memory there is nothing to forget
            submission.forget(self._key)
            submission.forget_greeting(self._self._actor_id.hex())
        ray.kill(self._self, no_restart=True)

    # -- for handles --

    def about(self) -> About:
        """Description of this host and its run."""
        order, status = self._order, self.status()
        return About(
            name=status.name,
            url=status.url,
            identity=order.identity if order else "",
            pid=os.getpid(),
            node=platform.node(),
            since=order.since if order else 0.0,
            step=status.step,
            max_steps=status.max_steps,
            is_over=self._ended.is_set(),
            is_stopping=submission.read_stop(self._key) is not None,
        )

    def status(self) -> Status:
        if self._run is not None:
            return self._run.status()
        (phase, state), order = ("over", "failed") if self._ended.is_set() else ("starting", "new"), self._order
        error = str(self._error) if self._error is not None else ""
        warnings = tuple(filter(None, [self._waits_for]))
        found = Status(phase=phase, state=state, step=0, max_steps=0, workers=(), error=error, warnings=warnings)
        if order is None:
            return found
        found = replace(found, max_steps=order.max_steps, name=order.name, url=order.url)
        return of_failed_start(found, order.url) if self._error is not None else found

    def entries(self, after: int, timeout_s: float) -> list[Entry]:
        until = time.monotonic() + timeout_s
        self._made.wait(timeout_s)
        return self._run.entries(after, max(0.0, until - time.monotonic())) if self._run is not None else []

    def outcome(self, timeout_s: float) -> tuple[bool, Result | None, BaseException | None]:
        """Whether the run is over, its result, and its error; waits up to `timeout_s` for the end."""
        self._ended.wait(timeout_s)
        over = self._ended.is_set()
        result = self._run.outcome()[0] if over and self._run is not None else None
        return over, result, self._error

    def ask(self, request: str, what: Ask, arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
        """The answer of `RunControl`, or its error.

        A repeated request is not carried out again, but gets the same answer.
        """
        with self._answering:
            known = self._answers.get(request)
            answer: Future[Any] = known or Future()
            self._answers[request] = answer
            while len(self._answers) > _ANSWERS:
                self._answers.popitem(last=False)
        if known is None:
            try:
                answer.set_result(self._asked(what, arguments))
            except Exception as error:  # noqa: BLE001 - the boundary: raised in the handle's process
                answer.set_exception(_portable(error))
        error_or_none = answer.exception()
        return (None, error_or_none) if error_or_none is not None else (answer.result(), None)

    def _asked(self, what: Ask, arguments: dict[str, Any]) -> Any:
        if what == "stop" and not self._ended.is_set():
            submission.put_stop(self._key, arguments)
        self._made.wait()
        if self._run is None:
            raise RunFailed(f"Run {self._order.name if self._order else '?'!r} is over: start it again to continue it.")
        return self._run.answer(what, arguments)


class Host(DriverActor):
    """The class name that Ray shows for its process, `ray::Host`: users' scripts rely on it."""


def _portable(error: BaseException) -> BaseException:
    """The error in a form that can be sent; an error from outside raysharded includes its traceback."""
    if not isinstance(error, RayshardedError | TimeoutError):
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - a class of the user's that cannot
        return RunFailed("".join(traceback.format_exception(error)).rstrip())
    return error
