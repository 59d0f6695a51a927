"""Immediate detection of a lost node by a connection to its raylet, long before the cluster reports it.

A node that the cluster still lists is retried. If its raylet accepts a connection, it is no longer dead: it was cut
off. A node that the cluster has lost never comes back: Ray gives the machine another id.

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

from raysharded.protocol.worker_launcher import NodeBack, NodeLost

_log = logging.getLogger("raysharded.driver")
_TABLE_PERIOD_S = 5.0
"""Interval between two reads of the cluster's own list of nodes."""
_CONNECT_TIMEOUT_S = 2.0
_TRY_S = 4.0
"""Longest wait for the connection to a node that counts as dead."""
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

    Any thread may call the methods, which do not wait.
    """

    def __init__(self, table: Callable[[], Mapping[str, NodeInfo]]) -> None:
        """`table` returns the cluster's nodes by id; it is called in the watch's thread, and may raise."""
        self._table = table
        self._lock = threading.Lock()
        self._wanted: dict[str, str] = {}
        """Node id -> host name."""
        self._dead: dict[str, str] = {}
        self._listed: frozenset[str] = frozenset()
        """Nodes that the cluster listed as alive last time."""
        self._news: list[NodeLost | NodeBack] = []
        self._answered: set[str] = set()
        """Nodes that were dead, until one of their processes answered: they are connected to again."""
        self._told, self._tell = socket.socketpair()
        self._closed = False
        self._thread: threading.Thread | None = None
        # used by the thread alone:
        self._selector = selectors.DefaultSelector()
        self._known: dict[str, NodeInfo] = {}
        self._connected: dict[str, tuple[socket.socket, float]] = {}
        """Node id -> (connection, time of connection)."""
        self._trying: dict[str, tuple[socket.socket, float]] = {}
        """Dead node -> (connection that is being made, since when)."""

    def watch(self, node_id: str, host: str = "") -> None:
        """Watch this node from now on: one of its processes has answered. `host`: its name, for people."""
        with self._lock:
            is_back = self._lift(node_id)
            if is_back:
                self._answered.add(node_id)
            elif self._closed or node_id in self._wanted:
                return
            self._wanted[node_id] = host
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="raysharded nodes", daemon=True)
                self._thread.start()
        self._wake()

    def dead(self) -> Mapping[str, str]:
        """Node id -> reason, for watched nodes that are lost now."""
        with self._lock:
            return dict(self._dead)

    def descriptions(self) -> list[str]:
        """The lost nodes that the cluster still lists, which are retried, each with the reason."""
        with self._lock:
            lost = [(node_id, why) for node_id, why in self._dead.items() if node_id in self._listed]
            return [f"{self._wanted[node_id] or '?'} ({node_id[:8]}): {why}" for node_id, why in lost]

    def fetch(self) -> list[NodeLost | NodeBack]:
        """The verdicts since the last call, in order."""
        with self._lock:
            news, self._news = self._news, []
        return news

    def _lift(self, node_id: str) -> bool:
        """Lift the verdict on a node, if there is one. The caller holds the lock."""
        if self._dead.pop(node_id, None) is None:
            return False
        self._news.append(NodeBack(node_id=node_id, host=self._wanted[node_id]))
        return True

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
                elif key.data in self._trying:
                    self._end_try(key.data)
                else:
                    self._hear(key.data)
        self._let_go()

    def _let_go(self) -> None:
        for connection, _ in [*self._connected.values(), *self._trying.values()]:
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
            self._listed = frozenset(node_id for node_id, info in table.items() if info.alive)
            dead = self._dead.keys() & table.keys()
            watched, answered, self._answered = self._wanted.keys() - dead, self._answered, set()
        for node_id in watched & table.keys():
            info, new = table[node_id], node_id not in self._known or node_id in answered
            self._known[node_id] = info
            if not info.alive:
                self._bury(node_id, "the cluster has lost it")
            elif new and node_id not in self._connected:
                problem = self._connect(node_id, info)
                if problem and node_id in answered:  # if none was ever possible, the cluster's list must do
                    self._bury(node_id, problem)
        for node_id in dead:
            self._try(node_id, table[node_id])

    def _try(self, node_id: str, info: NodeInfo) -> None:
        """Begin a connection to a node that counts as dead, without waiting for it."""
        if node_id in self._trying:
            if info.alive and time.monotonic() - self._trying[node_id][1] < _TRY_S:
                return
            self._forget_try(node_id)
        if not info.alive:
            return
        self._known[node_id] = info
        family = socket.AF_INET6 if ":" in info.host else socket.AF_INET
        connection = socket.socket(family, socket.SOCK_STREAM)
        connection.setblocking(False)
        self._trying[node_id] = connection, time.monotonic()
        with contextlib.suppress(OSError):  # it is being made
            connection.connect((info.host, info.port))
        self._selector.register(connection, selectors.EVENT_WRITE, node_id)

    def _forget_try(self, node_id: str) -> None:
        connection, _ = self._trying.pop(node_id)
        self._selector.unregister(connection)
        connection.close()

    def _end_try(self, node_id: str) -> None:
        """Handle the end of an attempt: a node that accepts a connection is back."""
        connection, _ = self._trying[node_id]
        failed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) != 0
        self._forget_try(node_id)
        if failed or self._connect(node_id, self._known[node_id]):
            return
        with self._lock:
            self._lift(node_id)

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
        if node_id in self._trying:  # its verdict was lifted meanwhile
            self._forget_try(node_id)
        try:
            connection = socket.create_connection((info.host, info.port), timeout=_CONNECT_TIMEOUT_S)
        except ConnectionRefusedError:
            return f"its raylet at {info.host}:{info.port} is gone"
        except OSError as error:
            return f"{info.host}:{info.port} does not answer: {error}"
        with contextlib.suppress(OSError):  # it was reset at once, and has no peer: `_hear` finds its end
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
            if node_id not in self._dead:
                self._dead[node_id] = reason
                self._news.append(NodeLost(node_id=node_id, host=self._wanted[node_id], reason=reason))
