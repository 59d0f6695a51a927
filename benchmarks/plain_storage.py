"""Plain writes and reads of bytes without raysharded: the limits that its checkpoints are measured against."""

from __future__ import annotations

import functools
import io
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np
from numpy.typing import NDArray

PART_BYTES = 8 << 20
NUM_UPLOADS = 4
NUM_READS = 8
READ_BYTES = 16 << 20


def write(url: str, name: str, data: NDArray[np.uint8]) -> None:
    """Write a file; it is durable on return."""
    if url.startswith("s3://"):
        _upload(url, name, data)
        return
    os.makedirs(os.path.dirname(os.path.join(url, name)), exist_ok=True)
    with open(os.path.join(url, name), "wb", buffering=0) as file:
        view, at = data.data, 0
        while at < len(view):
            at += file.write(view[at : at + PART_BYTES])
        os.fsync(file.fileno())


def read(url: str, ranges: list[tuple[str, int, int]], out: NDArray[np.uint8]) -> None:
    """Fills `out` with the bytes start..stop of each (file, start, stop), one after the other."""
    if url.startswith("s3://"):
        _download(url, ranges, out)
        return
    view, at = out.data, 0
    for name, start, stop in ranges:
        end = at + stop - start
        with open(os.path.join(url, name), "rb", buffering=0) as file:
            file.seek(start)
            while at < end:
                at += file.readinto(view[at : min(at + PART_BYTES, end)])


def drop_caches(url: str) -> None:
    """Make reads of a folder's files come from the disk again. (Another server's cache stays as it is.)"""
    if url.startswith("s3://"):
        return
    for path in Path(url).rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


@functools.cache
def client_of(url: str) -> tuple[Any, str, str]:
    """(client, bucket, prefix) of an S3 URL."""
    import boto3
    from botocore.config import Config

    parts = urlsplit(url)
    options = {key: values[0] for key, values in parse_qs(parts.query).items()}
    style = {"addressing_style": options.get("addressing_style", "auto")}
    client = boto3.client(
        "s3",
        endpoint_url=options.get("endpoint_url"),
        region_name=options.get("region"),
        config=Config(max_pool_connections=NUM_READS, s3=style),
    )
    return client, parts.netloc, parts.path.strip("/")


def _upload(url: str, name: str, data: NDArray[np.uint8]) -> None:
    from boto3.s3.transfer import TransferConfig

    client, bucket, prefix = client_of(url)
    transfer = TransferConfig(multipart_chunksize=PART_BYTES, max_concurrency=NUM_UPLOADS)
    client.upload_fileobj(io.BytesIO(data.data), bucket, f"{prefix}/{name}", Config=transfer)


def _download(url: str, ranges: list[tuple[str, int, int]], out: NDArray[np.uint8]) -> None:
    client, bucket, prefix = client_of(url)

    def get(name: str, start: int, stop: int, at: int) -> None:
        body = client.get_object(Bucket=bucket, Key=f"{prefix}/{name}", Range=f"bytes={start}-{stop - 1}")["Body"]
        out[at : at + stop - start] = np.frombuffer(body.read(), np.uint8)

    at, calls = 0, []
    with ThreadPoolExecutor(NUM_READS) as pool:
        for name, first, last in ranges:
            for start in range(first, last, READ_BYTES):
                stop = min(start + READ_BYTES, last)
                calls.append(pool.submit(get, name, start, stop, at))
                at += stop - start
    for call in calls:
        call.result()
