"""A worker's mailbox: the way to it for the run's other workers that needs nothing of the cluster.

Ray finds an actor through its GCS, on the head node, also when a driver is on it. Workers that lost both reach each
other at the addresses that the driver gave them, each with the driver's secret for its workers. A mailbox costs a
worker one thread and one listening port; connections are made only when they are needed.
"""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from raysharded.actors.comm.store_client import introduced, read_exactly
from raysharded.ids import WorkerId
from raysharded.rendezvous import wire
from raysharded.rendezvous.server import Answer, RendezvousServer
from raysharded.rendezvous.values import Values
from raysharded.rendezvous.wire import DONE, Nonsense

_log = logging.getLogger("raysharded.worker")
_PREFIX = "mailbox"
_CALL, _RAISED = b"call", b"raised"
_CONNECT_S = 5.0
METHODS = frozenset({"is_orphan", "last_words", "write_part", "keep", "leave"})
"""Methods of `LeasedWorker` that the others may call."""


class Mailbox:
    """Answers the other workers' calls, in separate threads. It lives as long as the process."""

    def __init__(self, host: str, secret: Callable[[], bytes], worker: object) -> None:
        """`host`: this machine's address for the others; `secret`: of the newest driver's workers."""
        self._server = RendezvousServer(host, lambda _: secret(), answer=_answering(worker), name="mailbox")
        self.address = f"{host}:{self._server.port}"


class MailboxPeers:
    """Implements `raysharded.orphans.orphan_checkpoint.Peers` by mailboxes. Any thread."""

    def __init__(self, secret: Callable[[], bytes]) -> None:
        self._secret = secret
        self._addresses: Mapping[WorkerId, str] = {}

    def meet(self, addresses: Mapping[WorkerId, str]) -> None:
        """Reach these workers from now on, this one included."""
        self._addresses = dict(addresses)

    def before(self, worker: WorkerId) -> list[WorkerId]:
        return sorted(other for other in self._addresses if other < worker)

    def ask(
        self, calls: Mapping[WorkerId, tuple[Any, ...]] | None, method: str, *args: Any, timeout_s: float
    ) -> dict[WorkerId, Any]:
        asked = {worker: at for worker, at in self._addresses.items() if calls is None or worker in calls}
        if not asked:
            return {}

        def one(worker: WorkerId) -> tuple[WorkerId, bool, Any]:
            more = calls[worker] if calls is not None else ()
            try:
                return worker, True, self._call(asked[worker], method, (*args, *more), timeout_s)
            except Exception as error:  # noqa: BLE001 - it refused, or is lost: it does not take part
                _log.info("worker %s at %s: no answer to %s: %r", worker, asked[worker], method, error)
                return worker, False, None

        with ThreadPoolExecutor(min(len(asked), 64), thread_name_prefix="mailbox") as threads:
            return {worker: value for worker, answered, value in threads.map(one, asked) if answered}

    def end_all(self) -> None:
        """Do nothing: those that do not leave on request are ended by Ray, which has lost its head node."""

    def _call(self, address: str, method: str, args: tuple[Any, ...], timeout_s: float) -> Any:
        host, _, port = address.rpartition(":")
        sock = introduced(host, int(port), _PREFIX, self._secret(), min(_CONNECT_S, timeout_s))
        with sock:
            sock.settimeout(timeout_s)
            sock.sendall(wire.pack([_CALL, method.encode(), pickle.dumps(args)]))
            return _value(sock)


def _value(sock: socket.socket) -> Any:
    """The value of the reply, of any length: what sends it has proven the secret."""
    size = int(wire.LENGTH.unpack(read_exactly(sock, wire.LENGTH.size))[0])
    status, value = wire.unpack(read_exactly(sock, size))
    if status != DONE:
        raise RuntimeError(value.decode(errors="replace"))
    return pickle.loads(zlib.decompress(value))  # noqa: S301 - from a worker of the run, which proved it


def _answering(worker: object) -> Answer:
    async def answer(_: Values, request: list[bytes], __: asyncio.StreamReader) -> bytes:
        match request:
            case [what, method, args] if what == _CALL and method.decode(errors="replace") in METHODS:
                return wire.pack(await asyncio.to_thread(_called, worker, method.decode(), args))
        raise Nonsense(f"the call {request[:2]!r}"[:100])

    return answer


def _called(worker: object, method: str, args: bytes) -> list[bytes]:
    try:
        value = getattr(worker, method)(*pickle.loads(args))  # noqa: S301 - from a worker of the run, which proved it
        return [DONE, zlib.compress(pickle.dumps(value), 1)]
    except Exception as error:  # noqa: BLE001 - the boundary: the caller gets it
        return [_RAISED, f"{type(error).__name__}: {error}".encode()]
