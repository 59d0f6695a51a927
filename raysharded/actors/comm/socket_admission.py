"""Admission of members, and of nobody else, to a gloo group that is being connected.

gloo cannot distinguish a member's connection from another one. So each member writes into the rendezvous store
which addresses and ports it connects from. A filter of each listening socket lets only those through.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable

from raysharded.actors.comm import listeners, sockets
from raysharded.actors.comm.listeners import End
from raysharded.actors.comm.sockets import SocketKey
from raysharded.actors.comm.store_client import StoreClient
from raysharded.actors.device.device_waits import waits_for_peers

_log = logging.getLogger(__name__)
_PERIOD_S = 0.005
_RANKS_A_PERIOD = 16
"""Members beyond which each queries the store less often."""


class Admission:
    """One member's part in connecting one group. A context manager around the connecting."""

    def __init__(
        self, connect: Callable[[], StoreClient], keys: str, rank: int, size: int, before: frozenset[SocketKey]
    ) -> None:
        """`connect`: a further connection to the store. `before`: sockets that cannot belong to the group."""
        self._connect, self._keys, self._rank, self._size, self._before = connect, keys, rank, size, before
        self._listening: socket.socket | None = None
        self._over = threading.Event()

    def __enter__(self) -> None:
        threading.Thread(target=self._run, daemon=True, name=f"admission to {self._keys}").start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def begin(self, listening: socket.socket) -> None:
        """Let nobody in, before anybody knows of the listening socket."""
        listeners.admit(listening, [])
        self._listening = listening

    @waits_for_peers
    def _run(self) -> None:
        try:
            client = self._connect()
        except RuntimeError as error:
            _log.warning("members are not admitted to %s: %s", self._keys, error)
            return
        try:
            self._keep_admitting(client)
        except (RuntimeError, ValueError, OSError) as error:
            if not self._over.is_set():
                _log.warning("members are not admitted to %s any more: %s", self._keys, error)
        finally:
            client.close()

    @waits_for_peers
    def _keep_admitting(self, client: StoreClient) -> None:
        written: list[End] | None = None
        known: list[bytes] = []
        others = [f"{self._keys}/{one}" for one in range(self._size) if one != self._rank]
        while True:
            is_last = self._over.wait(_PERIOD_S * (1 + self._size / _RANKS_A_PERIOD))
            own = own_ends(sockets.open_sockets() - self._before)
            if own != written:
                client.set(f"{self._keys}/{self._rank}", json.dumps(own))
                written = own
            if is_last:  # those that it connects to may not have let it in yet
                return
            texts = client.multi_get(others)
            if texts != known and self._listening is not None:
                listeners.admit(self._listening, [(str(a), int(p)) for text in texts for a, p in json.loads(text)])
                known = texts


def own_ends(keys: frozenset[SocketKey]) -> list[End]:
    """The own ends of TCP connections that this process has begun, also of those that are not established yet."""
    found = sockets.tcp(keys)
    ends = [(str(sock.getsockname()[0]), int(sock.getsockname()[1])) for sock in found if not sockets.listens(sock)]
    listening = {sock.getsockname()[1] for sock in found if sockets.listens(sock)}
    sockets.close_all(found)
    return sorted({(address, port) for address, port in ends if port and port not in listening})
