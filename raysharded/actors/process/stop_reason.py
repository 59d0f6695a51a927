"""Meaning of an error that ended a worker's long call: a reason, an error to send, and a log entry."""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass

from raysharded.actors.task_calls.task_errors import is_collective_failure
from raysharded.errors import (
    CheckpointError,
    ClusterError,
    CollectiveAborted,
    ConfigError,
    CorruptNumbers,
    InexactError,
    RayshardedError,
    TaskError,
    text_of,
    user_traceback,
)
from raysharded.ids import WorkerId
from raysharded.protocol import descriptors
from raysharded.protocol.messages import StopReason

_log = logging.getLogger("raysharded.worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """End of a long call."""

    reason: StopReason
    error: RayshardedError
    is_unexpected: bool = False
    """True for an error of a foreign class: the worker's log gets its traceback."""


def ending_of(error: BaseException, *, interrupted: bool) -> Ending:
    """The end for a raised error. `interrupted`: the worker's collectives were aborted, so the task is not to blame."""
    limit = descriptors.exhausted(error)
    if limit:
        return Ending(reason=StopReason.TASK_ERROR, error=ClusterError(limit))  # a retry may help
    if isinstance(error, RayshardedError):
        error = travelling(error)
    match error:
        case CollectiveAborted():
            return Ending(reason=StopReason.ABORTED, error=error)
        case TaskError():
            return Ending(reason=StopReason.ABORTED if interrupted else StopReason.TASK_ERROR, error=error)
        case CorruptNumbers():
            return Ending(reason=StopReason.CORRUPT, error=error)
        case InexactError() | ConfigError() | CheckpointError():
            return Ending(reason=StopReason.REFUSED, error=error)
        case RayshardedError():  # data, storage: a retry may help
            return Ending(reason=StopReason.TASK_ERROR, error=error)
    if interrupted or is_collective_failure(error):
        return Ending(reason=StopReason.ABORTED, error=CollectiveAborted(text_of(error)))
    task_error = TaskError(f"{type(error).__name__}: {text_of(error)}", user_traceback(error))
    return Ending(reason=StopReason.TASK_ERROR, error=task_error, is_unexpected=True)


def travelling(error: RayshardedError) -> RayshardedError:
    """The error, if its class is raysharded's and it can be pickled.

    Other errors are replaced by the nearest class of raysharded with the same text: a user's subclass, which the driver
    may be unable to create, and errors that cannot be pickled.
    """
    ours = (cls for cls in type(error).__mro__ if cls.__module__.startswith("raysharded."))
    kind: type[RayshardedError] = next(ours)
    if type(error) is kind and _can_be_pickled(error):
        return error
    if isinstance(error, TaskError):
        return kind(text_of(error), str(getattr(error, "user_traceback", "")))
    return kind(text_of(error))


def _can_be_pickled(error: RayshardedError) -> bool:
    try:
        pickle.dumps(error)
    except Exception:  # noqa: BLE001 - the user may have put anything into it
        return False
    return True


class UnexpectedErrors:
    """Log of one worker's errors that raysharded did not raise."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker, self._logged = worker, set[str]()

    def log(self, error: BaseException) -> None:
        """Log an error. Only the first gets a traceback: a retried step would raise the same one."""
        text = f"{type(error).__name__}: {text_of(error)}"
        _log.error(
            "worker %s: unexpected error: %s", self._worker, text, exc_info=None if text in self._logged else error
        )
        self._logged.add(text)
