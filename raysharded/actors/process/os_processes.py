"""Processes of this machine by (id, start time): another process may reuse an id."""

from __future__ import annotations

import os
import signal
from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Start of the process in clock ticks since boot; None if it has exited, or is a zombie.

    Id and start identify a process: no other has had both since the machine was booted.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # the name may have spaces
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def kill_process(pid: int, started: int) -> bool:
    """Send SIGKILL to the process with this start, also to a stopped one.

    False if the process has exited, or if another one has its id. Raises PermissionError for another user's process.
    """
    try:
        handle = os.pidfd_open(pid)  # from here on the process cannot be mistaken for another
    except ProcessLookupError:
        return False
    except OSError:  # a kernel without pidfd_open
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
