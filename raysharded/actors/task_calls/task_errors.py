"""The boundary to a task's code: its errors become a TaskError that names the method and the cause.

Errors of a broken process group are recognized, even if the task has wrapped them.
"""

from __future__ import annotations

import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch

from raysharded.actors.device.device_errors import device_error_in
from raysharded.actors.task_calls.explanations import During, explanation, shortened, without_tables
from raysharded.errors import (
    CollectiveAborted,
    DeviceFailed,
    InexactError,
    RayshardedError,
    TaskError,
    causes,
    is_ctrl_c,
    text_of,
    user_traceback,
)

NO_LINE = "the training function"
"""Place of an error for which no line of the user's is known."""


def is_collective_failure(error: BaseException) -> bool:
    """True if an error comes from a broken process group, however the task wrapped it."""
    return any(_is_of_a_collective(cause) for cause in causes(error))


def _is_of_a_collective(error: BaseException) -> bool:
    """True for gloo's plain RuntimeErrors, and for the DistErrors of other backends."""
    if isinstance(error, (CollectiveAborted, torch.distributed.DistError)):
        return True
    return isinstance(error, RuntimeError) and "third_party/gloo" in text_of(error)  # gloo names its source line


@contextmanager
def naming(where: str, during: During | None = None) -> Iterator[None]:
    """A context for a call of the task, which errors name `where`.

    Errors of raysharded and Ctrl-C pass through. Failures of collectives and of the device, and InexactErrors, are
    raised as such, however the task wrapped them. Any other error becomes a TaskError.
    """
    try:
        yield
    except RayshardedError:
        raise
    except BaseException as error:  # also SystemExit: a bug in the task is not the loss of a worker
        if is_ctrl_c(error):
            raise
        if is_collective_failure(error):
            raise CollectiveAborted(text_of(error)) from error
        if failed := device_error_in(error):
            raise DeviceFailed(f"{where}: {failed}") from error
        refused = next((cause for cause in causes(error) if isinstance(cause, InexactError)), None)
        if refused is not None:
            raise refused from None
        raise task_error(where, error, during) from error


def task_error(where: str, error: BaseException, during: During | None = None) -> TaskError:
    """A TaskError for a raised error, with the user's part of its traceback, and an explanation if one is known."""
    text, kind = text_of(error), type(error).__name__
    found = None if during is None else explanation(error, during)
    if found is None:
        message = f"{where} raised {kind}: {without_tables(text)}"
    else:
        message = f"{where}: {found} (torch's own words: {kind}: {shortened(text)})"
    return TaskError(message, user_traceback(error).replace(text, without_tables(text)))


def line_here() -> str:
    """`file.py:12` of the innermost frame of the calling thread that is in no installed package.

    If there is none: of the innermost that is neither raysharded's nor torch's.
    """
    frames = [frame for frame in frames_here() if _is_users(frame)]
    own = next((frame for frame in frames if not is_installed(frame.f_code.co_filename)), None)
    named = own or (frames[0] if frames else None)
    return NO_LINE if named is None else _line(named, named.f_lineno)


def is_installed(file: str) -> bool:
    """True for a file of an installed package, or of Python itself."""
    return file.startswith((_PYTHON, "<frozen ")) or "/site-packages/" in file or "/dist-packages/" in file


_PYTHON = f"{sysconfig.get_path('stdlib')}/"


def frames_here() -> Iterator[FrameType]:
    """The frames of the calling thread, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in ("raysharded", "torch", "contextlib")


def _line(frame: FrameType, line: int) -> str:
    return f"{frame.f_code.co_filename}:{line}"


def is_raised_in_torch(error: BaseException) -> bool:
    """True if the user's code called torch, and the error came from there, as from a hook."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = max((place for place, frame in enumerate(frames) if _is_users(frame)), default=-1)
    return 0 <= last < len(frames) - 1 and str(frames[last + 1].f_globals.get("__name__", "")).startswith("torch.")


def line_of(error: BaseException) -> str:
    """`file.py:12` of the outermost such frame that an error has left: a line of the training function."""
    walked = ((frame, line) for cause in causes(error) for frame, line in traceback.walk_tb(cause.__traceback__))
    return next((_line(frame, line) for frame, line in walked if _is_users(frame)), NO_LINE)
