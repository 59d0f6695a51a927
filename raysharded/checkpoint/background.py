"""Work beside training: it takes what the training threads leave of the machine's cores."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

NICENESS = 10
"""A tenth of what an ordinary thread gets where both want the same core; all of it where nobody else does."""


def step_back() -> None:
    """Let other threads go before the calling one, and before those that it starts from now on. Linux; else nothing."""
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
