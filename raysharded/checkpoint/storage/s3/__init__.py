"""Storage in a bucket of S3 or of a compatible server, over boto3.

`location` reads the URL, `connection` makes the client, `bucket` sends requests, `errors` finds transient failures.
`credentials` looks keys up again, `answers` rejects what no S3 server sent, and `rights` names those that are missing.
`upload`, `download`, with `ranged_reads`, `listing` and `conditional` implement the storage's methods. See
docs/storage.md.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from urllib.parse import urlsplit

import urllib3.exceptions
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from raysharded.checkpoint.format.paths import is_below
from raysharded.checkpoint.storage import BytesLike, Keys, Traits, Unfinished, check_key, storage_error
from raysharded.checkpoint.storage.optional_operations import is_called
from raysharded.checkpoint.storage.retry import retries_of
from raysharded.checkpoint.storage.s3.bucket import Bucket, open_bucket
from raysharded.checkpoint.storage.s3.conditional import honours_condition, put_if_absent, spelling, swap
from raysharded.checkpoint.storage.s3.download import RANGE_BYTES, read, read_into
from raysharded.checkpoint.storage.s3.errors import code_of, is_missing, is_refusal, remedy_for, said_by
from raysharded.checkpoint.storage.s3.listing import folders, objects, sizes_between, uploads
from raysharded.checkpoint.storage.s3.location import encodes, parse
from raysharded.checkpoint.storage.s3.rights import FOR_TIDYING as FOR_TIDYING, missing_rights, tidying
from raysharded.checkpoint.storage.s3.upload import write_object
from raysharded.errors import StorageError

_MOST_KEYS = 1000  # of DeleteObjects

_FAILURES = (
    ClientError,
    BotoCoreError,
    ResponseParserError,
    urllib3.exceptions.HTTPError,
    http.client.HTTPException,
    OSError,
)


@dataclass(frozen=True, slots=True)
class S3Storage:
    """Storage of keys as objects' keys below the prefix of `url`: `s3://bucket/prefix?option=value&...`.

    Raises StorageError for an invalid URL; nothing is touched before the first operation.
    """

    url: str

    def __post_init__(self) -> None:
        parse(self.url)

    @property
    def traits(self) -> Traits:
        return Traits(span_bytes=RANGE_BYTES, num_readers=8, partitioned=True)

    @property
    def retries(self) -> int:
        return retries_of(self.url)

    def write(self, key: str, parts: Iterable[BytesLike]) -> None:
        with self._at("write", key) as bucket:
            write_object(bucket, bucket.location.full(key), parts)

    def read(self, key: str, offset: int = 0, size: int | None = None) -> bytes:
        if size == 0:
            return b""
        with self._at("read", key) as bucket:
            return read(bucket, key, offset, size)

    def read_into(self, key: str, offset: int, outs: Sequence[memoryview]) -> int:
        with self._at("read", key) as bucket:
            return read_into(bucket, key, offset, outs)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        with self._at("put_if_absent", key) as bucket:
            return put_if_absent(bucket, bucket.location.full(key), data)

    def swaps(self) -> bool:
        """Whether the server honours `If-Match`, tried once per process and URL."""
        with self._at("swap", "") as bucket:
            return spelling(bucket.url) is not None

    def swap(self, key: str, expected: bytes, data: bytes) -> bool:
        """True if the object was replaced, as in `swap`."""
        with self._at("swap", key) as bucket:
            return swap(bucket, bucket.location.full(key), expected, data)

    def delete(self, keys: Iterable[str]) -> None:
        rest = iter(keys)
        while some := list(islice(rest, _MOST_KEYS)):
            for key in some:
                _check_key(self.url, key)
            with self._at("delete", some[0] if len(some) == 1 else "") as bucket:
                _delete(bucket, [bucket.location.full(key) for key in some])

    def size(self, key: str) -> int:
        with self._at("size", key) as bucket:
            return bucket.size(key)

    def list(self, prefix: str = "") -> Keys:
        return [*self.sizes(prefix)]

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Keys as in `list`, each with its bytes."""
        with self._at("list", prefix) as bucket:
            found = {bucket.location.relative(item["Key"]): int(item["Size"]) for item in objects(bucket, prefix)}
            return {key: found[key] for key in sorted(found) if is_below(key)}  # consoles make objects that end in `/`

    def sizes_of(self, keys: Sequence[str]) -> dict[str, int]:
        """As in `sizes_of`: one request for a thousand keys, several at a time."""
        with self._at("list", "") as bucket:
            found = sizes_between(bucket, [bucket.location.full(key) for key in keys])
            known = {bucket.location.relative(key): size for key, size in found.items()}
        return known if len(known) == len(set(keys)) else self.sizes()

    def times(self, name: str | None, prefix: str = "") -> dict[str, float | None]:
        """Write times as in `list_times`."""
        with self._at("list", prefix) as bucket:
            found = {bucket.location.relative(item["Key"]): item["LastModified"] for item in objects(bucket, prefix)}
            return {key: found[key].timestamp() for key in sorted(found) if is_below(key) and is_called(key, name)}

    def puts_atomically(self) -> bool:
        """Whether the server honours the condition of a write; otherwise only this class checks first."""
        return honours_condition(self.url)

    def folders(self) -> Keys:
        """Names of the top-level folders, sorted: one request per thousand, regardless of their contents."""
        with self._at("list", "") as bucket:
            found = (bucket.location.relative(item["Prefix"]).rstrip("/") for item in folders(bucket))
            return sorted(name for name in found if is_below(name))

    def unfinished(self, prefix: str = "") -> Sequence[Unfinished]:
        """As in `Storage`; nothing, with a warning, without the right to list uploads."""
        found: list[Unfinished] = []
        with self._at("list", prefix) as bucket:

            def collect() -> None:
                found.extend(
                    Unfinished(key=bucket.location.relative(item["Key"]), token=item["UploadId"])
                    for item in uploads(bucket, prefix)
                )

            tidying(bucket, collect)
        return sorted(found, key=lambda write: (write.key, write.token))

    def discard(self, unfinished: Iterable[Unfinished]) -> None:
        """As in `Storage`; without the right to abort uploads they stay, with a warning."""
        for write in unfinished:
            with self._at("discard", write.key) as bucket:
                tidying(bucket, partial(_abort, bucket, write))

    def missing_rights(self) -> Keys:
        """Names of the rights that a run needs and these credentials lack. Makes and removes a small object."""
        with self._at("test", "") as bucket:
            return missing_rights(bucket)

    @contextmanager
    def _at(self, operation: str, key: str) -> Iterator[Bucket]:
        """The bucket for an operation, whose failures become StorageErrors."""
        if key:
            _check_key(self.url, key)
        bucket = None
        try:
            bucket = open_bucket(self.url)
            yield bucket
        except _FAILURES as error:
            cause = FileNotFoundError(str(error)) if is_missing(error) else error
            said, remedy = said_by(error), remedy_for(error)
            if bucket is not None:
                remedy = bucket.connection.credentials.remedy(error) or _of_path(bucket, error) or remedy
            raise storage_error(self.url, operation, key, cause, said=said, remedy=remedy) from error


