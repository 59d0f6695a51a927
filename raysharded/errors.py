"""Every error that raysharded raises on purpose. Each message states what, where, the values, and the next step.

All of them survive pickling with their message alone, so that a worker's error reads the same in the driver.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator
from typing import ClassVar

from raysharded.display import plain_text, uncaught_errors


def text_of(error: BaseException) -> str:
    """The error's message, or a substitute if its `__str__` raises."""
    try:
        return str(error)
    except Exception as failure:  # noqa: BLE001 - the boundary to the user's classes
        return f"(message unavailable: __str__ raised {type(failure).__name__})"


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error and all its causes and contexts: a task may wrap what its model raises."""
    left, seen = [error], set[int]()
    while left:
        found = left.pop()
        if id(found) not in seen:
            seen.add(id(found))
            yield found
            left += [cause for cause in (found.__context__, found.__cause__) if cause is not None]


def is_ctrl_c(error: BaseException) -> bool:
    """True if a signal raised it. Signals arrive only in the main thread; in other threads user code raised it."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def user_traceback(error: BaseException) -> str:
    """The error's traceback as text, from the first frame outside raysharded; the whole traceback if there is none."""
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_globals.get("__name__", "").startswith("raysharded."):
        frames = frames.tb_next
    return "".join(traceback.format_exception(type(error), error, frames or error.__traceback__, chain=False))


RETRY_HELPS = 75
"""Exit status of an end after which the same command may succeed later: EX_TEMPFAIL of sysexits.h."""


class RayshardedError(Exception):
    """The base class of every error that raysharded raises on purpose. Its texts hold no password of a URL.

    One that ends a script is shown plainly (`uncaught_errors`), no matter which call raised it.
    """

    exit_status: ClassVar[int] = 1
    """Status with which `raysharded run` ends after it: 1, or `RETRY_HELPS` if the same command may succeed later."""

    def __init__(self, *args: object) -> None:
        super().__init__(*(plain_text.masked(one) if isinstance(one, str) else one for one in args))
        uncaught_errors.install(RayshardedError)


class ConfigError(RayshardedError, ValueError):
    """A configuration that cannot work; raised at construction."""


class ClusterError(RayshardedError):
    """The cluster cannot provide the workers or resources that the run needs."""

    exit_status = RETRY_HELPS


class DeviceFailed(ClusterError):
    """A worker's GPU does not work any more in its process, or at all; carries the traceback as text."""

    def __init__(self, message: str, user_traceback: str = "") -> None:
        super().__init__(message, user_traceback)
        self.user_traceback = plain_text.masked(user_traceback)

    def __str__(self) -> str:
        return str(self.args[0])


class TaskError(RayshardedError):
    """The user's task raised or returned something unusable; carries the user's traceback as text."""

    def __init__(self, message: str, user_traceback: str = "") -> None:
        super().__init__(message, user_traceback)
        self.user_traceback = plain_text.masked(user_traceback)

    def __str__(self) -> str:
        return str(self.args[0])


class NonFiniteLoss(TaskError):
    """A loss or a gradient norm is NaN or infinite."""


class CorruptNumbers(RayshardedError):
    """A worker computed different bits from the same input, or copies of the state differ; names the worker."""


class InexactError(RayshardedError):
    """Something in the task would break bit-for-bit reproducibility in exact mode."""


class DataError(RayshardedError):
    """A data file is missing, truncated or has the wrong schema; the message names it."""


class UnreadableData(DataError):
    """A data file cannot be read now, as its storage refuses or fails; the file may be whole."""

    exit_status = RETRY_HELPS


class StorageError(RayshardedError):
    """Storage rejected or failed an operation; the message names the URL."""

    exit_status = RETRY_HELPS


class CheckpointError(RayshardedError):
    """A checkpoint cannot be used."""


class IncompleteCheckpoint(CheckpointError):
    """Parts of a checkpoint are missing."""


class NoCheckpoint(IncompleteCheckpoint):
    """There is no complete checkpoint at a place, and no damaged one either: a first start finds none."""


class CorruptCheckpoint(CheckpointError):
    """Bytes of a checkpoint do not match their digest."""


class RefusedCheckpoint(CorruptCheckpoint):
    """A checkpoint, or another file of a run, that may be good is refused.

    It is not what the signing key vouches for, and one of the two is wrong; or its place is not allowed, and can be
    (docs/storage.md).
    """


class StaleGeneration(RayshardedError):
    """A message or a write of an older generation was rejected (fencing)."""


class CollectiveAborted(RayshardedError):
    """A collective of this generation was aborted or lost a peer; the worker itself is healthy."""


class RunFailed(RayshardedError):
    """The run failed; the message has the first cause. Started again, it resumes, and may succeed."""

    exit_status = RETRY_HELPS


class StepFailed(RunFailed):
    """The run cannot get past a step, in which its own code ends the workers' processes: started again, it cannot."""

    exit_status = 1


class RunOwnedElsewhere(RayshardedError):
    """Another driver owns the run."""

    exit_status = RETRY_HELPS
