"""Whether an answer is an S3 server's.

A console on the next port, a load balancer's default page, a proxy and a captive portal answer too, often with 200.
Such a page is no stored object and no empty listing. So each operation requires what S3's answers have: an ETag, a
certain XML document, 204. Amazon, Ceph and MinIO mark their answers with a request id besides. An answer with that mark
needs no ETag, because servers differ there; documents are always needed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from botocore.utils import get_environ_proxies

from raysharded.display.plain_text import masked, one_line

_DOCUMENTS = {
    "ListObjectsV2": ("ListBucketResult", ("Name", "IsTruncated")),
    "ListMultipartUploads": ("ListMultipartUploadsResult", ("Bucket",)),
    "CreateMultipartUpload": ("InitiateMultipartUploadResult", ("UploadId",)),
    "CompleteMultipartUpload": ("CompleteMultipartUploadResult", ()),
    "DeleteObjects": ("DeleteResult", ()),
}
"""Root element of an operation's answer, and elements that must be in it."""
_WITHOUT_CONTENT = ("DeleteObject", "AbortMultipartUpload")
_MARKS = ("x-amz-request-id", "x-amz-id-2", "x-amz-bucket-region", "x-guploader-uploadid")  # Google's is the last
_PORTAL = 511
_BOTOCORES = 500
"""Status that botocore sets instead of 200 if the body is no XML, before anybody else sees the answer."""
_IN_A_PROXYS_NAME = (401, 403, 407, _PORTAL)
_NEVER_EMPTY = (401, 403, 404, 407)
_OF_MANY_SERVERS = (400, 405, 409, 411, 412, 416, 429, 501)
"""Errors that some S3 servers give without a document. They count as S3's unless they are HTML."""

_FIRST_ELEMENT = re.compile(rb"(?:\xef\xbb\xbf)?(?>\s+|<\?[^>]*\?>|<!--.*?-->)*+<(?:[\w.-]+:)?([\w.-]+)", re.DOTALL)
_TITLE = re.compile(rb"<(title|h1)\b[^>]*>(.*?)</\1", re.DOTALL | re.IGNORECASE)
_TAG = re.compile(rb"<(script|style)\b.*?</\1\s*>|<[^>]*>", re.DOTALL | re.IGNORECASE)
_SHOWN_BYTES = 4096
_SHOWN_CHARACTERS = 80

Headers = Mapping[str, str]


class ForeignAnswer(ConnectionError):
    """An answer that no S3 server sent. It counts as transient: such a page is often shown for a while."""

    def __init__(self, said: str, remedy: str) -> None:
        super().__init__(said)
        self.remedy = remedy


def refuse_foreign(endpoint_url: str, operation: str, response: dict[str, Any]) -> None:
    """Raise ForeignAnswer unless the response (botocore's, before it is parsed) is an S3 server's."""
    status, headers, body = int(response["status_code"]), response["headers"], response["body"]
    if operation == "HeadBucket":  # botocore's own, when it is redirected: to find the bucket's region
        if 300 <= status < 400 and "x-amz-bucket-region" not in headers:
            response["status_code"] = 400  # it would send the same again, for ever
        return
    if _is_of_s3(operation, status, headers, body if isinstance(body, bytes) else b""):
        return
    if not isinstance(body, bytes):
        with suppress(Exception):  # of a connection that ends: then its text is not known
            response["body"] = body.read(_SHOWN_BYTES)
        body.close()
    page = response["body"] if isinstance(response["body"], bytes) else b""
    raise _foreign(endpoint_url, status, headers, page)


def _is_of_s3(operation: str, status: int, headers: Headers, body: bytes) -> bool:
    root = _root(body)
    if root == b"Error":  # also with 200: botocore makes it an error
        return True
    marked = any(mark in headers for mark in _MARKS)
    if status >= 300:
        return marked or _may_be_an_error_of_s3(operation, status, headers, body)
    if operation in _DOCUMENTS:
        name, elements = _DOCUMENTS[operation]
        return root == name.encode() and all(_has(body, element) for element in elements)
    if operation in _WITHOUT_CONTENT:
        return marked or status == 204
    return marked or ("etag" in headers and not _is_html(headers, body))


