"""The rendezvous store, in a thread of the driver's process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Awaitable, Callable

from raysharded.rendezvous import wire
from raysharded.rendezvous.values import Limits, Values
from raysharded.rendezvous.wire import DONE, LATE, Nonsense

EVERY_S = 10.0
"""Shortest time between two lines."""


class Refusals:
    """Counts closed connections and names them in the log. One thread at a time."""

    def __init__(self, log: logging.Logger, where: str) -> None:
        """`where`: whose connections they were, for the line."""
        self.count = 0
        self._log, self._where, self._told, self._told_at = log, where, 0, -EVERY_S
        self._newest = ""

    def add(self, peer: str, why: str) -> None:
        """Count a closed connection of `peer`, and log it, unless a line was written a moment ago."""
        self.count += 1
        self._newest = f"{peer}: {why}"
        if time.monotonic() - self._told_at >= EVERY_S:
            self.tell()

    def tell(self) -> None:
        """Write the line, if connections were closed since the last one."""
        if self.count > self._told:
            number, self._told, self._told_at = self.count - self._told, self.count, time.monotonic()
            word = "connection" if number == 1 else "connections"
            self._log.warning(
                "%s: closed %d %s that it does not admit, the last from %s", self._where, number, word, self._newest
            )


_log = logging.getLogger(__name__)
_BACKLOG = 1024
_JOIN_S = 5.0


_PIECE_BYTES = 256 << 10
"""Bytes of a reply that a connection gets at once: the rest is not copied for each client that reads slowly."""
Answer = Callable[[Values, list[bytes], asyncio.StreamReader], Awaitable[bytes]]
"""The reply to a request of a client that has proven its secret, as `wire.pack` makes it; `Values` are those of its
prefix. Raises Nonsense."""


class RendezvousServer:
    """Listens on one address, at a free port, for as long as the object lives, and admits those who prove a secret."""

    def __init__(
        self,
        host: str,
        secret_of: Callable[[str], bytes],
        *,
        answer: Answer,
        name: str,
        limits: Limits | None = None,
    ) -> None:
        """`host`: this machine's address for the others; of a machine without it (NAT), all addresses listen.

        `secret_of`: the secret of a prefix, whenever a client names one; `name`: what it is, for the log.
        """
        self._server = _Server(_listen(host, name), limits or Limits(), secret_of, answer, name)
        self.port = self._server.port
        thread = threading.Thread(target=self._server.run, daemon=True, name=name)
        thread.start()
        self._finalize = weakref.finalize(self, _stop, self._server, thread)

    @property
    def refused(self) -> int:
        """Connections that were closed, as they could not prove the secret or sent nonsense."""
        return self._server.refusals.count

    @property
    def held(self) -> int:
        """Prefixes of which values are held."""
        return len(self._server.held)

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._finalize()


class RendezvousStore:
    """A store that listens on one address, at a free port, for as long as the object lives."""

    def __init__(self, host: str, limits: Limits | None = None) -> None:
        """`host`: this machine's address for the members; of a machine without it (NAT), all addresses listen."""
        self._root = secrets.token_bytes(32)
        self._server = RendezvousServer(
            host, _SecretOf(self._root), answer=_reply, name="rendezvous store", limits=limits
        )
        self.host, self.port = host, self._server.port

    def secret(self, prefix: str) -> bytes:
        """The secret of the members that meet at this prefix. Give it to them alone."""
        return wire.secret_of(self._root, prefix)

    @property
    def refused(self) -> int:
        """Connections that were closed, as they could not prove the secret or sent nonsense."""
        return self._server.refused

    @property
    def generations(self) -> int:
        """Generations of which values are held."""
        return self._server.held

    def close(self) -> None:
        """Close all connections. Idempotent."""
        self._server.close()


class _SecretOf:
    """Computes the secret of a prefix; its repr shows none."""

    def __init__(self, root: bytes) -> None:
        self._root = root

    def __call__(self, prefix: str) -> bytes:
        return wire.secret_of(self._root, prefix)


