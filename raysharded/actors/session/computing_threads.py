"""The one thread of a worker that computes: a pool's, for a task; or that of a user's training function.

OpenMP and the allocator keep state per thread, so all calls that compute are made in it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from raysharded.actors.built_objects import BuiltObjects
from raysharded.actors.model.construction import construct
from raysharded.actors.session.held_out import close
from raysharded.actors.session.loop_errors import blamed_behind, explained, placed
from raysharded.actors.session.orders import Orders, RunOver
from raysharded.actors.session.own_collectives import refuse_groups
from raysharded.actors.session.session_task import SessionTask, name_of
from raysharded.actors.session.user_session import Session
from raysharded.actors.session.user_step import ENTRY
from raysharded.actors.shards.store import ShardStore
from raysharded.actors.step.engine import Engine
from raysharded.actors.task_calls.task_errors import naming
from raysharded.errors import CollectiveAborted, TaskError
from raysharded.protocol.job import Job
from raysharded.protocol.messages import Stopped, StopReason
from raysharded.task import Task

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
_log = logging.getLogger("raysharded.worker")


class ComputingThread(Protocol):
    """The thread, for the other threads of the worker."""

    def build(self) -> None:
        """Begin, and build what can be built before there is a generation. Raises TaskError."""
        ...

    def submit(self, call: Callable[..., T], /, *args: Any) -> Future[T]:
        """Make a call in the thread."""
        ...

    def train(self, begin: Callable[[], Engine], ended: Callable[[Callable[[], StopReason]], Stopped]) -> Stopped:
        """Train a generation. `begin`: returns its engine. `ended`: makes the answer of the end, or of its error."""
        ...

    def finish(self, timeout_s: float) -> None:
        """Let a user's function return, as the run is over; waits for it up to `timeout_s`."""
        ...


class TaskThread:
    """The thread of a worker whose task has its methods called."""

    def __init__(self, begin: Callable[[], None], task: Task, seed: int) -> None:
        """`begin`: called first in the thread. `seed`: the run's."""
        self._pool = ThreadPoolExecutor(1, "compute", initializer=begin)
        self._task, self._seed = task, seed

    def build(self) -> None:
        with naming(f"{type(self._task).__name__}.build_model", "build"):
            construct(self._task, self._seed)  # the first build imports parts of torch, which takes about a second

    def submit(self, call: Callable[..., T], /, *args: Any) -> Future[T]:
        return self._pool.submit(call, *args)

    def train(self, begin: Callable[[], Engine], ended: Callable[[Callable[[], StopReason]], Stopped]) -> Stopped:
        return self.submit(lambda: ended(begin().run)).result()

    def finish(self, timeout_s: float) -> None:
        pass  # no code of the task runs between its methods


class FunctionThread:
    """The thread of a worker that runs a user's training function; it serves calls while that waits in its session."""

    def __init__(
        self,
        begin: Callable[[], None],
        function: Callable[[Session], None],
        new_session: Callable[[], Session],
        orders: Orders,
    ) -> None:
        """`begin`: called first in the thread. `new_session`: makes the session of a call of the function."""
        self._begin, self._function, self._new_session, self._orders = begin, function, new_session, orders
        self._is_built, self._is_over, self._has_returned = (threading.Event() for _ in range(3))
        self._error: BaseException | None = None
        """The error with which the function ended before it was built."""

    def build(self) -> None:
        """Return once the function has called `session.shard`. Raises the error with which it ended before."""
        threading.Thread(target=self._run, daemon=True, name="compute").start()
        self._is_built.wait()
        if self._error is not None:
            raise self._error

    def submit(self, call: Callable[..., T], /, *args: Any) -> Future[T]:
        return self._orders.submit(call, *args)

    def train(self, begin: Callable[[], Engine], ended: Callable[[Callable[[], StopReason]], Stopped]) -> Stopped:
        return self._orders.train(begin, ended).result()

    def finish(self, timeout_s: float) -> None:
        self._is_over.set()
        self._orders.finish()
        self._has_returned.wait(timeout_s)

    def _run(self) -> None:
        self._begin()
        refuse_groups()
        error: BaseException | None = None
        while error is None:
            session = self._new_session()
            error = self._call(session)
            close(session)
        if not self._is_built.is_set():
            self._error = error
            self._is_built.set()
        with contextlib.suppress(RunOver):
            session.serve_after(error)
        self._has_returned.set()

    def _call(self, session: Session) -> BaseException | None:
        """Call the function once. The error that every later training ends with; None to call it again.

        It is called again if it has ended in a step that is undone, as a worker that joins calls it.
        """
        session.on_sharded = self._is_built.set
        session.draws.seed(0, ENTRY)
        name = name_of(self._function)
        try:
            with naming(name), _explaining(session, name):
                self._function(session)
            if self._is_over.is_set():
                return RunOver(f"{name} has returned")
            if session.end():
                return None
            return TaskError(
                f"{name} returned before the run's last step: iterate over session.steps() without break or return."
                if self._is_built.is_set()
                else f"{name} returned without session.shard(model, optimizer) and a loop over session.steps()."
            )
        except BaseException as found:  # noqa: BLE001 - the boundary to the user's function
            if self._is_over.is_set():
                if not isinstance(found, RunOver):
                    _log.warning("%s raised behind the run's last step, which is done: %s", name, found)
                return found
            is_aborted, step = session.is_interrupted, session.step
            if step is not None and step.is_open:  # an adapter's, which no `with` has left
                step.__exit__(type(found), found, found.__traceback__)
                return None if is_aborted or isinstance(found, CollectiveAborted) else found
            left = isinstance(found, CollectiveAborted) and step is not None and step.is_undone
            if left or (is_aborted and session.end()):
                return None
            if step is None:
                return placed(found)
            return placed(blamed_behind(step.number, found, is_undone=step.is_undone, is_aborted=is_aborted))


@contextlib.contextmanager
def _explaining(session: Session, name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if known := explained(session, name, error):
            raise known from error
        raise


def computing_thread(
    begin: Callable[[], None], job: Job, device: torch.device, objects: BuiltObjects, store: ShardStore
) -> ComputingThread:
    """The thread for a job: `begin` is called first in it. `objects`: those of the job's task."""
    if not isinstance(job.task, SessionTask):
        return TaskThread(begin, job.task, job.batch.seed)
    orders = Orders()
    new_session = partial(Session, job, job.task, device, objects, store, orders)
    return FunctionThread(begin, job.task.function, new_session, orders)