def _may_be_an_error_of_s3(operation: str, status: int, headers: Headers, body: bytes) -> bool:
    """Whether an error may be S3's, although it has neither the document nor the mark of one."""
    if status == _PORTAL or (300 <= status < 400 and status != 304):
        return False
    if operation.startswith("Head"):
        return status != 407 and not _is_html(headers, body)
    if not body:
        return status not in _NEVER_EMPTY
    if status > 500:
        return True  # also of a server in front of S3's: transient in any case
    return status in _OF_MANY_SERVERS and not _is_html(headers, body) and not _speaks_https(body)


def _foreign(endpoint_url: str, status: int, headers: Headers, body: bytes) -> ForeignAnswer:
    place = headers.get("location")
    text = _text(body)
    kind = headers.get("content-type", "").partition(";")[0].strip() or "no content type"
    shown = f"{kind}: {text!r}" if text else kind
    said = "" if status in (200, _BOTOCORES) else f"{status}, "
    page = one_line(f"{said}{shown}" + (f", to {masked(place)}" if place else ""))
    host = urlsplit(endpoint_url).hostname
    if _speaks_https(body):
        return ForeignAnswer(f"{endpoint_url} speaks https ({page})", "Write https:// instead of http:// there.")
    proxy = proxy_of(endpoint_url)
    if proxy and (status in _IN_A_PROXYS_NAME or 300 <= status < 400):
        return ForeignAnswer(
            f"the proxy {proxy} answered, not S3 ({page})",
            f"Add {host} to NO_PROXY, or have the proxy let these requests pass.",
        )
    remedy = "Is it the port of its console, or a proxy? Give the address of the S3 API."
    if proxy:
        remedy = f"Is it a page of the proxy {proxy}? Then add {host} to NO_PROXY. Or is it the port of a console?"
    return ForeignAnswer(f"what answers at {endpoint_url} is no S3 server ({page})", remedy)


def proxy_of(url: str) -> str:
    """The variable that names a proxy for plain HTTP to this URL, with its value; "" if none does.

    Through TLS a proxy cannot answer in S3's name: it refuses the connection.
    """
    if urlsplit(url).scheme != "http":
        return ""
    proxy = get_environ_proxies(url).get("http")
    variable = "http_proxy" if os.environ.get("http_proxy") else "HTTP_PROXY"
    if proxy and "://" not in proxy:  # botocore adds it, too; without it no password would be found
        proxy = f"http://{proxy.removeprefix('//')}"
    return f"{variable}={masked(proxy)}" if proxy else ""


def _root(body: bytes) -> bytes:
    """Name of the document's root element; b"" if it is no XML."""
    match = _FIRST_ELEMENT.match(body)
    return match[1] if match else b""


def _has(body: bytes, element: str) -> bool:
    return re.search(rb"<(?:[\w.-]+:)?" + element.encode() + rb"\s*>\s*[^<\s]", body) is not None


def _is_html(headers: Headers, body: bytes) -> bool:
    kind = headers.get("content-type", "").lower()
    return "html" in kind or _root(body).lower() == b"html" or body[:64].lstrip().lower().startswith(b"<!doctype html")


def _speaks_https(body: bytes) -> bool:
    """Whether a TLS server answers to plain HTTP, as those of Go (MinIO), nginx and Apache do."""
    start = body[:_SHOWN_BYTES].lower()
    return b"http request to an https server" in start or b"http request was sent to https port" in start


def _text(body: bytes) -> str:
    """The page's title, or its first words."""
    start = body[:_SHOWN_BYTES]
    match = _TITLE.search(start)
    words = _TAG.sub(b" ", match[2] if match else start).decode("utf-8", "replace").split()
    text = " ".join(words)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."
