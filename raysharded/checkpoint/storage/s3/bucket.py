"""Requests to one bucket, retried by the policy of `retry` and counted for the storage's URL."""

from __future__ import annotations

import base64
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from raysharded.checkpoint.storage.retry import with_retries
from raysharded.checkpoint.storage.s3.connection import Connection, connect
from raysharded.checkpoint.storage.s3.deadline import Deadline
from raysharded.checkpoint.storage.s3.errors import code_of, is_refusal, may_pass, status_of
from raysharded.checkpoint.storage.s3.location import Location, parse
from raysharded.checkpoint.storage.s3.ranged_reads import RangedReads

T = TypeVar("T")
Answer = dict[str, Any]  # what boto3 returns, per operation

CHECKSUM = "CRC32"  # the fastest in both S3 and Python (zlib): the others need a package, or three times the CPU
COMPLETION_S = 600.0
"""Time limit for completing an upload: S3 itself sends white space until it has put the parts together."""
_MOST_RENEWALS = 2  # for one request: keys may be exchanged again meanwhile
_BYTES_PER_TIMEOUT = 8 << 20  # a larger body has more time


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """A location and its connection. Cheap to make; belongs to this process. Thread-safe."""

    url: str
    location: Location
    connection: Connection

    def request_once(self, operation: str, **params: Any) -> Answer:
        """Answer of boto3's `operation` on this bucket, once. All but an object's bytes came within the limit.

        A request whose credentials are refused is repeated with those that are found anew, as long as they are others.
        """
        name, limit_s = self.location.bucket, self._limit_s(operation, len(params.get("Body", b"")))
        return self._once(lambda reads: getattr(reads.client, operation)(Bucket=name, **params), limit_s)

    def get_range(self, key: str, start: int, size: int) -> Answer:
        """Answer to a ranged GET of a full key, as `request_once` with "get_object", for less CPU."""
        name, wanted = self.location.bucket, f"bytes={start}-{start + size - 1}"
        return self._once(lambda reads: reads.get(name, key, wanted), self._limit_s("get_object", 0))

    def _once(self, send: Callable[[RangedReads], Answer], limit_s: float) -> Answer:
        for _ in range(_MOST_RENEWALS):
            reads = self.connection.reads
            try:
                return _within(limit_s, send, reads)
            except (ClientError, BotoCoreError) as error:
                if not self.connection.renew(reads.client, error):
                    raise
        return _within(limit_s, send, self.connection.reads)

    def fetch(self, key: str) -> bytes:
        """A small object under its full key, once."""
        return self.fetch_tagged(key)[0]

    def fetch_tagged(self, key: str) -> tuple[bytes, str]:
        """A small object under its full key, once, and its ETag."""
        with Deadline(self._limit_s("get_object", 0)):
            answer = self.request_once("get_object", Key=key)
            return bytes(answer["Body"].read()), str(answer.get("ETag", ""))

    def _limit_s(self, operation: str, body_bytes: int) -> float:
        limit_s = self.location.endpoint.timeout_s * (2 + body_bytes / _BYTES_PER_TIMEOUT)
        return max(limit_s, COMPLETION_S) if operation == "complete_multipart_upload" else limit_s

    def retrying(self, once: Callable[[], T], stop: threading.Event | None = None) -> T:
        """Result of `once()`, retried as long as `stop` is not set."""

        def transient(error: BaseException) -> bool:
            return may_pass(error) and not (stop is not None and stop.is_set())

        return with_retries(once, url=self.url, transient=transient)

    def request(self, operation: str, **params: Any) -> Answer:
        return self.retrying(lambda: self.request_once(operation, **params))

    def request_with_optional(self, operation: str, optional: Answer, **params: Any) -> Answer:
        """Answer to a request with parameters that a server may refuse; without them if this server does."""
        if not self.connection.checksums:
            return self.request_once(operation, **params)
        try:
            return self.request_once(operation, **params, **optional)
        except ClientError as error:
            if not is_refusal(error):
                raise
            answer = self.request_once(operation, **params)
            self.connection.checksums = False
            return answer

    def send(self, operation: str, data: bytes | bytearray, **params: Any) -> Answer:
        """Answer to a request with a body and its checksum. Raises ConnectionError if the server received another."""
        checksum = crc32(data)
        answer = self.request_with_optional(operation, {"ChecksumCRC32": checksum}, Body=data, **params)
        if answer.get("ChecksumCRC32", checksum) != checksum:
            raise ConnectionError(f"the server received {answer['ChecksumCRC32']}, not {checksum} ({CHECKSUM})")
        return answer

    def size(self, key: str) -> int:
        """Bytes of an object, with retries.

        The answer to a HEAD has no body, and so does not explain errors of the bucket, the credentials or the clock.
        After a refusal, a listing is requested, whose answer does.
        """
        try:
            return self.retrying(lambda: length_of(self.request_once("head_object", Key=self.location.full(key))))
        except ClientError as error:
            if 400 <= status_of(error) < 500:
                self._ask_why(key, error)
            raise

    def _ask_why(self, key: str, refused: ClientError) -> None:
        try:
            self.request("list_objects_v2", Prefix=self.location.full(key), MaxKeys=1)
        except ClientError as error:
            if code_of(error) != "AccessDenied":  # which may be about the listing alone
                raise error from refused


def _within(limit_s: float, send: Callable[[RangedReads], Answer], reads: RangedReads) -> Answer:
    with Deadline(limit_s):
        return send(reads)


def open_bucket(url: str) -> Bucket:
    location = parse(url)
    return Bucket(url=url, location=location, connection=connect(location.endpoint))


def length_of(answer: Answer) -> int:
    """Bytes of the object, or of its range, that an answer states. Raises ConnectionError if it is cut short."""
    if "ContentLength" not in answer:
        raise ConnectionError("the server's answer does not state the object's length")
    return int(answer["ContentLength"])


def crc32(data: bytes | bytearray | memoryview) -> str:
    """CRC32 as S3 writes it: big-endian, in base64."""
    return base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
