"""Checks whether a process of this machine still lives, and how long this one may have stood still."""

from __future__ import annotations

import os
import time
from pathlib import Path

from raysharded.ownership.lease import Process

_PROC = Path("/proc")
_STATE, _STARTED = 0, 19
"""Indices into /proc/<pid>/stat after the command's name (proc(5): fields 3 and 22)."""
_GONE = ("Z", "X", "x")


def this_process() -> Process:
    """Identity of this process; without a machine where /proc does not provide it."""
    try:
        return Process(machine=_machine(), pid=os.getpid(), started=int(_stat(os.getpid())[_STARTED]))
    except (OSError, ValueError, IndexError):
        return Process(pid=os.getpid())


def is_gone(process: Process) -> bool:
    """Whether the process is known to have exited; False for one of another machine."""
    try:
        if not process.machine or process.machine != _machine():
            return False
        fields = _stat(process.pid)
        return fields[_STATE] in _GONE or int(fields[_STARTED]) != process.started
    except (FileNotFoundError, ProcessLookupError):
        return not _answers_signals(process.pid)
    except (OSError, ValueError, IndexError):
        return False


def _answers_signals(pid: int) -> bool:
    """Whether a process has this id: /proc may hide those of other users (hidepid)."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # no id is that large
        return False
    except PermissionError:
        pass
    return True


def _machine() -> str:
    """This boot of this machine, and the process id namespace: containers of one machine differ."""
    boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink(_PROC / 'self/ns/pid')}"


def _stat(pid: int) -> list[str]:
    return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()


class Stopwatch:
    """Seconds since the last `set`: the larger reading of two clocks.

    Only one of them stops while the machine sleeps.
    """

    def __init__(self) -> None:
        self._set = self._now()

    def set(self) -> None:
        """Restart at 0."""
        self._set = self._now()

    def seconds(self) -> float:
        return max(now - then for now, then in zip(self._now(), self._set, strict=True))

    @staticmethod
    def _now() -> tuple[float, float]:
        boot = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
        return time.monotonic(), time.clock_gettime(boot)
