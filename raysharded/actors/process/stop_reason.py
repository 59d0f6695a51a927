"""What an error means that ended a worker's long call: a reason, an error that travels, and a line of the log."""

from __future__ import annotations

import logging
import pickle
from dataclasses import dataclass

from raysharded.actors.task_calls.task_errors import is_collective_failure
from raysharded.errors import (
    CheckpointError,
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
from raysharded.protocol.messages import StopReason

_log = logging.getLogger("raysharded.worker")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a long call ended."""

    reason: StopReason
    error: RayshardedError
    is_unexpected: bool = False
    """Nothing of ours: worth a traceback in the worker's log."""


def ending_of(error: BaseException, *, interrupted: bool) -> Ending:
    """Of what was raised. `interrupted`: the worker's collectives had been aborted, and then nobody is to blame."""
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
        case RayshardedError():  # data, storage: trying again may help
            return Ending(reason=StopReason.TASK_ERROR, error=error)
    if interrupted or is_collective_failure(error):
        return Ending(reason=StopReason.ABORTED, error=CollectiveAborted(text_of(error)))
    task_error = TaskError(f"{type(error).__name__}: {text_of(error)}", user_traceback(error))
    return Ending(reason=StopReason.TASK_ERROR, error=task_error, is_unexpected=True)


def travelling(error: RayshardedError) -> RayshardedError:
    """The error, if it is plainly one of ours. A user's own subclass, which the driver may not be able to make, and
    what cannot be pickled are replaced by the nearest class of ours with the same text."""
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
    except Exception:  # noqa: BLE001 - whatever the user put into it
        return False
    return True


class UnexpectedErrors:
    """Writes the errors of one worker that nobody of ours raised into the process's log."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker, self._logged = worker, set[str]()

    def log(self, error: BaseException) -> None:
        """With the traceback the first time; a step that is tried again would give the same one."""
        text = f"{type(error).__name__}: {text_of(error)}"
        _log.error(
            "worker %s: unexpected error: %s", self._worker, text, exc_info=None if text in self._logged else error
        )
        self._logged.add(text)
