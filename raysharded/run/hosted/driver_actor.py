"""The actor that drives a run, apart from the process that started it. Knows Ray.

It is detached, named and on the head node, and Ray starts it again when its process is lost: it finds its order in the
cluster's memory, and takes the run's workers over as any driver does that follows another. When the run is over it
stays for a while, so that those who wait get the result, or the very error, and ends.
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
from typing import TYPE_CHECKING, Any

import ray

from raysharded.errors import RayshardedError, RunFailed
from raysharded.ray_backend.adoption import num_restarts
from raysharded.run.handle import Ask, Run
from raysharded.run.hosted import submission
from raysharded.run.hosted.registry import About
from raysharded.run.listeners import shown_elsewhere
from raysharded.run.local import LocalRun
from raysharded.run.results import Entry, Result, Status

if TYPE_CHECKING:
    from raysharded.run.spec import RunSpec

_log = logging.getLogger("raysharded.host")
LINGER_S = 60.0
_ENTRIES_OF_ONE = 1 << 40
"""More than one host numbers: the next one's are above them."""
_ANSWERS = 256
"""That are kept, for requests that are made again because the answer was lost."""


class DriverActor:
    """Drives one run. Its methods are called by `raysharded.run.hosted.remote.AttachedRun`."""

    def __init__(self, order_key: str, start: Callable[[RunSpec], Run]) -> None:
        """`start` starts a fork, in another host."""
        self._start = start
        self._key = order_key
        self._order: submission.RunSubmission | None = None
        self._unreadable: RunFailed | None = None
        try:
            self._order = submission.read_order(order_key)
        except RunFailed as error:  # it is of another protocol: the run is left alone
            self._unreadable = error
        self._restarts = num_restarts()
        self._self = ray.get_runtime_context().current_actor
        submission.put_greeting(self._self._actor_id.hex())
        self._run: LocalRun | None = None
        self._made, self._ended = threading.Event(), threading.Event()
        self._error: BaseException | None = None
        self._answers: OrderedDict[str, Future[Any]] = OrderedDict()
        self._answering = threading.Lock()
        threading.Thread(target=self._live, name="raysharded host").start()

    # -- its life --

    def _live(self) -> None:
        try:
            if self._unreadable is not None:
                raise self._unreadable
            if self._order is not None:
                self._drive(self._order)
        except BaseException as error:  # noqa: BLE001 - the boundary of the thread: waiters get it
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
        os.environ.update(order.environment)
        self._run = LocalRun(
            submission.spec_of(order),
            take_over=order.take_over and self._restarts == 0,
            first_entry=self._restarts * _ENTRIES_OF_ONE + 1,
            start=self._start,
        )
        self._made.set()
        stop = submission.read_stop(self._key)
        if stop is not None:
            threading.Thread(target=self._stop_when_begun, args=(self._run, stop), daemon=True).start()
        with shown_elsewhere():
            self._run.drive()

    def _stop_when_begun(self, run: LocalRun, stop: dict[str, Any]) -> None:
        """The host before was told so, and did not come to it."""
        run.wait_until_begun()
        run.stop(**stop)

    def leave(self) -> None:
        """End the process, for good."""
        with contextlib.suppress(Exception):  # without Ray's memory there is nothing to forget
            submission.forget(self._key)
            submission.forget_greeting(self._self._actor_id.hex())
        ray.kill(self._self, no_restart=True)

    # -- for handles --

    def about(self) -> About:
        """Who and what it is."""
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
        phase, order = ("over" if self._ended.is_set() else "starting"), self._order
        if order is None:
            return Status(phase=phase, step=0, max_steps=0, workers=())
        return Status(phase=phase, step=0, max_steps=order.max_steps, workers=(), name=order.name, url=order.url)

    def entries(self, after: int, timeout_s: float) -> list[Entry]:
        until = time.monotonic() + timeout_s
        self._made.wait(timeout_s)
        return self._run.entries(after, max(0.0, until - time.monotonic())) if self._run is not None else []

    def outcome(self, timeout_s: float) -> tuple[bool, Result | None, BaseException | None]:
        """Whether the run is over, its result, and what it failed with; waits up to `timeout_s` for that."""
        self._ended.wait(timeout_s)
        over = self._ended.is_set()
        result = self._run.outcome()[0] if over and self._run is not None else None
        return over, result, self._error

    def ask(self, request: str, what: Ask, arguments: dict[str, Any]) -> tuple[Any, BaseException | None]:
        """What `RunControl` answers, or the error that it raises; a request that was made before is not carried out
        again, but gets the same answer."""
        with self._answering:
            known = self._answers.get(request)
            answer: Future[Any] = known or Future()
            self._answers[request] = answer
            while len(self._answers) > _ANSWERS:
                self._answers.popitem(last=False)
        if known is None:
            try:
                answer.set_result(self._asked(what, arguments))
            except Exception as error:  # noqa: BLE001 - the boundary: raised where it was asked
                answer.set_exception(_portable(error))
        error_or_none = answer.exception()
        return (None, error_or_none) if error_or_none is not None else (answer.result(), None)

    def _asked(self, what: Ask, arguments: dict[str, Any]) -> Any:
        if what == "stop" and not self._ended.is_set():
            submission.put_stop(self._key, arguments)
        self._made.wait()
        if self._run is None:
            raise RunFailed(f"Run {self._order.name if self._order else '?'!r} is over.")
        return self._run.answer(what, arguments)


class Host(DriverActor):
    """The same under the name that its process has: Ray calls it `ray::Host`, and people's scripts look for it."""


def _portable(error: BaseException) -> BaseException:
    """The error as it can be sent, with where it was raised if it is none of ours."""
    if not isinstance(error, RayshardedError | TimeoutError):
        error.add_note("".join(traceback.format_exception(error)).rstrip())
    try:
        ray.cloudpickle.loads(ray.cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 - a class of the user's that cannot
        return RunFailed("".join(traceback.format_exception(error)).rstrip())
    return error
