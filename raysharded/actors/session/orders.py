"""Calls of the driver for a thread that runs a user's function: it serves them whenever it waits in the session."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from raysharded.actors.step.engine import Engine
from raysharded.errors import RayshardedError
from raysharded.protocol.messages import Stopped, StopReason

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Call:
    """A call, whose result another thread waits for."""

    result: Future[Any]
    do: Callable[[], Any]

    def run(self) -> None:
        try:
            self.result.set_result(self.do())
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting thread
            self.result.set_exception(error)


class RunOver(RayshardedError):
    """The run is over, and the function may return: no step comes any more."""


class Training:
    """A generation's training, between the driver's call `train` and its answer. Thread of the function only."""

    def __init__(
        self,
        begin: Callable[[], Engine],
        ended: Callable[[Callable[[], StopReason]], Stopped],
        result: Future[Stopped],
    ) -> None:
        """`begin`: returns the generation's engine, or raises. `ended`: makes the answer of a reason, or of an error
        that is raised in place of it."""
        self._begin, self._ended, self._result = begin, ended, result
        self._engine: Engine | None = None

    @property
    def engine(self) -> Engine:
        """The engine of the generation."""
        assert self._engine is not None, "the training is over"
        return self._engine

    @property
    def is_over(self) -> bool:
        """True once the driver has its answer."""
        return self._result.done()

    @property
    def is_aborted(self) -> bool:
        """True if the generation is trained, and was aborted."""
        return self._engine is not None and self._engine.is_aborted

    def begin(self) -> None:
        """Begin; `is_over` if that failed."""
        try:
            self._engine = self._begin()
        except BaseException as error:  # noqa: BLE001 - handed over to the waiting thread
            self._result.set_exception(error)
            return
        with self.failing():
            self._engine.begin()

    def ends_if_done(self) -> bool:
        """End it if the run has no more steps to do. True if it is over."""
        with self.failing():
            if not self.is_over and self.engine.is_last:
                self.engine.commit_last()
                self.stop(StopReason.FINISHED)
        return self.is_over

    def stop(self, reason: StopReason) -> None:
        """Answer the driver, and forget the generation."""
        self._engine = None
        self._result.set_result(self._ended(lambda: reason))

    def fail(self, error: BaseException) -> None:
        """Answer the driver with an error, and forget the generation."""

        def fail() -> StopReason:
            raise error

        self._engine = None
        self._result.set_result(self._ended(fail))

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """A context whose errors end the training, and go no further."""
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - becomes the driver's answer
            self.fail(error)


class Orders:
    """The calls that wait for the thread. An executor for the other threads."""

    def __init__(self) -> None:
        self._waiting: SimpleQueue[Call | Training | None] = SimpleQueue()

    def submit(self, call: Callable[..., T], /, *args: Any) -> Future[T]:
        """Have the thread make a call."""
        result: Future[T] = Future()
        self._waiting.put(Call(result, lambda: call(*args)))
        return result

    def train(
        self, begin: Callable[[], Engine], ended: Callable[[Callable[[], StopReason]], Stopped]
    ) -> Future[Stopped]:
        """Have the thread train a generation, as `Training`."""
        result: Future[Stopped] = Future()
        self._waiting.put(Training(begin, ended, result))
        return result

    def finish(self) -> None:
        """Have the thread end: the run is over."""
        self._waiting.put(None)

    def next_training(self) -> Training:
        """Serve calls until a generation is to be trained, and begin with it. Thread of the function only.

        Raises RunOver at the end of the run.
        """
        while True:
            order = self._waiting.get()
            if order is None:
                self._waiting.put(None)  # a later call raises it, too
                raise RunOver("the run is over")
            if isinstance(order, Call):
                order.run()
                continue
            order.begin()
            if not order.is_over:
                return order
