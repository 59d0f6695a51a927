"""A time limit for whole requests: a timeout bounds only each wait, so a dripping answer would never end.

    with Deadline(30):
        client.list_objects_v2(...)     # ends within 30 s of its first connection, or raises TimeoutError

One thread per process watches all deadlines. It shuts down the socket of a request that is over its time, which ends
every wait for it. `watch_over` makes a client's connections report their sockets.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any

from botocore.awsrequest import AWSHTTPConnection, AWSHTTPConnectionPool, AWSHTTPSConnection, AWSHTTPSConnectionPool

_mine = threading.local()  # `deadline`: that of this thread's requests


class Deadline:
    """Time limit for its thread's requests, from the first connection on. No effect within another deadline.

    An answer or failure after the limit counts as TimeoutError: the end of a connection also ends a header.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._outermost = False
        self._socket: socket.socket | None = None
        self.ends_at: float | None = None
        self.is_over = False

    def __enter__(self) -> None:
        self._outermost = getattr(_mine, "deadline", None) is None
        if self._outermost:
            _mine.deadline = self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._outermost:
            return
        _mine.deadline = None
        _watchdog.forget(self)
        if self.is_over and (error is None or isinstance(error, Exception)):
            raise TimeoutError(f"the answer was not complete after {self._seconds:g} s") from error

    def uses(self, sock: socket.socket) -> None:
        """Register the socket that the request uses from now on. For the watchdog, under its lock."""
        self._socket = sock
        if self.ends_at is None:
            self.ends_at = time.monotonic() + self._seconds
        if self.is_over:
            self.end()

    def end(self) -> None:
        """End the connection for everything that waits for the socket. For the watchdog, under its lock."""
        self.is_over = True
        sock = getattr(self._socket, "socket", self._socket)  # of urllib3's TLS within TLS
        with suppress(OSError):  # already closed
            assert isinstance(sock, socket.socket), sock
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own, which changes what other threads read from


class _Watchdog:
    """The thread, started when it is first needed."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._watched: set[Deadline] = set()
        self._wakes_at = float("inf")
        self._runs = False

    def watch(self, deadline: Deadline, sock: socket.socket) -> None:
        with self._changed:
            deadline.uses(sock)
            if deadline.is_over or deadline in self._watched:
                return
            self._watched.add(deadline)
            if not self._runs:
                threading.Thread(target=self._run, name="raysharded-s3-deadlines", daemon=True).start()
                self._runs = True
            if _end_of(deadline) < self._wakes_at:
                self._changed.notify()

    def forget(self, deadline: Deadline) -> None:
        with self._changed:
            self._watched.discard(deadline)

    def _run(self) -> None:
        with self._changed:
            while True:
                for deadline in [each for each in self._watched if _end_of(each) <= time.monotonic()]:
                    self._watched.discard(deadline)
                    deadline.end()
                self._wakes_at = min(map(_end_of, self._watched), default=float("inf"))
                wait_s = self._wakes_at - time.monotonic()
                self._changed.wait(max(0.0, wait_s) if self._watched else None)


def _end_of(deadline: Deadline) -> float:
    return float("inf") if deadline.ends_at is None else deadline.ends_at


_watchdog = _Watchdog()


def watch_over(client: Any) -> None:
    """Apply deadlines to the boto3 client's requests from now on. (botocore has no types, nor a public way to this.)"""
    client._endpoint.http_session._pool_classes_by_scheme.update(http=_Pool, https=_TlsPool)


class _Watched:
    """A connection that reports the socket of its thread's request.

    The socket is a new one (the proxy answers CONNECT there), the one within TLS, or that of an earlier request.
    """

    sock: socket.socket | None

    def _new_conn(self) -> socket.socket:
        sock: socket.socket = super()._new_conn()  # type: ignore[misc]  # of botocore's class beside this one
        watch(sock)
        return sock

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        watch(self.sock)

    def request(self, *args: Any, **named: Any) -> None:
        watch(self.sock)
        super().request(*args, **named)  # type: ignore[misc]


def watch(sock: socket.socket | None) -> None:
    """Have this thread's deadline, if there is one, end the use of the socket."""
    deadline: Deadline | None = getattr(_mine, "deadline", None)
    if deadline is not None and sock is not None:
        _watchdog.watch(deadline, sock)


class _Connection(_Watched, AWSHTTPConnection):  # type: ignore[misc]  # botocore has no types, here and below
    pass


class _TlsConnection(_Watched, AWSHTTPSConnection):  # type: ignore[misc]
    pass


class _Pool(AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Connection


class _TlsPool(AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TlsConnection


def _start_anew() -> None:
    """Renew the watchdog in a forked process: it has no threads of its parent, one of which may hold a lock."""
    global _watchdog
    _watchdog = _Watchdog()
    _mine.deadline = None


os.register_at_fork(after_in_child=_start_anew)
