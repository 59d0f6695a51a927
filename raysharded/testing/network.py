"""Silently cuts this process off from the network, without root. Linux only.

Its TCP connections stay open, but carry no data. A socket filter drops all received data, including acknowledgements. A
pace of one byte per second holds back sent data, after at most one segment per connection. Neither end gets an error.
Sockets that the process opens or accepts later are cut within milliseconds. The cut cannot be undone: the pace outlives
its setting. (`tests/faults/` cuts and restores real links between namespaces.)
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
"""One instruction of the classic packet filter: BPF_RET | BPF_K with 0, which accepts no byte."""
_LOOK_UP_S = 0.01

_cut = threading.Event()


def is_cut_off() -> bool:
    """True if this process was cut off. Its channels besides TCP (pipes) should then also be silent."""
    return _cut.is_set()


def cut_off() -> None:
    """Block all TCP traffic in both directions until the process ends."""
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
    """Block all data on a connected socket in both directions, and all new connections on a listening one."""
    program = ctypes.create_string_buffer(_RETURN_0)
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HL", 1, ctypes.addressof(program)))
    sock.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, 1)
