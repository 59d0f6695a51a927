"""Rights in a bucket: which of those that a run needs are missing, and what is left out without them."""

from __future__ import annotations

import functools
import logging
import secrets
from collections.abc import Callable

from botocore.exceptions import ClientError

from raysharded.checkpoint.storage.s3.bucket import Answer, Bucket
from raysharded.checkpoint.storage.s3.errors import is_denial, is_missing, right_of

_log = logging.getLogger("raysharded.checkpoint")

FOR_TIDYING = ("s3:ListBucketMultipartUploads", "s3:AbortMultipartUpload")
"""Rights without which uploads of lost writers stay, and nothing else is lost."""


def missing_rights(bucket: Bucket) -> list[str]:
    """The missing rights of those that a run needs, each tried on an object that is removed again.

    The right to abort uploads can be tried only with the right to put. Raises ClientError and the like for failures
    that are about no right.
    """
    missing: list[str] = []
    key, folder = bucket.location.full(f".raysharded-probe-{secrets.token_hex(6)}"), bucket.location.folder("")

    def tried(operation: str, **params: object) -> Answer | None:
        try:
            return bucket.request(operation, **params)
        except ClientError as error:
            if not is_denial(error) and not is_missing(error):
                raise
            if is_denial(error) and right_of(error) not in missing:
                missing.append(right_of(error))
            return None

    tried("put_object", Key=key, Body=b"raysharded")
    if (answer := tried("get_object", Key=key)) is not None:
        answer["Body"].close()
    tried("list_objects_v2", Prefix=folder, MaxKeys=1)
    tried("list_multipart_uploads", Prefix=folder, MaxUploads=1)
    if (upload := tried("create_multipart_upload", Key=key)) is not None:
        tried("abort_multipart_upload", Key=key, UploadId=upload["UploadId"])
    tried("delete_object", Key=key)
    return missing


def tidying(bucket: Bucket, tidy: Callable[[], None]) -> None:
    """Call `tidy`. Without the right to it there is a warning, once per process and bucket, and nothing else."""
    try:
        tidy()
    except ClientError as error:
        if not (is_denial(error) and right_of(error) in FOR_TIDYING):
            raise
        place = f"{bucket.location.bucket} at {bucket.connection.client.meta.endpoint_url}"
        _warn(place, right_of(error), str(bucket.connection.credentials))


@functools.lru_cache(maxsize=64)
def _warn(bucket: str, right: str, key: str) -> None:
    """Warn, once for these arguments."""
    _log.warning(
        "unfinished uploads of lost writers stay in the bucket %s: the right %s is missing to %s. Nothing else is "
        "affected; a lifecycle rule of the bucket, AbortIncompleteMultipartUpload, removes them too",
        bucket,
        right,
        key,
    )