class _Server:
    """All of it runs in one thread, but for `stop`."""

    def __init__(
        self, listening: socket.socket, limits: Limits, secret_of: Callable[[str], bytes], answer: Answer, name: str
    ) -> None:
        self._listening, self._limits, self._secret_of, self._answer = listening, limits, secret_of, answer
        host, self.port = listening.getsockname()[:2]
        self.held: dict[str, Values] = {}
        self.refusals = Refusals(_log, f"the {name} at {host}:{self.port}")
        self._unproven: dict[asyncio.StreamWriter, None] = {}
        """Connections that have not proven a secret yet, oldest first."""
        self._proven: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()

    def run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # it has stopped
            self._loop.call_soon_threadsafe(self._over.set)

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._welcome, sock=self._listening, backlog=_BACKLOG)
        telling = asyncio.ensure_future(self._tell())
        await self._over.wait()
        telling.cancel()
        server.close()
        for writer in [*self._unproven, *self._proven]:
            writer.transport.abort()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*tasks, return_exceptions=True)
        self.refusals.tell()

    async def _tell(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self.refusals.tell()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = _name_of(writer)
        _watch(writer.get_extra_info("socket"), self._limits.vanished_s)
        self._unproven[writer] = None
        if len(self._unproven) > self._limits.strangers:
            next(iter(self._unproven)).transport.abort()
        try:
            async with asyncio.timeout(self._limits.proof_s):
                prefix = await self._proven_prefix(reader, writer)
        except (OSError, EOFError, TimeoutError, Nonsense) as error:
            self.refusals.add(peer, _reason(error))
            writer.transport.abort()
            return
        finally:
            self._unproven.pop(writer, None)
        self._proven.add(writer)
        try:
            await self._answer_all(prefix, reader, writer)
        except Nonsense as error:
            self.refusals.add(f"a member of {prefix} at {peer}", str(error))
        except (OSError, EOFError):
            pass  # it has left
        finally:
            self._proven.discard(writer)
            writer.transport.abort()

    async def _proven_prefix(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> str:
        """The prefix of which the client proved the secret. Raises Nonsense if it did not."""
        magic, size = wire.HELLO.unpack(await reader.readexactly(wire.HELLO.size))
        if magic != wire.MAGIC or size > wire.MAX_PREFIX_BYTES:
            raise Nonsense(f"{magic[:12]!r} in place of a greeting")
        name = await reader.readexactly(size)
        theirs, ours = await reader.readexactly(wire.NONCE_BYTES), secrets.token_bytes(wire.NONCE_BYTES)
        try:
            prefix = name.decode()
        except UnicodeDecodeError:
            raise Nonsense("a prefix that is no text") from None
        secret, nonces = self._secret_of(prefix), theirs + ours
        writer.write(ours + wire.proof(secret, b"store", nonces))
        if not wire.is_proof(await reader.readexactly(wire.PROOF_BYTES), secret, b"client", nonces):
            raise Nonsense("a wrong proof of the secret")
        writer.write(wire.WELCOME)
        return prefix

    async def _answer_all(self, prefix: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        values = self.held.setdefault(prefix, Values(self._limits))
        values.members += 1
        try:
            while True:
                size = wire.length_of(await reader.readexactly(wire.LENGTH.size))
                request = wire.unpack(await reader.readexactly(size))
                await _send(writer, await self._answer(values, request, reader))
        finally:
            values.members -= 1
            if not values.members:
                del self.held[prefix]  # a prefix is never used again


async def _send(writer: asyncio.StreamWriter, message: bytes) -> None:
    whole = memoryview(message)
    for begin in range(0, len(whole), _PIECE_BYTES):
        writer.write(whole[begin : begin + _PIECE_BYTES])
        await writer.drain()


async def _reply(values: Values, request: list[bytes], reader: asyncio.StreamReader) -> bytes:
    match request:
        case [b"set", *pairs] if pairs and len(pairs) % 2 == 0:
            for key, value in zip(pairs[::2], pairs[1::2], strict=True):
                values.set(key, value)
            return wire.pack([DONE])
        case [b"add", key, amount]:
            return wire.pack([DONE, values.add(key, amount)])
        case [b"check", *keys]:
            return wire.pack([DONE, b"1" if values.have(keys) else b"0"])
        case [b"delete", key]:
            return wire.pack([DONE, b"1" if values.delete(key) else b"0"])
        case [b"get" | b"wait" as what, timeout_ms, *keys] if _is_time(timeout_ms):
            return await _when_set(values, keys, timeout_ms, reader, answers=what == b"get")
        case [b"exchange", timeout_ms, key, value, *keys] if _is_time(timeout_ms):
            values.set(key, value)
            return await _when_set(values, keys, timeout_ms, reader, answers=True)
        case [what, *_]:
            raise Nonsense(f"the request {what[:20]!r}, of {len(request)} items")
    raise AssertionError(request)


def _is_time(timeout_ms: bytes) -> bool:
    return timeout_ms.isdigit() and len(timeout_ms) < 12


async def _when_set(
    values: Values, keys: list[bytes], timeout_ms: bytes, reader: asyncio.StreamReader, *, answers: bool
) -> bytes:
    """The reply once each key is set, or that it is late; `answers`: with the values."""
    if not values.have(keys) and not await _are_set(values, keys, int(timeout_ms) / 1000, reader):
        return wire.pack([LATE, *(key for key in keys if not values.have([key]))][:9])
    return values.packed(keys) if answers else wire.pack([DONE])


async def _are_set(values: Values, keys: list[bytes], within_s: float, reader: asyncio.StreamReader) -> bool:
    """True once each key is set; False if time passes first. Raises if the client leaves, or does not wait."""
    waiting, leaving = values.until_there(keys), asyncio.ensure_future(reader.readexactly(1))
    try:
        done, _ = await asyncio.wait((waiting, leaving), timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
    if leaving in done:
        leaving.result()
        raise Nonsense("a request before the reply to the one before")
    return waiting in done


def _listen(host: str, name: str) -> socket.socket:
    try:
        return _bound(host)
    except OSError as error:
        if error.errno != errno.EADDRNOTAVAIL:
            raise
        _log.warning("no interface of this machine has the address %s: the %s listens on all", host, name)
        return _bound("")


def _bound(host: str) -> socket.socket:
    family = socket.getaddrinfo(host or "0.0.0.0", 0, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, 0), family=family, backlog=_BACKLOG)


def _watch(connection: socket.socket, vanished_s: float) -> None:
    """End the connection after so long a silence of its peer's machine: one that loses its power closes none."""
    pause_s = max(1, round(vanished_s / 5))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, pause_s)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * vanished_s))  # unsent replies


def _stop(server: _Server, thread: threading.Thread) -> None:
    server.stop()
    if thread is not threading.current_thread():
        thread.join(_JOIN_S)


def _name_of(writer: asyncio.StreamWriter) -> str:
    peer = writer.get_extra_info("peername")
    return f"{peer[0]}:{peer[1]}" if peer else "an unknown address"


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no proof of the secret in time"
    if isinstance(error, Nonsense):
        return str(error)
    return "closed before it proved the secret"
