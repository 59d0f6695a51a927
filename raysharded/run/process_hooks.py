"""A script's process: its response to SIGTERM and SIGHUP, notices to leave soon; whether it is a submitted Ray job."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_notice(first: Callable[[], None], grace_s: float) -> Iterator[None]:
    """Within this context, the first SIGTERM or SIGHUP calls `first`, and a second SIGTERM acts like Ctrl-C.

    A further SIGHUP has no effect: at the end of a terminal, the kernel and the shell each send one, and systemd sends
    one after its SIGTERM. SIGHUP is left alone where it is ignored, as under `nohup`. Nothing changes without a grace
    period, or outside the main thread, where signals cannot be handled.
    """
    if grace_s <= 0 or threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def handle(number: int, _: object) -> None:
        is_first, is_repeated = not came, number in came
        came.append(number)
        if number == signal.SIGTERM and is_repeated:
            raise KeyboardInterrupt
        if is_first:
            first()

    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    handled = (signal.SIGTERM,) if ignored else (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


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
