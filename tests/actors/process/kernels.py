"""A probe of what this machine's kernel reports. Its constants are its own: it does not err with the product."""

from __future__ import annotations

import fcntl
import os
import struct
from functools import cache

_PIDFD_GET_INFO = 0xC040FF0B
"""`_IOWR(0xFF, 11, struct pidfd_info)`, of the 64 bytes that it has had since Linux 6.13 (linux/pidfd.h)."""
_PIDFD_INFO_EXIT = 8
_STATUS = 7


@cache
def kernel_tells_endings() -> bool:
    """Whether a pidfd reports the exit status of a process that has been reaped, tried on a child. Since Linux 6.15."""
    child = os.spawnv(os.P_NOWAIT, "/bin/sh", ["sh", "-c", f"exit {_STATUS}"])
    handle = os.pidfd_open(child)
    try:
        os.waitpid(child, 0)
        info = bytearray(struct.pack("<Q56x", _PIDFD_INFO_EXIT))
        fcntl.ioctl(handle, _PIDFD_GET_INFO, info)
    except OSError:
        return False
    finally:
        os.close(handle)
    told = bool(struct.unpack_from("<Q", info)[0] & _PIDFD_INFO_EXIT)
    return told and os.waitstatus_to_exitcode(struct.unpack_from("<i", info, 60)[0]) == _STATUS
