"""Meaning of a failure of an S3 server or connection: whether to retry, and the user's remedy.

Codes and statuses determine it, never the server's name.
"""

from __future__ import annotations

import http.client

import urllib3.exceptions
from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from raysharded.checkpoint.storage.retry import is_transient
from raysharded.checkpoint.storage.s3.answers import ForeignAnswer

_THROTTLED = {
    "BandwidthLimitExceeded",
    "PriorRequestNotComplete",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestThrottledException",
    "ServiceUnavailable",
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "ThrottledException",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "TooManyRequestsException",
}
_BROKEN_ON_THE_WAY = {
    "BadDigest",
    "IncompleteBody",
    "InternalError",
    "RequestTimeout",
    "RequestTimeoutException",
    "XAmzContentChecksumMismatch",
    "XAmzContentSHA256Mismatch",
}
_IN_CONFLICT = {"ConditionalRequestConflict", "OperationAborted"}  # another writer is active at this moment
_MAY_PASS = _THROTTLED | _BROKEN_ON_THE_WAY | _IN_CONFLICT
_WILL_NOT_PASS = (501, 505, 507)  # not implemented, HTTP version, storage full

EXPIRED_CREDENTIALS = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"})
UNKNOWN_CREDENTIALS = frozenset(
    {
        "InvalidAccessKeyId",
        "InvalidClientTokenId",
        "InvalidSecurity",
        "InvalidToken",
        "InvalidTokenId",  # MinIO's
        "SignatureDoesNotMatch",
        "UnrecognizedClientException",
    }
)

_REGION = "The bucket is in another region: add ?region=... to the URL, or set AWS_REGION."
_FULL = "Free some space or raise the quota, keep fewer checkpoints, or choose another folder or URL."
_REMEDIES = {
    "AllAccessDisabled": "Allow these credentials to use the bucket.",
    "NoSuchBucket": "Create the bucket, or correct its name.",
    "AuthorizationHeaderMalformed": _REGION,
    "PermanentRedirect": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "RequestTimeTooSkewed": "This machine's clock differs from the server's: set it.",
    "NoSuchUpload": "Someone removed the upload while it was written: let no clean-up run while a writer is alive.",
    "PreconditionFailed": "The object was replaced while it was read: read it again.",
    "QuotaExceeded": _FULL,
    "InsufficientStorage": _FULL,
    "XMinioStorageFull": _FULL,
}


_RIGHTS = {
    "ListObjectsV2": "s3:ListBucket",
    "ListMultipartUploads": "s3:ListBucketMultipartUploads",
    "AbortMultipartUpload": "s3:AbortMultipartUpload",
    "GetObject": "s3:GetObject",
    "HeadObject": "s3:GetObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
}
"""Right of an operation; that of all others is s3:PutObject."""


class InvalidConfiguration(OSError):
    """boto3 cannot make a client with what the environment and its files give."""


def code_of(error: BaseException) -> str:
    """The server's error code; "" if the error is not the server's."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, boto.ClientError) else ""


def status_of(error: BaseException) -> int:
    """HTTP status of the answer; 0 if there was none."""
    if not isinstance(error, boto.ClientError):
        return 0
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def may_pass(error: BaseException) -> bool:
    """Whether the same request may succeed a little later."""
    if isinstance(error, boto.ClientError):
        status = status_of(error)
        return code_of(error) in _MAY_PASS or status == 429 or (status >= 500 and status not in _WILL_NOT_PASS)
    if isinstance(error, boto.SSLError):
        return "CERTIFICATE" not in str(error).upper()
    if isinstance(error, boto.HTTPClientError) and type(error) is boto.HTTPClientError:
        cause = error.kwargs.get("error")  # the reason why sending failed
        return isinstance(cause, (OSError, urllib3.exceptions.HTTPError, http.client.HTTPException))
    if isinstance(
        error,
        (
            boto.ConnectionError,
            boto.HTTPClientError,
            boto.IncompleteReadError,
            boto.FlexibleChecksumError,
            ResponseParserError,  # a partial answer
            urllib3.exceptions.HTTPError,
            http.client.HTTPException,
        ),
    ):
        return True
    return is_transient(error)


def is_missing(error: BaseException) -> bool:
    """Whether there is no such object. (To HEAD, a missing bucket gives the same answer.)"""
    return code_of(error) in ("NoSuchKey", "404", "NotFound")


def is_taken(error: BaseException) -> bool:
    """Whether the condition of a put did not hold."""
    return status_of(error) == 412


def is_refusal(error: BaseException) -> bool:
    """Whether the server may refuse something optional in the request, so that it may succeed without."""
    known = code_of(error) in _REMEDIES or code_of(error) in EXPIRED_CREDENTIALS | UNKNOWN_CREDENTIALS
    return status_of(error) in (400, 405, 411, 501) and not known and not may_pass(error)


def right_of(error: BaseException) -> str:
    """Right that the refused operation needs."""
    assert isinstance(error, boto.ClientError), error
    return _RIGHTS.get(error.operation_name, "s3:PutObject")


def is_denial(error: BaseException) -> bool:
    """Whether the credentials lack a right. Some servers answer so to keys that are disabled, too."""
    return status_of(error) == 403 and code_of(error) in ("AccessDenied", "403", "Forbidden")


def said_by(error: BaseException) -> str | None:
    """The server's answer as text, if there was one."""
    if isinstance(error, (ForeignAnswer, InvalidConfiguration)):
        return str(error)
    if isinstance(error, boto.ProxyConnectionError):
        reason = getattr(error.kwargs["error"], "original_error", error.kwargs["error"])
        return f"the proxy {error.kwargs['proxy_url']} does not connect ({reason})"
    if not isinstance(error, boto.ClientError):
        return None
    message = error.response.get("Error", {}).get("Message")
    code = code_of(error)
    status = f"{status_of(error)} " if status_of(error) and str(status_of(error)) != code else ""
    return f"the server answered {error.operation_name} with {status}{code}" + (
        f" ({message})" if message and message != "None" else ""
    )


def remedy_for(error: BaseException) -> str | None:
    """Remedy for the user, if one is known."""
    if isinstance(error, (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError)):
        return (
            "Give boto3 credentials on the driver and on every worker: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "AWS_PROFILE, ~/.aws, or a role of the machine."
        )
    if isinstance(error, ForeignAnswer):
        return error.remedy
    if isinstance(error, InvalidConfiguration):
        return "Correct it on the driver and on every worker (boto3's variables and ~/.aws), or leave it out."
    if isinstance(error, boto.ProxyConnectionError):
        return (
            "HTTP_PROXY or HTTPS_PROXY names this proxy: have it let these requests pass, or add the server's host to "
            "NO_PROXY."
        )
    if isinstance(error, boto.SSLError) and _is_no_tls(error):
        return "What answers there does not speak https: write http:// instead, or correct the port."
    if isinstance(error, (boto.ConnectionError, boto.HTTPClientError)):
        return "Check that the server runs at this address and can be reached from this machine."
    if isinstance(error, TimeoutError):
        return "The server answers too slowly: check it and the network to it, or raise timeout_s in the URL."
    if status_of(error) == 507:
        return _FULL
    if status_of(error) == 403:
        return _REMEDIES.get(code_of(error), f"Allow these credentials {right_of(error)} there.")
    return _REMEDIES.get(code_of(error))


def _is_no_tls(error: BaseException) -> bool:
    """Whether the other side does not speak TLS, in the words of OpenSSL 3 and its predecessors."""
    return any(word in str(error).upper() for word in ("WRONG_VERSION_NUMBER", "RECORD LAYER FAILURE", "HTTP_REQUEST"))
