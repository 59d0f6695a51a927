"""What an error means that ended a worker's long call: a reason, and an error that travels. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from raysharded.actors.compute import is_collective_failure
from raysharded.driver.messages import StopReason
from raysharded.errors import (
    CheckpointError,
    CollectiveAborted,
    ConfigError,
    CorruptNumbers,
    InexactError,
    RayshardedError,
    TaskError,
    user_traceback,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How a long call ended."""

    reason: StopReason
    error: RayshardedError
    is_unexpected: bool = False
    """Nothing of ours: worth a traceback in the worker's log."""


def ending_of(error: Exception, *, interrupted: bool) -> Ending:
    """Of what was raised. `interrupted`: the worker's collectives had been aborted, and then nobody is to blame."""
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
        return Ending(reason=StopReason.ABORTED, error=CollectiveAborted(str(error)))
    task_error = TaskError(f"{type(error).__name__}: {error}", user_traceback(error))
    return Ending(reason=StopReason.TASK_ERROR, error=task_error, is_unexpected=True)
