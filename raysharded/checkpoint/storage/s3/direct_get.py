"""GETs of HTTP/1.1 over connections that a boto3 client has opened, without the calls of urllib3 and `http.client`.

The client opens connections, with TLS and its timeouts, and checks certificates. Here a request's text is sent, and an
answer of a known length received. After anything else the connection is closed, and the client sends the request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from raysharded.checkpoint.storage.s3.deadline import watch

_MOST_HEAD_BYTES = 16 << 10
_END = b"\r\n\r\n"


class Body:
    """The body of an answer. On leaving, the connection is kept if all was received, and closed otherwise."""

    def __init__(self, pool: Any, connection: Any, first: memoryview, rest: int, *, keeps: bool) -> None:
        """`first`: what came with the head. `rest`: bytes that are still to come. `keeps`: the server does."""
        self._pool, self._connection, self._first, self._rest = pool, connection, first, rest
        self._keeps = keeps

    def readinto1(self, out: memoryview) -> int:
        """Number of bytes received into the beginning of `out`; 0 at the end. Raises ConnectionError, TimeoutError."""
        if self._first:
            count = min(len(self._first), len(out))
            out[:count], self._first = self._first[:count], self._first[count:]
            return count
        try:
            count = self._connection.sock.recv_into(out[: self._rest]) if self._rest else 0
        except OSError as error:
            raise _lost(error) from error
        self._rest -= count
        return count

    def read(self, size: int) -> bytes:
        """Up to `size` bytes."""
        out = memoryview(bytearray(size))
        return bytes(out[: self.readinto1(out)])

    def stream(self) -> Iterator[bytes]:
        """All that can be received."""
        return iter(lambda: self.read(_MOST_HEAD_BYTES), b"")

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            if self._rest or self._first or not self._keeps:
                connection.close()
            self._pool._put_conn(connection)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer, before its body."""

    status: int
    headers: Mapping[str, str]
    """By their names in lower case."""
    body: Any
    """A `Body`, or the like of urllib3's."""


class DirectGet:
    """Requests that differ in the last header. Any thread may send them."""

    def __init__(self, session: Any, url: str, headers: Mapping[str, str | bytes]) -> None:
        """`session`: botocore's, of the client. `headers`: those before the last one, with `Host`."""
        self._pool = session._get_connection_manager(url).connection_from_url(url)  # no public way, as in `deadline`
        lines = [f"GET {session._get_request_target(url, None)} HTTP/1.1".encode("latin-1")]
        for name, value in {"Accept-Encoding": "identity", **headers}.items():
            lines.append(name.encode() + b": " + (value if isinstance(value, bytes) else value.encode("latin-1")))
        self._head = b"\r\n".join(lines) + b"\r\n"

    def send(self, last: str) -> Reply | None:
        """The answer; None if no connection is open, or the answer is not of a known length.

        `last`: the last header. Raises ConnectionError, TimeoutError.
        """
        if self._pool.pool is None:
            return None  # closed, as other addresses were used
        connection = self._pool._get_conn()
        reply = None
        try:
            if connection.sock is not None:
                reply = self._exchange(connection, last)
        except OSError as error:
            raise _lost(error) from error
        finally:
            if reply is None:
                connection.close()
                self._pool._put_conn(connection)
        return reply

    def _exchange(self, connection: Any, last: str) -> Reply | None:
        sock = connection.sock
        watch(sock)
        sock.settimeout(self._pool.timeout.read_timeout)
        sock.sendall(self._head + last.encode() + _END)
        buffer, count = bytearray(_MOST_HEAD_BYTES), 0
        view = memoryview(buffer)
        while (end := buffer.find(_END, 0, count)) < 0:
            received = sock.recv_into(view[count:])
            if not received:
                raise ConnectionError("the connection ended before the head of an answer was complete")
            count += received
        line, *lines = buffer[:end].decode("latin-1").split("\r\n")
        fields = (one.partition(":") for one in lines)
        headers = {name.lower(): value.strip() for name, _, value in fields}
        version, status, *_ = (*line.split(" ", 2), "")
        size, more = headers.get("content-length", ""), view[end + len(_END) : count]
        coded = "transfer-encoding" in headers or "content-encoding" in headers
        if version != "HTTP/1.1" or not (status.isdecimal() and size.isdecimal()) or coded:
            return None
        length = int(size)
        first = more[:length]
        keeps = len(first) == len(more) and headers.get("connection", "").lower() != "close"
        return Reply(int(status), headers, Body(self._pool, connection, first, length - len(first), keeps=keeps))


def _lost(error: OSError) -> OSError:
    """The error as one that passes: TLS has others."""
    return error if isinstance(error, (ConnectionError, TimeoutError)) else ConnectionError(str(error))
