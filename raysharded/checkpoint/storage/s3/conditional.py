"""Conditional writes: put-if-absent by `PutObject` with `If-None-Match: *`, swaps with `If-Match` and the ETag read.

Whether a server honours the condition is found by trying. For put-if-absent, other servers get the fallback: read,
write, read back. Of writers that race within that window the last one wins, and an earlier one may have reported
success. Within one process the calls are made one at a time, so that exactly one wins there on every server. Swaps have
no fallback.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from botocore.exceptions import ClientError

from raysharded.checkpoint.storage.s3.bucket import Bucket, open_bucket
from raysharded.checkpoint.storage.s3.errors import is_missing, is_refusal, is_taken

_log = logging.getLogger("raysharded.checkpoint")
_fallback_lock = threading.Lock()


def put_if_absent(bucket: Bucket, key: str, data: bytes) -> bool:
    """True if `data` is now under the object's key `key`, because nothing was there before."""
    if honours_condition(bucket.url):
        return _put_once(bucket, key, data)
    with _fallback_lock:
        return _look_and_put(bucket, key, data)


def swap(bucket: Bucket, key: str, expected: bytes, data: bytes) -> bool:
    """True if `data` is now under the object's key `key`, where `expected` was.

    Only for servers that honour the condition, as `spelling` finds.
    """
    spelt = spelling(bucket.url)
    assert spelt is not None, "require_swaps comes first"
    sent = False  # if so, the object there may be this call's, whose reply was lost

    def once() -> bool:
        nonlocal sent
        again, sent = sent, True
        try:
            found, etag = bucket.fetch_tagged(key)
        except ClientError as error:
            if is_missing(error):
                return False
            raise
        if found != expected:
            return again and found == data
        return _put_instead(bucket, key, spelt(etag), data) or (again and _found(bucket, key) == data)

    return bucket.retrying(once)


def _as_given(etag: str) -> str:
    return etag


def _without_quotes(etag: str) -> str:
    """The ETag without quotes, as older Ceph servers compare it: they take the quotes for a part of it."""
    return etag.strip('"')


@functools.lru_cache(maxsize=64)
def spelling(url: str) -> Callable[[str], str] | None:
    """Spelling of an ETag in `If-Match` with which the server replaces only the object that has it.

    Tried on a probe. None if the server does not honour the condition.
    """
    bucket = open_bucket(url)
    probe = bucket.location.full(f".raysharded-probe-{secrets.token_hex(6)}")
    try:
        for spelt in (_as_given, _without_quotes):
            bucket.request("put_object", Body=b"first", Key=probe)
            etag = spelt(bucket.retrying(partial(bucket.fetch_tagged, probe))[1])
            if bucket.retrying(partial(_put_instead, bucket, probe, etag, b"second")):
                return None if bucket.retrying(partial(_put_instead, bucket, probe, etag, b"third")) else spelt
    except ClientError as error:
        if not is_refusal(error):
            raise
    finally:
        with suppress(Exception):  # a leftover probe is harmless
            bucket.request_once("delete_object", Key=probe)
    return None


def _put_instead(bucket: Bucket, key: str, etag: str, data: bytes) -> bool:
    """True if `data` replaced the object that has the ETag, in one attempt."""
    try:
        bucket.send("put_object", data, Key=key, IfMatch=etag)
    except ClientError as error:
        if is_taken(error) or is_missing(error):
            return False
        raise
    return True


@functools.lru_cache(maxsize=64)
def honours_condition(url: str) -> bool:
    """Whether the server refuses to put over an existing object, tried on a probe once per process and URL."""
    bucket = open_bucket(url)
    probe = bucket.location.full(f".raysharded-probe-{secrets.token_hex(6)}")
    try:
        _put_once(bucket, probe, b"first")
        honours = not _put_once(bucket, probe, b"second")
    except ClientError as error:
        if not is_refusal(error):
            raise
        honours = False
    finally:
        with suppress(Exception):  # a leftover probe is harmless
            bucket.request_once("delete_object", Key=probe)
    if not honours:
        _log.warning("%s does not put conditionally: writers of several processes that race may both win", url)
    return honours


def _put_once(bucket: Bucket, key: str, data: bytes) -> bool:
    sent = False  # if so, the object there may be this call's, whose reply was lost

    def once() -> bool:
        nonlocal sent
        again, sent = sent, True
        try:
            bucket.send("put_object", data, Key=key, IfNoneMatch="*")
        except ClientError as error:
            if not is_taken(error):
                raise
            return again and _found(bucket, key) == data
        return True

    return bucket.retrying(once)


def _look_and_put(bucket: Bucket, key: str, data: bytes) -> bool:
    sent = False

    def once() -> bool:
        nonlocal sent
        if _found(bucket, key) is None:
            sent = True
            bucket.send("put_object", data, Key=key)
        return sent and _found(bucket, key) == data

    return bucket.retrying(once)


def _found(bucket: Bucket, key: str) -> bytes | None:
    try:
        return bucket.fetch(key)
    except ClientError as error:
        if is_missing(error):
            return None
        raise


def _start_anew() -> None:
    """Renew the lock in a forked process: a thread of its parent may hold the old one."""
    global _fallback_lock
    _fallback_lock = threading.Lock()


os.register_at_fork(after_in_child=_start_anew)
