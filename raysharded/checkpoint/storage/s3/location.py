"""Target of an `s3://` URL: bucket, prefix, and the options after its `?`."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass
from urllib.parse import parse_qsl

from raysharded.checkpoint.format.paths import is_below
from raysharded.errors import StorageError

DEFAULT_TIMEOUT_S = 60.0

_STYLES = ("auto", "path", "virtual")
_OPTIONS = ("endpoint_url", "region", "addressing_style", "timeout_s")


@dataclass(frozen=True, kw_only=True, slots=True)
class Endpoint:
    """Access to the server. boto3 determines values of None."""

    endpoint_url: str | None = None
    region: str | None = None
    addressing_style: str | None = None
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Limit for each of connecting, sending one request, waiting for its answer, and receiving that."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A bucket on a server, and the beginning of all its keys ("" or "a/b", without `/` around it)."""

    endpoint: Endpoint
    bucket: str
    prefix: str

    def full(self, key: str) -> str:
        """Key of the object in the bucket."""
        return f"{self.prefix}/{key}" if self.prefix else key

    def folder(self, folder: str) -> str:
        """Beginning of the keys of all objects below a folder; "" is the whole storage."""
        whole = "/".join(part for part in (self.prefix, folder) if part)
        return f"{whole}/" if whole else ""

    def relative(self, full: str) -> str:
        return full[len(self.prefix) + 1 :] if self.prefix else full


@functools.lru_cache(maxsize=256)
def parse(url: str) -> Location:
    """Location of a URL. Raises StorageError unless it is `s3://bucket/prefix?option=value&...` without credentials."""
    if not encodes(url):
        shown = url.encode("utf-8", "backslashreplace").decode()
        raise _refused(shown, "it has a character that UTF-8 cannot encode, as the name of a file may have, but no key")
    path, _, query = url.partition("?")
    if "@" in path.removeprefix("s3://").partition("/")[0]:
        raise _with_credentials("the bucket has a user or keys before it")
    match = re.fullmatch(r"[sS]3://([^/]+)((?:/[^/]+)*)/*", path)
    if match is None:
        raise _refused(url, "it must look like s3://bucket/prefix, without empty parts")
    if not is_below(f"{match[1]}{match[2]}"):
        raise _refused(url, "'.' and '..' are not resolved there, and must not be parts of it")
    try:
        options = dict(parse_qsl(query, strict_parsing=True) if query else [])
    except ValueError as error:
        raise _refused(url, f"what follows '?' is not option=value&... ({error})") from error
    return Location(endpoint=_endpoint(url, options), bucket=match[1], prefix=match[2].strip("/"))


def encodes(text: str) -> bool:
    """Whether UTF-8 can encode the text: a file name may have other bytes, as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _endpoint(url: str, options: dict[str, str]) -> Endpoint:
    unknown = sorted(options.keys() - set(_OPTIONS))
    if unknown:
        raise _refused(url, f"there is no option {unknown[0]!r}")
    style, server = options.get("addressing_style"), options.get("endpoint_url")
    if style is not None and style not in _STYLES:
        raise _refused(url, f"addressing_style={style!r} is none of {', '.join(_STYLES)}")
    if server is not None and not re.match(r"https?://[^/]", server, re.IGNORECASE):
        raise _refused(url, f"endpoint_url={server!r} does not begin with http:// or https:// and a host")
    if server is not None and "@" in re.split(r"[/?#]", server.partition("://")[2], maxsplit=1)[0]:
        raise _with_credentials("its endpoint_url has a user or a password in it")
    return Endpoint(
        endpoint_url=server and re.sub("^[^:]*", lambda scheme: scheme[0].lower(), server),
        region=options.get("region"),
        addressing_style=style,
        timeout_s=_seconds(url, options.get("timeout_s", str(DEFAULT_TIMEOUT_S))),
    )


def _seconds(url: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.1 <= seconds <= 3600:
        raise _refused(url, f"timeout_s={text!r} is not a number of seconds from 0.1 to 3600")
    return seconds


def _with_credentials(what: str) -> StorageError:
    """The error for a URL that is not shown: it holds a secret."""
    return StorageError(
        f"an s3:// URL has credentials in it: {what}. URLs are shown, recorded and sent to every worker. Leave them "
        "out, and give boto3 the credentials: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or ~/.aws."
    )


def _refused(url: str, why: str) -> StorageError:
    return StorageError(f"{url} is not the URL of an S3 storage: {why}. Options: {', '.join(_OPTIONS)}.")
