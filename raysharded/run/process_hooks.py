"""A script's process: its response to uncaught errors and SIGTERM, and whether it is a submitted Ray job.

If an error of raysharded ends a script, its message and the user's own lines are shown, without raysharded's. SIGTERM
is the notice that the process is to leave soon.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from types import TracebackType

from raysharded.errors import RayshardedError, TaskError
from raysharded.locations import PACKAGE_FOLDER
from raysharded.plain_text import indented, masked, printable

_RAY = "ray._private.worker"


def install() -> None:
    """Show uncaught errors of raysharded, and Ctrl-C with a message, plainly from now on; others as always.

    No effect where something else shows errors already (a notebook, a debugger). Ray's own hook notes errors in the
    cluster before it has them shown, and still gets the others. Errors of raysharded are shown before it: if the
    cluster is lost it waits for a minute, and Ray then ends the process. Ray sets its hook when it is imported: call
    this function again then.
    """
    others = sys.excepthook
    if others is sys.__excepthook__ or getattr(others, "__module__", "") == _RAY:
        sys.excepthook = partial(show, others)


def show(
    others: Callable[[type[BaseException], BaseException, TracebackType | None], object],
    kind: type[BaseException],
    error: BaseException,
    frames: TracebackType | None,
) -> None:
    """An `excepthook`; `others` shows errors from outside raysharded."""
    if isinstance(error, KeyboardInterrupt) and error.args:
        print(indented(masked(str(error))), file=sys.stderr)
    elif isinstance(error, RayshardedError):
        print(printable(describe(error, frames)), file=sys.stderr)
    else:
        others(kind, error, frames)


def describe(error: RayshardedError, frames: TracebackType | None = None) -> str:
    """The task's traceback if there is one, the script's own lines, and the message, each once."""
    lines, message = [], str(error)
    if isinstance(error, TaskError) and error.user_traceback:
        lines.append(error.user_traceback.rstrip())
        message = _without_repetition(message, lines[0])
    own = [frame for frame in traceback.extract_tb(frames) if not frame.filename.startswith(PACKAGE_FOLDER)]
    lines.extend(f"{frame.filename}:{frame.lineno}: {frame.line}" for frame in own if "/ray/" not in frame.filename)
    lines.append(f"{type(error).__name__}: {message}")
    return "\n".join(lines)


def _without_repetition(message: str, shown: str) -> str:
    """The message without the end of the traceback: the task's own error, which may be long."""
    lines = shown.splitlines()
    for start in range(len(lines)):
        cause = "\n".join(lines[start:])
        name, colon, text = cause.partition(":")
        if colon and text and cause in message:
            return message.replace(cause, f"{name} (above)", 1)
    return message


@contextlib.contextmanager
def on_notice(first: Callable[[], None], grace_s: float) -> Iterator[None]:
    """Within this context, the first SIGTERM calls `first`, and a second one acts like Ctrl-C.

    Nothing changes without a grace period, or outside the main thread, where signals cannot be handled.
    """
    if grace_s <= 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    noticed = False

    def handle(*_: object) -> None:
        nonlocal noticed
        if noticed:
            raise KeyboardInterrupt
        noticed = True
        first()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


_CONFIG = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable in which Ray describes a job to its entry point."""


def in_submitted_job() -> bool:
    """Whether `ray job submit` started this process, or an ancestor of it."""
    return bool(submission_id())


def submission_id() -> str:
    """Id of the submitted job; empty if this process is in none."""
    try:
        return str(json.loads(os.environ.get(_CONFIG, "{}")).get("metadata", {}).get("job_submission_id", ""))
    except (ValueError, AttributeError):
        return ""
