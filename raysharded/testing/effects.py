"""What faults do to the process that meets them. Called by the thread that computes."""

from __future__ import annotations

import ctypes
import math
import os
import signal
import time

from raysharded.testing import network

_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "term": signal.SIGTERM}
_LOOK_UP_S = 0.05


class InjectedFault(Exception):
    """What a fault of kind "raise" raises: no error of raysharded's, but one that the user's code might raise."""


def strike(kind: str, seconds: float | None, message: str) -> None:
    """Let a fault of this kind happen, here and now, as `Fault` describes it. Does not return from a kill; raises
    `InjectedFault` with the message for "raise"."""
    match kind:
        case "kill" | "stop" | "term":
            os.kill(os.getpid(), _SIGNALS[kind])
        case "slow" if seconds is not None:
            time.sleep(seconds)
        case "wedge" if seconds is not None:
            hold_the_interpreter(seconds)
        case "stuck":
            wait_in_python(math.inf if seconds is None else seconds)
        case "drop":
            network.cut_off()
        case "raise":
            raise InjectedFault(message)


def hold_the_interpreter(seconds: float) -> None:
    """Return after so long; no other thread of this process runs Python meanwhile, as in an extension that hangs."""
    library = ctypes.PyDLL(None)  # unlike CDLL it keeps the interpreter's lock during the call
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        library.usleep(max(1, int(left * 1e6)))  # a signal ends it early


def wait_in_python(seconds: float) -> None:
    """Return after so long; other threads run, and answer, meanwhile: as in a read that never ends."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        time.sleep(_LOOK_UP_S)
