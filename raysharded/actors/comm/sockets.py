"""Release of threads that are blocked in gloo, by shutting down only the connected sockets of their group.

`abort()` and `destroy_process_group()` do not release a rank that already waits in gloo. Shutting its sockets down
does, within milliseconds, on both ends. A group's sockets are those that appeared while it was formed and that use
a port one of its members listened on. Shutting down a listening socket itself makes gloo end the process.
Linux only: elsewhere no socket is found, and a blocked rank waits for its time-out.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterable
from dataclasses import dataclass

_FD_FOLDER = "/proc/self/fd"


@dataclass(frozen=True, slots=True)
class SocketKey:
    """A socket of this process, by descriptor and inode: descriptors are reused."""

    fd: int
    inode: str


def open_sockets() -> frozenset[SocketKey]:
    """The sockets that this process has open now."""
    found = set()
    with contextlib.suppress(FileNotFoundError):
        for name in os.listdir(_FD_FOLDER):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{_FD_FOLDER}/{name}")
                if target.startswith("socket:"):
                    found.add(SocketKey(int(name), target))
    return frozenset(found)


def listening_ports(keys: Iterable[SocketKey]) -> list[int]:
    """The TCP ports that these sockets listen on."""
    found = listening(keys)
    ports = sorted(sock.getsockname()[1] for sock in found)
    close_all(found)
    return ports


def listening(keys: Iterable[SocketKey]) -> list[socket.socket]:
    """Duplicates of those TCP sockets that listen; the caller closes them."""
    return _duplicates(keys, lambda sock: _is_tcp(sock) and listens(sock))


def tcp(keys: Iterable[SocketKey]) -> list[socket.socket]:
    """Duplicates of the TCP sockets among them; the caller closes them."""
    return _duplicates(keys, _is_tcp)


def connected_to(keys: Iterable[SocketKey], ports: frozenset[int]) -> list[socket.socket]:
    """Duplicates of those sockets that are connected from or to one of `ports`; the caller closes them."""
    return _duplicates(
        keys,
        lambda sock: (
            _is_tcp(sock) and not listens(sock) and (sock.getsockname()[1] in ports or sock.getpeername()[1] in ports)
        ),
    )


def _duplicates(keys: Iterable[SocketKey], wanted: Callable[[socket.socket], bool]) -> list[socket.socket]:
    found = []
    for key in keys:
        with contextlib.suppress(OSError):
            if os.readlink(f"{_FD_FOLDER}/{key.fd}") != key.inode:
                continue  # closed meanwhile; the descriptor was reused
            sock = socket.socket(fileno=os.dup(key.fd))
            with contextlib.suppress(OSError):  # it is not connected any more
                if wanted(sock):
                    found.append(sock)
                    continue
            sock.close()
    return found


def shut_down(sockets: Iterable[socket.socket]) -> None:
    """Shut down both directions; threads blocked on either end get an error at once."""
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)


def close_all(sockets: Iterable[socket.socket]) -> None:
    """Close the duplicates; the originals are not touched."""
    for sock in sockets:
        sock.close()


def _is_tcp(sock: socket.socket) -> bool:
    return sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM


def listens(sock: socket.socket) -> bool:
    """True if the socket accepts connections."""
    return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
