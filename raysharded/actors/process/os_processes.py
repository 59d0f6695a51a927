"""Processes of this machine by (id, start time): a process id alone may have passed to another process."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if it is gone (or only its parent still knows of it).

    A process id and this number together name a process: no other has had both since the machine was booted.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # its name may have spaces
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def kill_process(pid: int, started: int) -> bool:
    """SIGKILL to the process that started then, also to a stopped one. False if it is gone, or the id is another's.

    Raises PermissionError for a process that is not ours.
    """
    try:
        handle = os.pidfd_open(pid)  # from here on the process cannot be mistaken for another
    except ProcessLookupError:
        return False
    except OSError:  # a kernel without it
        return _kill_by_id(pid, started)
    try:
        if start_ticks(pid) != started:
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def _kill_by_id(pid: int, started: int) -> bool:
    if start_ticks(pid) != started:
        return False
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return False
    return True
