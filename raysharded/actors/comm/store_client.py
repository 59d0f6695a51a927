"""A worker's connection to the rendezvous store, as a store for torch's process groups."""

from __future__ import annotations

import contextlib
import datetime
import secrets
import socket
import threading
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from raysharded.actors.device.device_waits import waits_for_peers
from raysharded.rendezvous import wire
from raysharded.rendezvous.wire import DONE, LATE, Nonsense

_TRY_S = 10.0
_PAUSE_S = 0.02
_SLACK_S = 10.0
"""Time beyond a request's own in which the store must reply."""


class StoreClient(Store):
    """The keys of one generation. Any thread; requests are made one at a time. torch calls the methods by these names.

    All raise `torch.distributed.DistStoreError`, a RuntimeError: after `close`, if the store is lost, and if `get` or
    `wait` found keys missing when `timeout` had passed. Keep a reference for as long as a group may use the store.
    """

    timeout: datetime.timedelta  # torch's property, which its stubs lack

    def __init__(
        self,
        host: str,
        port: int,
        prefix: str,
        secret: bytes,
        timeout: datetime.timedelta,
        give_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """Connect, within `timeout`; `give_up` is called between two tries."""
        super().__init__()
        self.set_timeout(timeout)
        self._lock = threading.Lock()
        self._socket = _reach(host, port, prefix, secret, timeout.total_seconds(), give_up)

    @property
    def own_address(self) -> str:
        """This machine's address on the way to the store."""
        return str(self._socket.getsockname()[0]).removeprefix("::ffff:")

    def set(self, key: str, value: str | bytes) -> None:
        self._ask([b"set", key.encode(), _as_bytes(value)])

    @waits_for_peers
    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._await(b"get", keys, self.timeout)

    @waits_for_peers
    def exchange(self, key: str, value: str | bytes, keys: list[str]) -> list[bytes]:
        """`set` and `multi_get` in one request: a member leaves its value, and gets everyone's."""
        return self._await(b"exchange", keys, self.timeout, [key.encode(), _as_bytes(value)])

    def add(self, key: str, amount: int) -> int:
        return int(self._ask([b"add", key.encode(), str(amount).encode()])[0])

    def check(self, keys: list[str]) -> bool:
        return self._ask([b"check", *(key.encode() for key in keys)]) == [b"1"]

    def deleteKey(self, key: str) -> bool:  # noqa: N802 - the name that torch's C++ looks for
        return self._ask([b"delete", key.encode()]) == [b"1"]

    def wait(self, keys: list[str], timeout: datetime.timedelta | None = None) -> None:
        self._await(b"wait", keys, timeout or self.timeout)

    def has_extended_api(self) -> bool:
        return False  # no queues, and nothing is appended

    def close(self) -> None:
        """Release every thread that waits for the store, now and later. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        if self._lock.acquire(blocking=False):  # nobody uses the descriptor
            try:
                self._socket.close()
            finally:
                self._lock.release()

    def _await(
        self, what: bytes, keys: Sequence[str], timeout: datetime.timedelta, first: Sequence[bytes] = ()
    ) -> list[bytes]:
        within_s = timeout.total_seconds()
        request = [what, str(round(within_s * 1000)).encode(), *first, *(key.encode() for key in keys)]
        return self._ask(request, within_s)

    def _ask(self, request: list[bytes], within_s: float = 0.0) -> list[bytes]:
        with self._lock:
            try:
                self._socket.settimeout(within_s + _SLACK_S)
                self._socket.sendall(wire.pack(request))
                size = wire.length_of(read_exactly(self._socket, wire.LENGTH.size), wire.MAX_REPLY_BYTES)
                status, *values = wire.unpack(read_exactly(self._socket, size))
            except (OSError, EOFError, Nonsense) as error:
                self._socket.close()  # a late reply would be taken for another request's
                raise dist.DistStoreError(f"the rendezvous store did not answer: {error!r}") from None
        if status == LATE:
            missing = ", ".join(key.decode(errors="replace") for key in values)
            raise dist.DistStoreError(f"not in the rendezvous store within {within_s:g} s: {missing}")
        if status != DONE:
            raise dist.DistStoreError(f"the rendezvous store answered {status[:20]!r}")
        return values


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


@waits_for_peers
def _reach(
    host: str, port: int, prefix: str, secret: bytes, timeout_s: float, give_up: Callable[[], bool]
) -> socket.socket:
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return introduced(host, port, prefix, secret, min(_TRY_S, max(left_s, 0.0)) or _PAUSE_S)
        except (OSError, EOFError) as error:
            if give_up() or time.monotonic() + _PAUSE_S > deadline:
                raise dist.DistStoreError(f"no rendezvous store at {host}:{port}: {error!r}") from None
        time.sleep(_PAUSE_S)


def introduced(host: str, port: int, prefix: str, secret: bytes, within_s: float) -> socket.socket:
    """A connection on which both sides have proven the secret of this prefix, within `within_s`.

    Raises OSError, EOFError, and DistStoreError if what listens there does not know the secret.
    """
    sock = socket.create_connection((host, port), timeout=within_s)
    try:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        ours = secrets.token_bytes(wire.NONCE_BYTES)
        sock.sendall(wire.hello(prefix, ours))
        answer = read_exactly(sock, wire.NONCE_BYTES + wire.PROOF_BYTES)
        nonces = ours + answer[: wire.NONCE_BYTES]
        if not wire.is_proof(answer[wire.NONCE_BYTES :], secret, b"store", nonces):
            raise dist.DistStoreError(f"what listens at {host}:{port} is not the rendezvous store of this generation")
        sock.sendall(wire.proof(secret, b"client", nonces))
        if read_exactly(sock, len(wire.WELCOME)) != wire.WELCOME:
            raise dist.DistStoreError(f"what listens at {host}:{port} is no rendezvous store")
    except BaseException:
        sock.close()
        raise
    return sock


@waits_for_peers
def read_exactly(sock: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = sock.recv(size - len(data))
        if not part:
            raise EOFError("the connection ended")
        data += part
    return bytes(data)
