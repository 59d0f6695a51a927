"""A script's process: its response to SIGTERM, the notice to leave soon, and whether it is a submitted Ray job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator


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
