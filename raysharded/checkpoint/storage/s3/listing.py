"""Listings of a bucket: objects, folders, unfinished uploads, and the sizes of objects whose keys are known.

A listing of S3 has at most a thousand keys per request, and the next one begins behind the last. So a long one takes as
many turns. Where the keys are known, each request may begin at one of them, and all are sent at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from botocore.exceptions import ClientError

from raysharded.checkpoint.storage.s3.bucket import Answer, Bucket
from raysharded.checkpoint.storage.s3.errors import is_refusal

PAGE_KEYS = 1000
"""The most keys in an answer of S3."""


def objects(bucket: Bucket, folder: str) -> Iterator[dict[str, Any]]:
    """Every object below the folder; each page is requested when it is needed."""
    for page in _pages(bucket, Prefix=bucket.location.folder(folder)):
        yield from page.get("Contents", [])


def folders(bucket: Bucket) -> Iterator[dict[str, Any]]:
    """Beginnings of the keys in the storage, up to the next `/`."""
    for page in _pages(bucket, Prefix=bucket.location.folder(""), Delimiter="/"):
        yield from page.get("CommonPrefixes", [])


def sizes_between(bucket: Bucket, keys: Sequence[str]) -> dict[str, int]:
    """Bytes of those of these full keys, all in the storage, that listings between them have.

    A server that does not sort its listings, or refuses to begin in the middle, has fewer than there are.
    """
    wanted = sorted(set(keys), key=str.encode)
    parts = [wanted[start : start + PAGE_KEYS] for start in range(0, len(wanted), PAGE_KEYS)]
    behind = ["", *(part[-1] for part in parts)]
    found: dict[str, int] = {}
    try:
        for some in bucket.connection.pool.map(lambda *of: _sizes(bucket, *of), parts, behind):
            found |= some
    except ClientError as error:
        if not is_refusal(error):
            raise
    return found


def _sizes(bucket: Bucket, keys: Sequence[str], behind: str) -> dict[str, int]:
    """Bytes of those of these keys, sorted, that a listing has from `behind` on up to the last of them."""
    wanted, last, found = set(keys), keys[-1].encode(), dict[str, int]()
    begin = {"StartAfter": behind} if behind else {}
    for page in _pages(bucket, Prefix=bucket.location.folder(""), MaxKeys=PAGE_KEYS, **begin):
        listed = page.get("Contents", [])
        found |= {item["Key"]: int(item["Size"]) for item in listed if item["Key"] in wanted}
        if listed and listed[-1]["Key"].encode() >= last:
            break
    return found


def uploads(bucket: Bucket, folder: str) -> Iterator[dict[str, Any]]:
    """Every unfinished upload below the folder."""
    at: Answer = {}
    while True:
        page = bucket.request("list_multipart_uploads", Prefix=bucket.location.folder(folder), **at)
        yield from page.get("Uploads", [])
        if not page.get("IsTruncated"):
            return
        at = {"KeyMarker": _next(page, "NextKeyMarker")}
        if page.get("NextUploadIdMarker"):
            at["UploadIdMarker"] = page["NextUploadIdMarker"]


def _pages(bucket: Bucket, **of: Any) -> Iterator[Answer]:
    at: Answer = {}
    while True:
        page = bucket.request("list_objects_v2", **of, **at)
        yield page
        if not page.get("IsTruncated"):
            return
        at = {"ContinuationToken": _next(page, "NextContinuationToken")}


def _next(page: Answer, name: str) -> str:
    """Beginning of the next page of a listing. Raises ConnectionError if the server does not state it."""
    if not page.get(name):
        raise ConnectionError(f"the server's listing is not whole, and has no {name}")
    return str(page[name])
