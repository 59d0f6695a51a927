"""A loopback HTTP proxy in front of an S3 server; it inflicts the faults of networks and servers on chosen requests.

    with FaultyProxy(server.endpoint_url) as proxy:
        lost = proxy.inject(LoseReply(), on="CompleteMultipartUpload")
        ...                                     # uses proxy.endpoint_url
        assert lost.fired == 1

Requests and answers are held whole. All other requests pass unchanged, in any number of connections.
"""

from __future__ import annotations

import http.client
import re
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from email.message import Message
from io import BufferedReader
from typing import Protocol, Self
from urllib.parse import parse_qs, urlsplit

Head = list[tuple[str, str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    method: str
    target: str
    head: Head
    body: bytes

    @property
    def operation(self) -> str:
        """S3's name for the request."""
        query = parse_qs(urlsplit(self.target).query, keep_blank_values=True)
        in_bucket = urlsplit(self.target).path.strip("/").count("/") == 0
        if "uploads" in query:
            return "ListMultipartUploads" if self.method == "GET" else "CreateMultipartUpload"
        if "uploadId" in query:
            named = {"PUT": "UploadPart", "POST": "CompleteMultipartUpload", "DELETE": "AbortMultipartUpload"}
            return named.get(self.method, self.method)
        if in_bucket:
            return "DeleteObjects" if "delete" in query else "ListObjectsV2" if self.method == "GET" else self.method
        return {"PUT": "PutObject", "GET": "GetObject", "HEAD": "HeadObject", "DELETE": "DeleteObject"}[self.method]

    def header(self, name: str) -> str | None:
        return next((value for found, value in self.head if found.lower() == name.lower()), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Reply:
    status: int
    head: Head
    body: bytes

    def encoded_head(self, length: int | None = None) -> bytes:
        """The head, with `length` instead of the true Content-Length, if given."""
        head = dict(self.head) | ({} if length is None else {"Content-Length": str(length)})
        lines = [f"HTTP/1.1 {self.status} {http.client.responses.get(self.status, 'Other')}"]
        return ("\r\n".join([*lines, *(f"{name}: {value}" for name, value in head.items())]) + "\r\n\r\n").encode()


@dataclass(slots=True)
class Exchange:
    """One request, and the possible reactions to it."""

    request: Request
    server_url: str
    client: socket.socket
    closing: threading.Event
    """Set when the proxy is closed: until then a stall lasts."""

    def forward(self) -> Reply:
        """Let the server answer it."""
        return forward(self.request, self.server_url)

    def send(self, reply: Reply) -> None:
        self.client.sendall(reply.encoded_head() + (b"" if self.request.method == "HEAD" else reply.body))

    def reset(self) -> None:
        """Ends the connection with RST instead of FIN."""
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raise _Hangup


class _Hangup(Exception):
    """The client's connection ends here."""


class Fault(Protocol):
    def __call__(self, exchange: Exchange) -> None: ...


@dataclass(frozen=True, slots=True)
class Refuse:
    """An error instead of the operation."""

    status: int
    code: str

    def __call__(self, exchange: Exchange) -> None:
        exchange.send(error_reply(self.status, self.code))


@dataclass(frozen=True, slots=True)
class LoseReply:
    """It is done, but the client does not learn of it: the connection is reset, or an error is sent."""

    instead: tuple[int, str] | None = None

    def __call__(self, exchange: Exchange) -> None:
        done = exchange.forward()
        assert done.status < 300, done
        if self.instead is None:
            exchange.reset()
        else:
            exchange.send(error_reply(*self.instead))


@dataclass(frozen=True, slots=True)
class Reset:
    """The connection is reset, and nothing done."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.reset()


@dataclass(frozen=True, slots=True)
class CutBody:
    """Half of the answer's body, then the end of the connection, or a reset of it, or nothing more."""

    then: str = "close"
    kept: float = 0.5

    def __call__(self, exchange: Exchange) -> None:
        reply = exchange.forward()
        assert reply.body, "there is no body to cut"
        exchange.client.sendall(reply.encoded_head() + reply.body[: int(len(reply.body) * self.kept)])
        if self.then == "stall":
            exchange.closing.wait()
        elif self.then == "reset":
            exchange.reset()
        raise _Hangup


@dataclass(frozen=True, slots=True)
class Trickle:
    """The answer's body comes a byte at a time, `pause_s` apart, for ever in effect."""

    pause_s: float

    def __call__(self, exchange: Exchange) -> None:
        reply = exchange.forward()
        exchange.client.sendall(reply.encoded_head())
        for at in range(len(reply.body)):
            exchange.client.sendall(reply.body[at : at + 1])
            if exchange.closing.wait(self.pause_s):
                break
        raise _Hangup


@dataclass(frozen=True, slots=True)
class WrongLength:
    """Content-Length is off by so much; the connection is closed after the body."""

    by: int

    def __call__(self, exchange: Exchange) -> None:
        reply = exchange.forward()
        exchange.client.sendall(reply.encoded_head(len(reply.body) + self.by) + reply.body)
        raise _Hangup


@dataclass(frozen=True, slots=True)
class FlipByte:
    """One byte of the answer's body is another."""

    at: int = 0

    def __call__(self, exchange: Exchange) -> None:
        reply = exchange.forward()
        body = bytearray(reply.body)
        body[self.at] ^= 0x01
        exchange.send(Reply(status=reply.status, head=reply.head, body=bytes(body)))


@dataclass(frozen=True, slots=True)
class FlipUploadedByte:
    """One byte of the request's body is another when it reaches the server."""

    at: int = 0

    def __call__(self, exchange: Exchange) -> None:
        body = bytearray(exchange.request.body)
        body[self.at] ^= 0x01
        exchange.send(forward(replace(exchange.request, body=bytes(body)), exchange.server_url))


@dataclass(frozen=True, slots=True)
class Stall:
    """No answer, ever; and nothing done."""

    def __call__(self, exchange: Exchange) -> None:
        exchange.closing.wait()
        raise _Hangup


@dataclass(frozen=True, slots=True)
class Page:
    """A page of a console, a proxy or a portal; and nothing done."""

    status: int = 200
    body: bytes = b"<html><body><h1>It works!</h1></body></html>"
    head: Head = field(default_factory=lambda: [("Content-Type", "text/html; charset=utf-8")])

    def __call__(self, exchange: Exchange) -> None:
        length = [] if self.status == 204 else [("Content-Length", str(len(self.body)))]
        exchange.send(Reply(status=self.status, head=[*self.head, *length], body=self.body))


@dataclass(frozen=True, slots=True)
class Change:
    """The answer, changed by a function."""

    how: Callable[[Request, Reply], Reply]

    def __call__(self, exchange: Exchange) -> None:
        exchange.send(self.how(exchange.request, exchange.forward()))


@dataclass(slots=True)
class Injected:
    """A fault in place. `fired` counts the requests that met it."""

    fault: Fault
    when: Callable[[Request], bool]
    left: int
    fired: int = 0


@dataclass(slots=True)
class FaultyProxy:
    """Serves from entering to leaving its context; on leaving, all its connections end."""

    upstream: str
    requests: list[Request] = field(default_factory=list)
    """All requests so far, without their bodies."""
    num_connections: int = 0
    """Number of connections so far."""
    _faults: list[Injected] = field(default_factory=list)
    _listener: socket.socket = field(default_factory=socket.socket)
    _connections: set[socket.socket] = field(default_factory=set)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Self:
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen(128)
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for connection in self._connections:
                _shut(connection)

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def inject(
        self,
        fault: Fault,
        *,
        on: str | None = None,
        when: Callable[[Request], bool] = bool,
        times: int = 1,
    ) -> Injected:
        """The next `times` requests that are the operation `on` (None: any), and for which `when` holds, meet it."""
        injected = Injected(fault, lambda r: (on is None or r.operation == on) and when(r), times)
        with self._lock:
            self._faults.append(injected)
        return injected

    def count(self, operation: str) -> int:
        """Number of such requests so far."""
        with self._lock:
            return sum(request.operation == operation for request in self.requests)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                self._connections.add(client)
                self.num_connections += 1
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client.makefile("rb") as stream:
                while request := read_request(stream, client):
                    self._exchange(request, client)
        except (_Hangup, OSError, http.client.HTTPException):
            pass  # its client sees it too
        finally:
            with self._lock:
                self._connections.discard(client)
            client.close()

    def _exchange(self, request: Request, client: socket.socket) -> None:
        exchange = Exchange(request, self.upstream, client, self._closing)
        fault = self._met(request)
        if fault is None:
            exchange.send(exchange.forward())
        else:
            fault(exchange)

    def _met(self, request: Request) -> Fault | None:
        with self._lock:
            self.requests.append(replace(request, body=b""))
            for injected in self._faults:
                if injected.left and injected.when(request):
                    injected.left -= 1
                    injected.fired += 1
                    return injected.fault
        return None


def read_request(stream: BufferedReader, client: socket.socket) -> Request | None:
    """The next request of a connection; None at its end."""
    line = stream.readline()
    match = re.fullmatch(rb"(\S+) (\S+) HTTP/1\.1\r\n", line)
    if match is None:
        return None
    headers: Message = http.client.parse_headers(stream)
    if headers.get("Expect", "").lower() == "100-continue":
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = stream.read(int(headers.get("Content-Length", "0")))
    head = [(name, str(value)) for name, value in headers.items() if name.lower() != "expect"]
    return Request(method=match[1].decode(), target=match[2].decode(), head=head, body=body)


def forward(request: Request, server_url: str) -> Reply:
    """The server's reply, whole."""
    with closing(http.client.HTTPConnection(urlsplit(server_url).netloc)) as server:
        server.putrequest(request.method, request.target, skip_host=True, skip_accept_encoding=True)
        for name, value in request.head:
            server.putheader(name, value)
        server.endheaders(request.body)
        answer = server.getresponse()
        body = answer.read()
        head = [(name, value) for name, value in answer.getheaders() if name.lower() not in _OF_ONE_HOP]
        length = answer.getheader("Content-Length") if request.method == "HEAD" else str(len(body))
        if answer.status != 204:
            head.append(("Content-Length", length or "0"))
        return Reply(status=answer.status, head=head, body=body)


_OF_ONE_HOP = ("transfer-encoding", "content-length", "connection")


def error_reply(status: int, code: str) -> Reply:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
    return Reply(
        status=status, head=[("Content-Type", "application/xml"), ("Content-Length", str(len(body)))], body=body
    )


def _shut(connection: socket.socket) -> None:
    with suppress(OSError):  # ended already
        connection.shutdown(socket.SHUT_RDWR)
