"""Object reads: ranged GETs straight into the caller's memory, large reads as concurrent ranges.

An answer counts only if it has the requested bytes, as many as it announced, within the endpoint's timeout; otherwise
the range is requested again. The ranges of one read are of one version of the object.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Self

from botocore.exceptions import ClientError

from raysharded.checkpoint.storage.s3.bucket import Bucket, crc32, length_of
from raysharded.checkpoint.storage.s3.direct_get import Body
from raysharded.checkpoint.storage.s3.errors import status_of
from raysharded.errors import StorageError

RANGE_BYTES = 8 << 20
"""Size of the ranges of a large read."""
ONE_REQUEST_BYTES = 16 << 20
"""Largest read in one request."""

_SLICE_BYTES = 256 << 10  # bytes taken off the connection at once, which stay in a core's cache until they are copied

Outs = Sequence[memoryview]


def read(bucket: Bucket, key: str, offset: int, size: int | None) -> bytes:
    """Up to `size` bytes from `offset` on (None: to the end). Beyond 16 MiB it holds them twice for a moment."""
    if offset == 0 and size is None:
        return _read_whole(bucket, key)
    if size is None or size > ONE_REQUEST_BYTES:
        there = max(0, bucket.size(key) - offset)
        size = there if size is None else min(size, there)
    buffer = bytearray(size)
    count = read_into(bucket, key, offset, [memoryview(buffer)])
    return bytes(memoryview(buffer)[:count])


def read_into(bucket: Bucket, key: str, offset: int, outs: Outs) -> int:
    """Number of bytes read from `offset` on into the `outs`, one after the other; fewer than fit only at the end."""
    size = sum(len(out) for out in outs)
    if size == 0:  # no range of HTTP has no bytes
        return 0
    if size <= ONE_REQUEST_BYTES:
        return _read_range(bucket, key, offset, outs).count
    return _read_ranges(bucket, key, offset, outs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Got:
    count: int
    version: str
    """ETag of the object; "" if nothing was there."""


def _read_whole(bucket: Bucket, key: str) -> bytes:
    """The object by one request, its checksum verified if the server has one; or in ranges, if it is large."""
    full = bucket.location.full(key)

    def once() -> bytes | int:
        asked = _answer(lambda: _get_first(bucket, full), 0, ONE_REQUEST_BYTES)
        if asked is None:
            return b""
        with asked as got:
            if got.total > got.length:
                return got.total
            buffer = bytearray(got.length)
            got.receive([memoryview(buffer)], bucket.location.endpoint.timeout_s)
            if got.checksum not in (None, crc32(buffer)):
                raise ConnectionError(f"received bytes with CRC32 {crc32(buffer)}; sent were {got.checksum}")
            return bytes(buffer)

    found = bucket.retrying(once)
    return found if isinstance(found, bytes) else read(bucket, key, 0, found)


def _read_ranges(bucket: Bucket, key: str, offset: int, outs: Outs) -> int:
    failed = threading.Event()

    def one(start: int, some: Outs) -> _Got:
        try:
            return _read_range(bucket, key, start, some, failed)
        except BaseException:
            failed.set()  # the others need not retry
            raise

    ranges: list[Future[_Got]] = []
    for some in in_ranges(outs):
        ranges.append(bucket.connection.pool.submit(one, offset, some))
        offset += sum(len(out) for out in some)
    wait(ranges)  # all of them, also after a failure: they write into the caller's memory
    got = [range_.result() for range_ in ranges]
    if len({each.version for each in got if each.version}) > 1:
        raise StorageError(
            f"read {bucket.url}, key {key}: the object was replaced while it was read. Read it again; files of a "
            "checkpoint are never replaced, so find out who writes there."
        )
    return sum(each.count for each in got)


def in_ranges(outs: Outs) -> Iterator[list[memoryview]]:
    """The `outs`, cut into lists of RANGE_BYTES each; the last one may be shorter."""
    some: list[memoryview] = []
    room = RANGE_BYTES
    for out in outs:
        rest = out
        while len(rest):
            some.append(rest[:room])
            room, rest = room - len(some[-1]), rest[room:]
            if room == 0:
                yield some
                some, room = [], RANGE_BYTES
    if some:
        yield some


def _read_range(bucket: Bucket, key: str, start: int, outs: Outs, stop: threading.Event | None = None) -> _Got:
    size = sum(len(out) for out in outs)
    full = bucket.location.full(key)

    def once() -> _Got:
        asked = _answer(lambda: bucket.get_range(full, start, size), start, size)
        if asked is None:
            return _Got(count=0, version="")
        with asked as got:
            got.receive(outs, bucket.location.endpoint.timeout_s)
            return _Got(count=got.length, version=got.version)

    return bucket.retrying(once, stop)


def _get_first(bucket: Bucket, full: str) -> dict[str, Any]:
    """Answer to a GET of an object's first bytes, and its checksum if it has one."""
    wanted = f"bytes=0-{ONE_REQUEST_BYTES - 1}"
    return bucket.request_with_optional("get_object", {"ChecksumMode": "ENABLED"}, Key=full, Range=wanted)


def _answer(get: Callable[[], dict[str, Any]], start: int, size: int) -> _Answer | None:
    """Answer to a ranged GET, before its body; None if the object ends before `start`."""
    try:
        return _Answer(get(), start, size)
    except ClientError as error:
        if status_of(error) == 416:
            return None
        raise


def _received(stream: Any, out: memoryview) -> int:
    """Number of bytes that were taken off the connection into `out`; 0 at the end."""
    if isinstance(stream, Body):
        return stream.readinto1(out)
    data = stream.read1(len(out))  # of urllib3: its `readinto` would wait until all of `out` is full
    out[: len(data)] = data
    return len(data)


class _Answer:
    """Answer to a ranged GET: the `length` requested bytes, of `total`. Raises ConnectionError for anything else.

    On leaving, the connection is kept if all was received, and closed otherwise.
    """

    def __init__(self, answer: dict[str, Any], start: int, size: int) -> None:
        self._answer = answer
        self.length = length_of(answer)
        self.version = str(answer.get("ETag", ""))
        said = answer.get("ContentRange")
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", said or f"bytes 0-{self.length - 1}/{self.length}")
        first, last, self.total = (int(number) for number in match.groups()) if match else (-1, -1, -1)
        right = (start, min(start + size, self.total) - 1, self.length)
        if (first, last, last + 1 - first) != right:
            answer["Body"].close()
            raise ConnectionError(
                f"requested {size} bytes from {start} on, the server sent {self.length} bytes as the range {said!r}"
            )
        self._complete = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._complete:
            self._answer["Body"].close()

    @property
    def checksum(self) -> str | None:
        """CRC32 of the whole object, if known. That of a multipart upload has a `-`: it is one of checksums."""
        found = self._answer.get("ChecksumCRC32")
        return None if found is None or "-" in found else str(found)

    def receive(self, outs: Outs, timeout_s: float) -> None:
        """Fill the beginning of the `outs` with the `length` bytes of the body."""
        deadline = time.monotonic() + timeout_s
        rest = self.length
        with self._answer["Body"] as stream:
            for out in outs:
                at = 0
                while at < len(out) and rest:
                    count = _received(stream, out[at : at + min(rest, _SLICE_BYTES)])
                    if not count:
                        raise ConnectionError(f"the body ended {rest} bytes early, of {self.length}")
                    at, rest = at + count, rest - count
                    if rest and time.monotonic() > deadline:
                        raise TimeoutError(f"{rest} of {self.length} bytes had not come after {timeout_s:g} s")
        self._complete = True
