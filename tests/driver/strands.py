"""Code that waits in simulated time. Each piece is a thread, of which one runs at a time: a strand."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Unwound(BaseException):
    """Thrown through code that waits in simulated time, when its driver or worker is no more."""


class Strand:
    """Runs from one `wait` to the next, each time that `resume` is called, and only until that returns."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action
        self._go_on, self._paused = threading.Lock(), threading.Lock()  # each is released by the other thread
        self._go_on.acquire()
        self._paused.acquire()
        self._unwinding = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.until: Callable[[], bool] = lambda: True
        """The condition that it waits for."""
        self.over = False

    def _run(self) -> None:
        self._go_on.acquire()
        try:
            if not self._unwinding:
                self._action()
        except Unwound:
            pass
        except BaseException as error:  # noqa: BLE001 - handed over to the thread that resumes it
            self._error = error
        self.over = True
        self._paused.release()

    def resume(self) -> None:
        """Run it until it waits again or is over; raises its error. Never called in a strand."""
        if self._thread.ident is None:
            self._thread.start()
        self._go_on.release()
        self._paused.acquire()
        if self._error is not None:
            raise self._error

    def wait(self, until: Callable[[], bool]) -> None:
        """In its own thread: let the others run. Raises Unwound at the end of all."""
        if self._unwinding:
            raise Unwound
        self.until = until
        self._paused.release()
        self._go_on.acquire()
        if self._unwinding:
            raise Unwound

    def unwind(self) -> None:
        """End it where it waits."""
        self._unwinding = True
        if not self.over:
            self.resume()
        if self._thread.ident is not None:
            self._thread.join()
