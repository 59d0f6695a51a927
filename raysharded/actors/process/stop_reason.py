"""Meaning of an error that ended a worker's long call: a reason, an error to send, and a log entry."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import torch

from raysharded.actors.device.device_errors import device_error_in, failure_of, failure_text
from raysharded.actors.task_calls.task_errors import is_collective_failure
from raysharded.errors import (
    CheckpointError,
    ClusterError,
    CollectiveAborted,
    ConfigError,
    CorruptNumbers,
    DeviceFailed,
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
_HOST = torch.device("cpu")
_PROBE_S = 1.0
"""Time that the device gets to fail again: it may be busy with a collective whose peers have exited."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """End of a long call."""

    reason: StopReason
    error: RayshardedError
    is_unexpected: bool = False
    """True for an error of a foreign class: the worker's log gets its traceback."""


def ending_of(error: BaseException, *, interrupted: bool, device: torch.device = _HOST) -> Ending:
    """The end for a raised error. `interrupted`: the worker's collectives were aborted, so the task is not to blame.

    `device`: the worker's, which is used once more after an error of it.
    """
    if isinstance(error, DeviceFailed) and error.__cause__ is None:  # from `require_device`, which has tried it
        return Ending(reason=StopReason.DEVICE, error=travelling(error))
    if isinstance(error, DeviceFailed) or device_error_in(error):
        if failed := failure_of(device, _PROBE_S, must_finish=False):
            first = text_of(error) if isinstance(error, DeviceFailed) else device_error_in(error)
            text = failure_text(device, failed, first)
            cause = error.__cause__ if isinstance(error, DeviceFailed) else error
            return Ending(reason=StopReason.DEVICE, error=DeviceFailed(text, user_traceback(cause or error)))
        if isinstance(error, DeviceFailed) and error.__cause__ is not None:  # of one call of the task's
            error = TaskError(text_of(error), user_traceback(error.__cause__))
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


def travelling(error: RayshardedError, words: Callable[[str], str] = str) -> RayshardedError:
    """The error, if its class is raysharded's and it can be pickled. `words`: from its text to the one that is sent.

    Other errors are replaced by the nearest class of raysharded with the same text: a user's subclass, which the driver
    may be unable to create, and errors that cannot be pickled.
    """
    if error.args and isinstance(error.args[0], str):
        error.args = (words(error.args[0]), *error.args[1:])
    ours = (cls for cls in type(error).__mro__ if cls.__module__.startswith("raysharded."))
    kind: type[RayshardedError] = next(ours)
    if type(error) is kind and _can_be_pickled(error):
        return error
    if isinstance(error, TaskError | DeviceFailed):
        return kind(text_of(error), str(getattr(error, "user_traceback", "")))
    return kind(text_of(error))


def _can_be_pickled(error: RayshardedError) -> bool:
    try:
        pickle.dumps(error)
    except Exception:  # noqa: BLE001 - the user may have put anything into it
        return False
    return True


class Ends:
    """The ends of one worker's long calls by an error."""

    def __init__(self, worker: WorkerId) -> None:
        self._worker = worker
        self._logged = set[str]()
        self._kept: list[object] = []
        self._device_failure: DeviceFailed | None = None

    def of(self, error: BaseException, device: torch.device, *, interrupted: bool) -> Ending:
        """As `ending_of`; logs errors that raysharded did not raise."""
        found = ending_of(error, interrupted=interrupted, device=device)
        if found.is_unexpected:
            self._log(error)
        if found.reason is StopReason.DEVICE and isinstance(found.error, DeviceFailed):
            self._device_failure = found.error
            self.keep_if_failed(error)
        return found

    def keep_if_failed(self, *objects: object) -> None:
        """Keep objects for the rest of the process if its device has failed.

        Freeing memory that a copy used records an event, in a destructor. Its error would end the process, and with it
        the state in host memory. An error's traceback holds the objects of its frames.
        """
        if self._device_failure is not None:
            self._kept.extend(objects)

    @property
    def device_failure(self) -> DeviceFailed | None:
        """The error of the device, which no longer works in this process; None if it has not failed."""
        return self._device_failure

    def _log(self, error: BaseException) -> None:
        """Log an error. Only the first gets a traceback: a retried step would raise the same one."""
        text = f"{type(error).__name__}: {text_of(error)}"
        _log.error(
            "worker %s: unexpected error: %s", self._worker, text, exc_info=None if text in self._logged else error
        )
        self._logged.add(text)
