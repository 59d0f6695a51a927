"""Work beside training: it takes what the training threads leave of the machine's cores."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

NICENESS = 10
"""On top of the process's own: a tenth of what its ordinary threads get where both want the same core (up to a
niceness of 9: Linux goes no further than 19), all of it where nobody else does."""


def step_back() -> None:
    """Let other threads go before the calling one, and before those that it starts from now on. Linux; else nothing."""
    with suppress(AttributeError, OSError):
        of_process = os.getpriority(os.PRIO_PROCESS, os.getpid())
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), of_process + NICENESS)
