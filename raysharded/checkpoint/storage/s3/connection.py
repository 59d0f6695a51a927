"""One boto3 client per process and endpoint, shared by all storages and threads, and the threads for its requests.

A client whose credentials are refused is replaced once, by a client with those that are found by then. Requests that
are under way end on the old one.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, IncompleteReadError

import raysharded
from raysharded.checkpoint.storage.s3.answers import refuse_foreign
from raysharded.checkpoint.storage.s3.credentials import Found, Session, look_up, new_session
from raysharded.checkpoint.storage.s3.deadline import watch_over
from raysharded.checkpoint.storage.s3.errors import InvalidConfiguration
from raysharded.checkpoint.storage.s3.location import Endpoint
from raysharded.checkpoint.storage.s3.ranged_reads import Client, RangedReads
from raysharded.checkpoint.threads import Threads

_log = logging.getLogger("raysharded.checkpoint")

LOOK_UP_EVERY_S = 1.0
"""Shortest time between two look-ups of the credentials of one endpoint, while they stay the same."""
NUM_THREADS = 16
"""Concurrent parts and ranges over all storages of one endpoint in this process."""
_MOST_CONNECTIONS = NUM_THREADS + 16  # including those of the callers' threads


@dataclass(slots=True)
class Connection:
    """A client with its threads. Thread-safe. Trying sets `checksums`: see `Bucket.request_with_optional`."""

    endpoint: Endpoint
    reads: RangedReads
    """The client, and its ranged reads."""
    credentials: Found
    """The client's."""
    pool: Threads = field(default_factory=lambda: Threads(NUM_THREADS, thread_name_prefix="raysharded-s3"))
    checksums: bool = True
    """Whether the server accepts requests with checksums."""
    _renewing: threading.Lock = field(default_factory=threading.Lock)
    _looked_up_at: float = float("-inf")

    @property
    def client(self) -> Client:
        return self.reads.client

    def renew(self, refused: Client, error: BaseException) -> bool:
        """True if `client` has other credentials than `refused`, which is replaced if such are found now.

        `error`: that of the request. Threads whose requests were refused together look once. Where the last look-up
        found the same, or credentials that are new at each look-up, one less than `LOOK_UP_EVERY_S` ago counts.
        """
        with self._renewing:
            if self.client is not refused:
                return True
            if not self.credentials.may_be_outdated(error):
                return False
            if time.monotonic() - self._looked_up_at < LOOK_UP_EVERY_S:
                return False
            renewed = False
            try:
                session = new_session()
                found = look_up(session)
                if not found.differ_from(self.credentials):
                    return False
                self.reads, self.credentials = RangedReads(_client(self.endpoint, session)), found
                renewed = not found.renews_itself
            except (BotoCoreError, InvalidConfiguration) as failure:
                _log.info("credentials were refused, and could not be looked up again: %s", failure)
                return False
            finally:
                if not renewed:
                    self._looked_up_at = time.monotonic()
        _log.info("credentials were refused; the next requests use %s", found)
        return True


_connections: dict[Endpoint, Connection] = {}
_lock = threading.Lock()


def connect(endpoint: Endpoint) -> Connection:
    """This process's connection to the endpoint, made at the first call with boto3's own chain of credentials."""
    with _lock:
        if endpoint not in _connections:
            session = new_session()
            found = look_up(session)
            _connections[endpoint] = Connection(endpoint, RangedReads(_client(endpoint, session)), found)
        return _connections[endpoint]


def _client(endpoint: Endpoint, of_botocore: Session) -> Client:
    session = boto3.session.Session(botocore_session=of_botocore)
    client = _new_client(endpoint, session, {})
    encrypted = client.meta.endpoint_url.startswith("https:")
    if encrypted and (client.meta.config.s3 or {}).get("payload_signing_enabled") is None:
        # boto3 itself leaves a body unsigned if TLS and a checksum protect it, but knows only checksums it computes.
        client = _new_client(endpoint, session, {"payload_signing_enabled": False})
    client.meta.events.register_first("before-parse.s3", partial(_check, client.meta.endpoint_url))
    watch_over(client)
    return client


def _new_client(endpoint: Endpoint, session: Session, s3: dict[str, Any]) -> Client:
    style = {} if endpoint.addressing_style is None else {"addressing_style": endpoint.addressing_style}
    config = Config(
        connect_timeout=endpoint.timeout_s,  # also limits how long sending a request may take
        read_timeout=endpoint.timeout_s,
        max_pool_connections=_MOST_CONNECTIONS,
        retries={"total_max_attempts": 1, "mode": "standard"},  # `retry` is the only policy
        request_checksum_calculation="when_required",  # raysharded computes those that it sends
        response_checksum_validation="when_required",
        s3={**style, **s3},
        tcp_keepalive=True,
        user_agent_extra=f"raysharded/{raysharded.__version__}",
    )
    try:
        return session.client("s3", endpoint_url=endpoint.endpoint_url, region_name=endpoint.region, config=config)
    except ValueError as error:  # not botocore's for an endpoint, or a file, that it cannot use
        raise InvalidConfiguration(_said_of(error, endpoint)) from error


def _said_of(error: ValueError, endpoint: Endpoint) -> str:
    """The error, and the variable that it is about. A URL's own endpoint was checked before."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")
    given = next((f"{name}={os.environ[name]}" for name in names if os.environ.get(name)), None)
    if endpoint.endpoint_url is None and given is not None and "endpoint" in str(error).lower():
        return f"{given} is not an address: it begins with http:// or https://"
    return str(error)


def _check(endpoint_url: str, operation_model: Any, response_dict: dict[str, Any], **_: Any) -> None:
    """Reject an answer that is not whole, or not S3's. (Any: botocore has no types.)"""
    _check_length(operation_model, response_dict)
    refuse_foreign(endpoint_url, operation_model.name, response_dict)


def _check_length(operation_model: Any, response_dict: dict[str, Any]) -> None:
    """Reject a partial answer: boto3 takes an empty body for an empty listing."""
    body, length = response_dict.get("body"), response_dict["headers"].get("content-length")
    if not isinstance(body, bytes) or length is None or operation_model.http.get("method") == "HEAD":
        return
    if len(body) != int(length):
        raise IncompleteReadError(actual_bytes=len(body), expected_bytes=int(length))


def _start_anew() -> None:
    """Renew the connections in a forked process: it has no threads of its parent, and must not share its sockets."""
    global _connections, _lock
    _connections, _lock = {}, threading.Lock()


os.register_at_fork(after_in_child=_start_anew)