def _check_key(url: str, key: str) -> None:
    check_key(url, key)
    if not encodes(key):
        raise StorageError(f"{key!r} is not a key below {url}: it has a character that UTF-8 cannot encode.")


def _of_path(bucket: Bucket, error: Exception) -> str | None:
    """Remedy for a server's address that may have too much in it."""
    address = urlsplit(bucket.connection.client.meta.endpoint_url)
    if code_of(error) not in ("NoSuchBucket", "NoSuchKey") or address.path.strip("/") == "":
        return None
    return (
        f"The server's address {address.geturl()} has a path, which most servers do not: without it, it is "
        f"{address.scheme}://{address.netloc}. Otherwise create the bucket, or correct its name."
    )


def _abort(bucket: Bucket, write: Unfinished) -> None:
    try:
        bucket.request("abort_multipart_upload", Key=bucket.location.full(write.key), UploadId=write.token)
    except ClientError as error:
        if code_of(error) != "NoSuchUpload":
            raise


def _delete(bucket: Bucket, keys: Keys) -> None:
    """Delete all keys at once, in no order, or one by one if the server does not support that."""

    def once() -> None:
        answer = bucket.request_once(
            "delete_objects", Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
        )
        for failed in answer.get("Errors", []):
            if failed.get("Code") != "NoSuchKey":
                raise ClientError({"Error": failed, "ResponseMetadata": {"HTTPStatusCode": 0}}, "DeleteObjects")

    if len(keys) > 1:
        try:
            bucket.retrying(once)
            return
        except ClientError as error:
            if not is_refusal(error):
                raise
    for key in keys:
        bucket.request("delete_object", Key=key)
