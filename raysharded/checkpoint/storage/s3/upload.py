"""Object writes: one PutObject, or concurrent parts of a multipart upload in bounded memory.

The caller's bytes are copied once, into at most `PARTS_IN_FLIGHT` buffers per write, which are reused. Parts have 8
MiB; every 1,000 parts their size doubles. Thus the 10,000 parts that S3 allows hold 8 TiB, although the size is not
known beforehand. A write holds at most 32 MiB, or 0.8% of what it has written where that is more.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from queue import SimpleQueue
from typing import Any

from botocore.exceptions import ClientError

from raysharded.checkpoint.storage import BytesLike
from raysharded.checkpoint.storage.s3.bucket import CHECKSUM, Bucket
from raysharded.checkpoint.storage.s3.errors import code_of

PART_BYTES = 8 << 20
PARTS_IN_FLIGHT = 4

_TOKEN = "raysharded-write"  # metadata of the object: the write that made it


def part_bytes(index: int) -> int:
    """Bytes of part `index` (from 0 on)."""
    return PART_BYTES << (index // 1000)


def write_object(bucket: Bucket, key: str, parts: Iterable[BytesLike]) -> None:
    """Store the concatenation of `parts` under the object's key `key`: whole, or, after an error, not at all.

    Errors of `parts` itself pass through. A killed process leaves an upload, which is listed as unfinished.
    """
    free: SimpleQueue[bytearray] = SimpleQueue()
    for _ in range(PARTS_IN_FLIGHT):
        free.put(bytearray())
    pieces = cut(parts, free)
    first = next(pieces)
    second = next(pieces, None)
    if second is None:
        bucket.retrying(lambda: bucket.send("put_object", first, Key=key))
        return
    _Multipart(bucket=bucket, key=key, free=free).run(chain((first, second), pieces))


def cut(parts: Iterable[BytesLike], free: SimpleQueue[bytearray]) -> Iterator[bytearray]:
    """`parts` in pieces of `part_bytes`, the last one shorter (and empty if there is nothing), in buffers from `free`.

    The consumer puts used pieces back. A piece is yielded once it is known whether it is the last.
    """
    index, used = 0, 0
    buffer = _taken(free, index)
    for part in parts:
        rest = memoryview(part).cast("B")
        while len(rest):
            if used == len(buffer):
                yield buffer
                index, used = index + 1, 0
                buffer = _taken(free, index)
            count = min(len(rest), len(buffer) - used)
            memoryview(buffer)[used : used + count] = rest[:count]
            used, rest = used + count, rest[count:]
    del buffer[used:]
    yield buffer


def _taken(free: SimpleQueue[bytearray], index: int) -> bytearray:
    buffer = free.get()
    return buffer if len(buffer) == part_bytes(index) else bytearray(part_bytes(index))


@dataclass(kw_only=True, slots=True)
class _Multipart:
    """One multipart upload, run once."""

    bucket: Bucket
    key: str
    free: SimpleQueue[bytearray]
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    failed: threading.Event = field(default_factory=threading.Event)

    def run(self, pieces: Iterable[bytearray]) -> None:
        upload_id = self._create()
        sent: list[Future[dict[str, Any]]] = []
        try:
            for number, piece in enumerate(pieces, start=1):
                if self.failed.is_set():
                    break
                sent.append(self.bucket.connection.pool.submit(self._send, upload_id, number, piece))
            self._complete(upload_id, [part.result() for part in sent])
        except BaseException:
            self.failed.set()  # the others need not retry
            wait(sent)
            with suppress(Exception):  # best effort: a remaining upload is listed as unfinished
                self.bucket.request_once("abort_multipart_upload", Key=self.key, UploadId=upload_id)
            raise

    def _create(self) -> str:
        def once() -> dict[str, Any]:
            optional = {"ChecksumAlgorithm": CHECKSUM}
            return self.bucket.request_with_optional(
                "create_multipart_upload", optional, Key=self.key, Metadata={_TOKEN: self.token}
            )

        return str(self.bucket.retrying(once)["UploadId"])

    def _send(self, upload_id: str, number: int, piece: bytearray) -> dict[str, Any]:
        """Information about the part for completing the upload."""

        def once() -> dict[str, Any]:
            return self.bucket.send("upload_part", piece, Key=self.key, UploadId=upload_id, PartNumber=number)

        try:
            answer = self.bucket.retrying(once, stop=self.failed)
        except BaseException:
            self.failed.set()
            raise
        finally:
            self.free.put(piece)
        known = {name: value for name, value in answer.items() if name in ("ETag", "ChecksumCRC32")}
        return {"PartNumber": number, **known}

    def _complete(self, upload_id: str, parts: list[dict[str, Any]]) -> None:
        """Complete the upload, never conditionally: servers that do not know the condition ignore it silently."""
        asked = False

        def once() -> None:
            nonlocal asked
            again, asked = asked, True
            try:
                self.bucket.request_once(
                    "complete_multipart_upload", Key=self.key, UploadId=upload_id, MultipartUpload={"Parts": parts}
                )
            except ClientError as error:
                if not (again and code_of(error) == "NoSuchUpload" and self._is_there()):
                    raise

        self.bucket.retrying(once)

    def _is_there(self) -> bool:
        """Whether the object is what this write made: then the reply to its completion was lost."""
        answer = self.bucket.request_once("head_object", Key=self.key)
        return bool(answer.get("Metadata", {}).get(_TOKEN) == self.token)
