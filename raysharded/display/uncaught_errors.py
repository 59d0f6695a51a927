"""Display of the errors that end a script: the message and the user's own lines, without raysharded's.

Standard library only; `raysharded.errors` has the classes and puts this to use.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from functools import partial
from types import FrameType, TracebackType
from typing import TypeAlias

from raysharded.display.plain_text import indented, masked, printable

Hook: TypeAlias = Callable[[type[BaseException], BaseException, TracebackType | None], object]

_RAY = "ray._private.worker"


def install(ours: type[Exception]) -> None:
    """Show uncaught errors of the class `ours`, and Ctrl-C with a message, plainly from now on; others as always.

    No effect where something else shows errors already (a notebook, a debugger), and under `python -X dev`, which shows
    everything. Ray's own hook notes errors in the cluster before it has them shown, and still gets the others. Errors
    of raysharded are shown before it: if the cluster is lost it waits for a minute, and Ray then ends the process. Ray
    sets its hook when it is imported: call this function again then.
    """
    others = sys.excepthook
    is_known = others is sys.__excepthook__ or getattr(others, "__module__", "") == _RAY
    if is_known and not sys.flags.dev_mode:
        sys.excepthook = partial(_show, ours, others)


def _show(
    ours: type[Exception], others: Hook, kind: type[BaseException], error: BaseException, frames: TracebackType | None
) -> None:
    """An `excepthook`; `others` shows errors from outside raysharded."""
    if isinstance(error, KeyboardInterrupt) and error.args:
        print(indented(masked(str(error))), file=sys.stderr)
    elif isinstance(error, ours):
        print(printable(describe(error, frames)), file=sys.stderr)
    else:
        others(kind, error, frames)


def describe(error: Exception, frames: TracebackType | None = None) -> str:
    """The task's traceback if there is one, the script's own lines, and the message, each once."""
    lines, message = [], str(error)
    if of_task := getattr(error, "user_traceback", ""):
        lines.append(of_task.rstrip())
        message = _without_repetition(message, lines[0])
    for (frame, _), line in zip(traceback.walk_tb(frames), traceback.extract_tb(frames), strict=True):
        if not _is_ours(frame) and "/ray/" not in line.filename:
            lines.append(f"{line.filename}:{line.lineno}: {line.line}")
    lines.append(f"{type(error).__name__}: {message}")
    return "\n".join(lines)


def _is_ours(frame: FrameType) -> bool:
    """True also for the functions of ours that `dataclasses` compiles, which are in no file."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == "raysharded"


def _without_repetition(message: str, shown: str) -> str:
    """The message without the end of the traceback: the task's own error, which may be long."""
    lines = shown.splitlines()
    for start in range(len(lines)):
        cause = "\n".join(lines[start:])
        name, colon, text = cause.partition(":")
        if colon and text and cause in message:
            return message.replace(cause, f"{name} (above)", 1)
    return message
