"""gloo's listening sockets, and socket filters that decide which packets reach them.

gloo listens for as long as a group lives, although it needs no further connection once the group is connected. It
accepts every connection, holds it, and ends the process when there is no descriptor left to accept with. It has no call
to stop, and closing its socket ends the process. But the kernel can drop what comes: a socket filter (classic BPF,
`SO_ATTACH_FILTER`) needs no privilege. A filter leaves connections alone that were accepted before it.

Linux only: elsewhere a filter cannot be attached, and gloo listens as it does by itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import socket
import struct
from collections.abc import Iterable, Sequence

End = tuple[str, int]
"""Address and port of one end of a connection."""
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_MAX_ENDS = 400
"""A filter has at most as many instructions as fit into 20 KiB (net.core.optmem_max)."""

# Instructions of classic BPF: (code, jump if true, jump if false, operand). Packets begin with their TCP header.
_Instruction = tuple[int, int, int, int]
_LOAD_BYTE, _LOAD_HALF, _LOAD_WORD, _AND, _JUMP_IF_EQUAL, _RETURN = 0x30, 0x28, 0x20, 0x54, 0x15, 0x06
_WHOLE, _NOTHING = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)
_TCP_FLAGS, _SYN, _SYN_ACK, _SOURCE_PORT = 13, 0x02, 0x12, 0
_IPV4_SOURCE = (1 << 32) - 0x100000 + 12  # relative to the network header


def with_port_in(listening: Iterable[socket.socket], announcement: bytes) -> socket.socket | None:
    """The one of these sockets whose port a gloo group announces, as a part of a `sockaddr`; None if there is none."""
    for sock in listening:
        port = struct.pack("!H", sock.getsockname()[1])
        if struct.pack("=H", sock.family) + port in announcement:
            return sock
    return None


def drop_all(listening: socket.socket) -> None:
    """Let no further connection reach a listening socket; those that it has accepted stay as they are."""
    _attach(listening, [_NOTHING])


def admit(listening: socket.socket, ends: Sequence[End]) -> None:
    """Let only connections from these ends be established.

    Others may begin one, so that a member's first packet is not lost: its port is known only once it was sent. gloo
    accepts a connection when its third packet has passed.
    """
    program = [(_LOAD_BYTE, 0, 0, _TCP_FLAGS), (_AND, 0, 0, _SYN_ACK), (_JUMP_IF_EQUAL, 0, 1, _SYN), _WHOLE]
    for address, port in ends[:_MAX_ENDS]:
        if listening.family == socket.AF_INET:
            (source,) = struct.unpack("!I", socket.inet_aton(address))
            program += [(_LOAD_HALF, 0, 0, _SOURCE_PORT), (_JUMP_IF_EQUAL, 0, 3, port)]
            program += [(_LOAD_WORD, 0, 0, _IPV4_SOURCE), (_JUMP_IF_EQUAL, 0, 1, source), _WHOLE]
        else:
            program += [(_LOAD_HALF, 0, 0, _SOURCE_PORT), (_JUMP_IF_EQUAL, 0, 1, port), _WHOLE]
    _attach(listening, [*program, _NOTHING])


def free_of_filter(connected: Iterable[socket.socket]) -> None:
    """Detach the filters that accepted sockets have from their listener."""
    for sock in connected:
        with contextlib.suppress(OSError):  # it has none
            sock.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


def _attach(sock: socket.socket, program: Sequence[_Instruction]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
    with contextlib.suppress(OSError):  # not this system's
        sock.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))
