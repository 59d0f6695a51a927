"""Fixtures for tests on a real S3 server, for every folder of tests. Tests that use them are marked `s3`.

RAYSHARDED_TEST_S3=http://host:port names a server that runs already (access key `test`, secret `testsecret`); without
it one is started, once per test run.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.s3.proxy import FaultyProxy, Stall, Trickle
from tests.s3.server import S3Server, running_server

TIMEOUT_S = 2.0
"""The timeout of storages behind the faulty proxy, for faults that last until it."""
PATIENT_S = 30.0
"""Their timeout for others: not reached on a busy machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultyS3:
    """One place with two addresses: through a proxy that can misbehave on request, and direct."""

    url: str
    direct_url: str
    proxy: FaultyProxy


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that runs."""
    running = os.environ.get("RAYSHARDED_TEST_S3")
    if running:
        yield S3Server(endpoint_url=running)
        return
    with running_server(tmp_path_factory.mktemp("s3") / "ceph") as server:
        yield server


@pytest.fixture(scope="session")
def s3_bucket(s3_server: S3Server) -> str:
    """A new bucket on the server."""
    import boto3

    name = f"tests-{secrets.token_hex(6)}"
    client = boto3.session.Session().client(
        "s3",
        endpoint_url=s3_server.endpoint_url,
        region_name="us-east-1",
        aws_access_key_id=s3_server.access_key,
        aws_secret_access_key=s3_server.secret_key,
    )
    client.create_bucket(Bucket=name)
    return name


@pytest.fixture
def s3_credentials(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's credentials, and nothing else of S3's, in the environment of this process and its children."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.access_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret_key)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)


@pytest.fixture
def s3_url(s3_server: S3Server, s3_bucket: str, s3_credentials: None) -> Iterator[str]:
    """The URL of an empty storage on the server; its contents are removed at the end."""
    from raysharded.checkpoint import open_storage

    url = f"s3://{s3_bucket}/{secrets.token_hex(6)}/run?endpoint_url={s3_server.endpoint_url}"
    yield url
    storage = open_storage(url)  # the server's disk is small
    storage.delete(storage.list())
    storage.discard(storage.unfinished())
    end_other_connections(url)


def end_other_connections(url: str) -> None:
    """End the connections of this process to all endpoints but that of a URL. Each has a client, which takes 13 MB, and
    threads: those to the proxies of all tests would be gigabytes."""
    from raysharded.checkpoint.storage.s3 import connection, location

    kept = location.parse(url).endpoint
    with vars(connection)["_lock"]:
        made = vars(connection)["_connections"]
        others = [made.pop(endpoint) for endpoint in list(made) if endpoint != kept]
    for other in others:
        other.pool.shutdown(wait=False)


@pytest.fixture
def faulty_s3(s3_server: S3Server, s3_url: str, request: pytest.FixtureRequest) -> Iterator[FaultyS3]:
    """An empty storage, behind a separate proxy.

    Its timeout is short, but for a case whose `fault` answers at once: a busy machine would add a retry there.
    """
    timeout_s = TIMEOUT_S if _is_awaited(request) else PATIENT_S
    path = s3_url.partition("?")[0]
    with FaultyProxy(s3_server.endpoint_url) as proxy:
        url = f"{path}?endpoint_url={proxy.endpoint_url}&timeout_s={timeout_s:g}"
        yield FaultyS3(url=url, direct_url=s3_url, proxy=proxy)


def _is_awaited(request: pytest.FixtureRequest) -> bool:
    """Whether a test waits for the timeout, or may do so."""
    case = getattr(request.node, "callspec", None)
    fault = case and case.params.get("fault")
    return fault is None or isinstance(fault, Stall | Trickle) or getattr(fault, "then", None) == "stall"
