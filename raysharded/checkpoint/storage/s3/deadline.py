"""A limit for whole requests: a timeout bounds only each wait, so that an answer that drips would never end.

    with Deadline(30):
        client.list_objects_v2(...)     # ends within 30 s of its first connection, or raises TimeoutError

One thread per process watches over all of them and shuts down the socket of a request that is over its time, which
ends whatever waits for it. `watch_over` makes a client's connections tell which sockets they use.
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

_mine = threading.local()  # `deadline`: the one that this thread's requests are within


class Deadline:
    """Bounds what its thread requests within it, from the first connection on. Within another one it has no effect.

    What came, or failed, beyond it counts as TimeoutError: the end of a connection is the end of a header, too.
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
        """From now on the request goes through this socket. The watchdog's, under its lock."""
        self._socket = sock
        if self.ends_at is None:
            self.ends_at = time.monotonic() + self._seconds
        if self.is_over:
            self.end()

    def end(self) -> None:
        """Whatever waits for the socket finds that the connection has ended. The watchdog's, under its lock."""
        self.is_over = True
        sock = getattr(self._socket, "socket", self._socket)  # of urllib3's TLS within TLS
        with suppress(OSError):  # closed already
            assert isinstance(sock, socket.socket), sock
            socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own, which would change what others read from


class _Watchdog:
    """The thread, started when it is needed first."""

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
    """Deadlines hold for the boto3 client's requests from now on. (botocore has no types, nor a public way to this.)"""
    client._endpoint.http_session._pool_classes_by_scheme.update(http=_Pool, https=_TlsPool)


class _Watched:
    """A connection that tells which socket its thread's request uses: a new one (the proxy's answer to CONNECT comes
    there), that within TLS, or one of an earlier request."""

    sock: socket.socket | None

    def _new_conn(self) -> socket.socket:
        sock: socket.socket = super()._new_conn()  # type: ignore[misc]  # of botocore's class beside this one
        _watch(sock)
        return sock

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        _watch(self.sock)

    def request(self, *args: Any, **named: Any) -> None:
        _watch(self.sock)
        super().request(*args, **named)  # type: ignore[misc]


def _watch(sock: socket.socket | None) -> None:
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
    """A forked process has none of its parent's threads, and must not wait for a lock that one of them held."""
    global _watchdog
    _watchdog = _Watchdog()
    _mine.deadline = None


os.register_at_fork(after_in_child=_start_anew)
