"""Cuts this process off from the network without telling anybody, and without being root. Linux only.

Its TCP connections stay open, and carry nothing any more: a socket filter drops all that arrives, acknowledgements
included, and a pace of one byte per second holds back what is sent, after one segment per connection at most. Neither
end gets an error. Sockets that the process opens or accepts later are treated in the same way within milliseconds.
There is no way back: the pace outlives its setting. (`tests/faults/` cuts and mends real links between namespaces.)
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading
import time

_SO_ATTACH_FILTER = 26
_SO_MAX_PACING_RATE = 47
_RETURN_0 = struct.pack("HBBI", 0x06, 0, 0, 0)
"""One instruction of the classic packet filter: BPF_RET | BPF_K with 0, let no byte through."""
_LOOK_UP_S = 0.01

_cut = threading.Event()


def is_cut_off() -> bool:
    """Whether this process was cut off. What it talks through besides TCP (pipes) should keep silent then."""
    return _cut.is_set()


def cut_off() -> None:
    """From now on nothing goes in or out by TCP, until the process ends."""
    if not _cut.is_set():
        _cut.set()
        _silence_all()
        threading.Thread(target=_keep_silent, daemon=True, name="cut off").start()


def _keep_silent() -> None:
    while True:
        time.sleep(_LOOK_UP_S)
        _silence_all()


def _silence_all() -> None:
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as sock:
                    if sock.family in (socket.AF_INET, socket.AF_INET6):
                        silence(sock)


def silence(sock: socket.socket) -> None:
    """Let a connected socket carry nothing more in either direction, and a listening one accept nobody."""
    program = ctypes.create_string_buffer(_RETURN_0)
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 1)
