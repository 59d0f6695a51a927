"""Ranged GETs of a boto3 client, without what boto3 computes again for each: a fifth of the CPU of its `get_object`.

The first read of an object is boto3's, which finds the object's address, the headers and how to sign. They are
remembered. Later reads send the same with another range, over the client's connections. The client signs them once in
60 seconds, without the range: of a request's headers, `Host`, `Content-Type` and `x-amz-*` must be signed (AWS
Signature Version 4), and servers accept a signature for 15 minutes. After any answer but an object's bytes, such as a
refusal or a redirection, the request is forgotten, and boto3 sends it: at once, or after a server's error at the next
try.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from botocore.awsrequest import AWSPreparedRequest, AWSRequest
from botocore.exceptions import ClientError
from botocore.parsers import create_parser
from botocore.response import StreamingBody

from raysharded.checkpoint.storage.s3.answers import refuse_foreign
from raysharded.checkpoint.storage.s3.direct_get import Body, DirectGet, Reply

Client = Any  # boto3 makes its clients' methods at run time and has no types for them
Answer = dict[str, Any]

_OPERATION = "GetObject"
_CREATED = f"request-created.s3.{_OPERATION}"
_MOST_REMEMBERED = 4096  # requests, of about 2 kB each
_SIGNED_S = 60.0
_FIELDS = (("ContentLength", "content-length"), ("ContentRange", "content-range"), ("ETag", "etag"))
_FOUND = (200, 206)
_SERVER_ERROR = 500
_TOO_MANY_REQUESTS = 429


@dataclass(frozen=True, kw_only=True, slots=True)
class _Signed:
    """A request that was signed without a range."""

    at: float
    """Time of the signature."""
    url: str
    headers: dict[str, str]
    direct: DirectGet | None
    """None: a proxy takes the request."""


@dataclass(kw_only=True, slots=True)
class _Sent:
    """A request of boto3's, before it was signed, and how it was signed last. Any thread may replace the latter."""

    url: str
    headers: dict[str, str]
    context: dict[str, Any]
    auth_path: str | None
    signed: _Signed | None = None

    def request(self) -> AWSRequest:
        """This request without a range."""
        headers = {name: value for name, value in self.headers.items() if name.lower() != "range"}
        headers["Host"] = urlsplit(self.url).netloc  # it is signed
        request = AWSRequest(method="GET", url=self.url, headers=headers, auth_path=self.auth_path)
        request.context.update(self.context)
        return request


class RangedReads:
    """A boto3 client of S3, and its ranged reads. Thread-safe."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._sent: dict[tuple[str, str], _Sent] = {}
        """Bucket and key of an object -> the request for it, the oldest first."""
        self._lock = threading.Lock()
        self._mine = threading.local()
        """`reads`: bucket and key that boto3 reads for this thread; None or absent otherwise."""
        client.meta.events.register_first(_CREATED, self._remember)

    def get(self, bucket: str, key: str, wanted: str) -> Answer:
        """The answer of `get_object` to a Range header: ContentLength, ContentRange, ETag and Body.

        Raises what `get_object` raises. After a failure of the server the next try is boto3's.
        """
        name = bucket, key
        sent = self._sent.get(name)
        if sent is not None:
            reply = self._send(sent, wanted)
            if reply.status in _FOUND:
                return self._answer(reply)
            with self._lock:
                self._sent.pop(name, None)
            if reply.status >= _SERVER_ERROR or reply.status == _TOO_MANY_REQUESTS:
                raise self._error(reply)
            reply.body.close()
        self._mine.reads = name
        try:
            found: Answer = self.client.get_object(Bucket=bucket, Key=key, Range=wanted)
        finally:
            self._mine.reads = None
        return found

    def _send(self, sent: _Sent, wanted: str) -> Reply:
        """The answer to a request for a range."""
        signed = sent.signed
        if signed is None or time.monotonic() - signed.at > _SIGNED_S:
            signed = sent.signed = self._signed(sent.request())
        reply = None if signed.direct is None else signed.direct.send(f"Range: {wanted}")
        if reply is not None:
            return reply
        request = AWSPreparedRequest("GET", signed.url, {**signed.headers, "Range": wanted}, None, stream_output=True)
        response = self._session.send(request)
        return Reply(response.status_code, response.headers, response.raw)

    def _signed(self, request: AWSRequest) -> _Signed:
        """A request once the client's handlers have signed it."""
        began = time.monotonic()
        self.client.meta.events.emit(_CREATED, request=request, operation_name=_OPERATION)
        prepared = request.prepare()
        url, headers = prepared.url, dict(prepared.headers.items())
        direct = None if self._session._proxy_config.proxy_url_for(url) else DirectGet(self._session, url, headers)
        return _Signed(at=began, url=url, headers=headers, direct=direct)

    @property
    def _session(self) -> Any:
        """The client's connections. There is no public way, as in `deadline`."""
        return self.client._endpoint.http_session

    def _error(self, reply: Reply) -> ClientError:
        """The error for a server's trouble, as boto3 makes it."""
        with reply.body:
            found = self._checked(reply, b"".join(reply.body.stream()))
        parser = create_parser("rest-xml")
        return ClientError(parser.parse(found, None), _OPERATION)

    def _checked(self, reply: Reply, body: object) -> Answer:
        """The answer as botocore's parsers take it. Raises ForeignAnswer."""
        found = {"status_code": reply.status, "headers": reply.headers, "body": body}
        refuse_foreign(self.client.meta.endpoint_url, _OPERATION, found)
        return found

    def _answer(self, reply: Reply) -> Answer:
        self._checked(reply, reply.body)
        answer: Answer = {field: reply.headers[name] for field, name in _FIELDS if name in reply.headers}
        is_direct = isinstance(reply.body, Body)
        return {**answer, "Body": reply.body if is_direct else StreamingBody(reply.body, answer.get("ContentLength"))}

    def _remember(self, request: AWSRequest, **_: object) -> None:
        """Keep the request that boto3 has made, before its other handlers sign it."""
        name = getattr(self._mine, "reads", None)
        if name is None:
            return
        sent = _Sent(
            url=request.url,
            headers=dict(request.headers),
            context=dict(request.context),
            auth_path=request.auth_path,
        )
        with self._lock:
            self._sent[name] = sent
            while len(self._sent) > _MOST_REMEMBERED:
                del self._sent[next(iter(self._sent))]
