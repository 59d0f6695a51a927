"""Immediate detection of a lost node by a connection to its raylet, long before the cluster reports it.

Ray's own health checks take 15 s and more to find a dead node. A call to one of its workers waits a second for the
cluster's answer. The kernel closes a dead process's connections at once; a lost machine answers no keepalive.
"""

from __future__ import annotations

import contextlib
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

_log = logging.getLogger("raysharded.driver")
_TABLE_PERIOD_S = 5.0
"""Interval between two reads of the cluster's own list of nodes."""
_CONNECT_TIMEOUT_S = 2.0
_RECONNECT_PAUSE_S = 0.2
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 2), (socket.TCP_KEEPCNT, 4))
"""A machine that has answered nothing for 10 s counts as lost, if it does not accept a connection either."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeInfo:
    """A node as the cluster lists it."""

    host: str
    port: int
    """Port of its raylet."""
    alive: bool


class NodeWatch:
    """Watches nodes in a background thread.

    Any thread may call `watch`, `check`, `dead` and `close`, which do not wait.
    """

    def __init__(self, table: Callable[[], Mapping[str, NodeInfo]]) -> None:
        """`table` returns the cluster's nodes by id; it is called in the watch's thread, and may raise."""
        self._table = table
        self._lock = threading.Lock()
        self._wanted: set[str] = set()
        self._dead: dict[str, str] = {}
        self._told, self._tell = socket.socketpair()
        self._closed = False
        self._thread: threading.Thread | None = None
        # used by the thread alone:
        self._selector = selectors.DefaultSelector()
        self._known: dict[str, NodeInfo] = {}
        self._connected: dict[str, tuple[socket.socket, float]] = {}
        """Node id -> (connection, time of connection)."""

    def watch(self, node_id: str) -> None:
        """Watch this node from now on."""
        with self._lock:
            if self._closed or node_id in self._wanted:
                return
            self._wanted.add(node_id)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="raysharded nodes", daemon=True)
                self._thread.start()
        self._wake()

    def dead(self) -> Mapping[str, str]:
        """Node id -> reason, for watched nodes that are lost; entries stay."""
        with self._lock:
            return dict(self._dead)

    def check(self) -> None:
        """Query the cluster now: a worker is lost, and perhaps its whole node."""
        self._wake()

    def close(self) -> None:
        """Stop watching."""
        with self._lock:
            never_ran, self._closed = self._thread is None and not self._closed, True
        self._wake()
        if never_ran:
            self._let_go()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            self._tell.send(b".")

    # -- the thread --

    def _run(self) -> None:
        self._selector.register(self._told, selectors.EVENT_READ)
        next_look = 0.0
        while not self._closed:
            if time.monotonic() >= next_look:
                self._look()
                next_look = time.monotonic() + _TABLE_PERIOD_S
            for key, _ in self._selector.select(max(0.0, next_look - time.monotonic())):
                if key.data is None:
                    self._told.recv(4096)
                    next_look = 0.0
                else:
                    self._hear(key.data)
        self._let_go()

    def _let_go(self) -> None:
        for connection, _ in self._connected.values():
            connection.close()
        self._selector.close()
        self._told.close()
        self._tell.close()

    def _look(self) -> None:
        """Read the cluster's list of nodes, and connect to each new one."""
        try:
            table = self._table()
        except Exception as error:  # noqa: BLE001 - without the cluster's answer the connections still work
            _log.debug("the cluster's nodes cannot be listed: %s", error)
            return
        with self._lock:
            watched = self._wanted - self._dead.keys()
        for node_id in watched & table.keys():
            info, new = table[node_id], node_id not in self._known
            self._known[node_id] = info
            if not info.alive:
                self._bury(node_id, "the cluster has lost it")
            elif new:  # if no connection is possible, the cluster's list must do
                self._connect(node_id, info)

    def _hear(self, node_id: str) -> None:
        """Handle data from a raylet, which is only its greeting, or the end of its connection."""
        connection, since = self._connected[node_id]
        try:
            if connection.recv(65536):
                return
        except OSError:
            pass  # the same as the connection's end
        self._disconnect(node_id)
        if time.monotonic() - since < _RECONNECT_PAUSE_S:
            time.sleep(_RECONNECT_PAUSE_S)  # it ends every connection at once: check no faster
        problem = self._connect(node_id, self._known[node_id])  # a raylet also ends an idle connection
        if problem:
            self._bury(node_id, problem)

    def _connect(self, node_id: str, info: NodeInfo) -> str:
        """Connect; returns an empty text, or the reason why that failed."""
        try:
            connection = socket.create_connection((info.host, info.port), timeout=_CONNECT_TIMEOUT_S)
        except ConnectionRefusedError:
            return f"its raylet at {info.host}:{info.port} is gone"
        except OSError as error:
            return f"{info.host}:{info.port} does not answer: {error}"
        if connection.getsockname() == connection.getpeername():  # no server: it reached its own port
            connection.close()
            return f"its raylet at {info.host}:{info.port} is gone"
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connected[node_id] = (connection, time.monotonic())
        self._selector.register(connection, selectors.EVENT_READ, node_id)
        return ""

    def _disconnect(self, node_id: str) -> None:
        if node_id in self._connected:
            connection, _ = self._connected.pop(node_id)
            self._selector.unregister(connection)
            connection.close()

    def _bury(self, node_id: str, reason: str) -> None:
        self._disconnect(node_id)
        with self._lock:
            self._dead.setdefault(node_id, reason)
