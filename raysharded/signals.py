"""SIGTERM, the notice that this process is to leave soon."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def on_notice(first: Callable[[], None], grace_s: float) -> Iterator[None]:
    """Within it, the first SIGTERM calls `first` and a second one is like Ctrl-C; nothing changes without a grace
    period, or outside the main thread, where signals cannot be handled."""
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
